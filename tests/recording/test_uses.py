"""How parameters are found in a model's calls: what is seen, under which name, and let go."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from tests.cases.layers import Positions
from tests.told import told
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.errors import RecordingError


def fit(
    model: nn.Module,
    path: Path,
    inputs: list[Tensor],
    make: type = torch.optim.SGD,
    **options: bool,
) -> dualform.Run:
    """Trains a step on each input, towards zero."""
    optimizer = make(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path, **options) as recorder:
        for x in inputs:
            recorder.samples(range(len(x)))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path)


@pytest.mark.parametrize("model", [nn.Linear(4, 3), nn.LSTM(4, 3), nn.Conv1d(4, 3, 1)], ids=str)
def test_no_graph_is_kept_alive(model: nn.Module, tmp_path: Path) -> None:
    """Neither after a backward pass, nor where there never is one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, outputs = torch.randn(2, 4, 4), []
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run"):
        for backward in (True, False, True):
            found = model(x)
            out = found[0] if isinstance(found, tuple) else found
            outputs.append(weakref.ref(out))
            if backward:
                out.square().sum().backward()
                optimizer.step()
            del found, out
        assert [output() for output in outputs] == [None] * 3


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD])
@pytest.mark.parametrize("remembers", [True, False])
def test_going_on_with_an_optimizer(make: type, remembers: bool, tmp_path: Path) -> None:
    """The books balance whether the optimizer is the old one or a fresh one."""
    torch.manual_seed(0)
    model, path = nn.Linear(4, 3).double(), tmp_path / "run"
    inputs = [torch.randn(5, 4).double() for _ in range(4)]
    options = {"lr": 0.1, "momentum": 0.9} if make is torch.optim.SGD else {"lr": 0.1}
    optimizer = make(model.parameters(), **options)
    for part in range(2):
        if part and not remembers:
            optimizer = make(model.parameters(), **options)
        with dualform.record(model, optimizer, path, resume=part > 0):
            for x in inputs:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    audit = dualform.open(path).audit()
    assert audit.step == 8
    assert audit.coverage == 1.0
    assert audit.remainder < 1e-12


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_half_frozen_layers_can_be_asked(frozen: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    getattr(model, frozen).requires_grad_(False)
    x = torch.randn(5, 4)
    run = fit(model, tmp_path / "run", [x, x])
    reading = run.spotlight(model, x[:2])["model"]
    assert run.audit().coverage == 1.0
    assert abs(reading.check.remainder).max() < 1e-6
    assert abs(reading.samples().values).max() > 0


def test_a_bias_unfrozen_on_the_way(tmp_path: Path) -> None:
    model, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double(),
        torch.randn(5, 4),
    )
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for number in range(4):
            model[2].bias.requires_grad_(number > 1)
            model(x.double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    audit = dualform.open(tmp_path / "run").audit()
    assert audit.coverage == 1.0, audit
    assert audit.remainder < 1e-12


def test_positions_are_asked_where_they_meet_the_samples(tmp_path: Path) -> None:
    model, x = Positions(), torch.randint(0, 7, (4, 5))
    run = fit(model, tmp_path / "run", [x, x])
    reading = run.spotlight(model, x[:2])["places"]
    assert reading.queries.names == [f"{sample}[{at}]" for sample in range(2) for at in range(5)]


def test_images_of_another_size(tmp_path: Path) -> None:
    """Streams of several sizes feed one book; a size never trained on can be asked about."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)
    )
    run = fit(model, tmp_path / "run", [torch.randn(4, 1, side, side) for side in (5, 6, 5)])
    assert run.layers == ["0", "3", "0@2"]
    assert run.audit().remainder < 1e-5
    spotlight = run.spotlight(model, torch.randn(1, 1, 4, 4))
    assert list(spotlight) == ["0", "3"]
    assert len(spotlight["0"].names) == 4
    assert spotlight.last.layer == "3"
    assert abs(spotlight["0"].check.remainder).max() < 1e-6


class TwoWays(nn.Module):
    """One product written in two ways, for a sample and for its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).square().sum(1) + F.linear(x.mean(1), self.w.T)


def test_the_same_use_in_two_ways_is_one_stream(tmp_path: Path) -> None:
    """Rows of both calls belong to their samples, also where one has more positions."""
    model, x = TwoWays().double(), torch.randn(5, 2, 4).double()
    twin = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with dualform.record(model, sgd, tmp_path / "run"):
        model(x).square().sum().backward()
        sgd.step()
    run = dualform.open(tmp_path / "run")
    assert run.layers == ["w"]
    assert [book.rows for book in run.audit().books] == [5 * 2 + 5]
    twin(x[3:4]).square().sum().backward()
    share = run.subtract([3])["w"] - run.state_dict()["w"]
    torch.testing.assert_close(share, twin.w.grad, rtol=1e-12, atol=1e-12)
    spotlight = run.spotlight(model, x[:1])
    assert spotlight["w"].queries.names == ["0[0] (call 1)", "0[1] (call 1)", "0 (call 2)"]
    assert abs(spotlight["w"].check.remainder).max() < 1e-12


class Chunks(nn.Module):
    """Parts of one parameter, used apart."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both.chunk(2)
        return F.linear(x, first) * F.linear(x, second)


def test_parts_of_a_parameter_have_names(tmp_path: Path) -> None:
    model, x = Chunks(), torch.randn(5, 4)
    run = fit(model, tmp_path / "run", [x])
    assert sorted(run.layers) == ["both[0:3]", "both[3:6]"]
    first = run.spotlight(model, x[:1])["both[0:3]"]
    assert abs(first.check.remainder).max() < 1e-6
    assert len(first.samples().ids) == 5


@pytest.mark.parametrize("compiled", ["model", "module", "in place"])
def test_compiled_models_are_refused(compiled: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    given: nn.Module = model
    if compiled == "model":
        given = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif compiled == "module":
        model[0] = torch.compile(model[0], backend="eager")
    else:
        model.compile(backend="eager")
    with (
        pytest.raises(RecordingError, match=r"is compiled.*without torch\.compile"),
        dualform.record(given, torch.optim.SGD(model.parameters()), tmp_path / "run"),
    ):
        pass


def test_a_model_called_through_a_compiled_wrapper(tmp_path: Path) -> None:
    """While a run is recorded, compiled functions run as they were written."""
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4)
    wrapper = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            wrapper(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    audit = dualform.open(tmp_path / "run").audit()
    assert audit.remainder < 1e-6
    assert audit.coverage == 1.0


def test_functional_calls(tmp_path: Path) -> None:
    """With the model's own parameters by row; with tensors made from them by step."""
    for name, change in (("own", 1.0), ("scaled", 2.0)):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 3).double(), torch.randn(5, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with told(tmp_path / name), dualform.record(model, optimizer, tmp_path / name):
            for _ in range(3):
                own = dict(model.named_parameters())
                given = own if change == 1 else {key: p * change for key, p in own.items()}
                torch.func.functional_call(model, given, (x,)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        audit = dualform.open(tmp_path / name).audit()
        assert audit.coverage == float(change == 1), audit
        assert audit.remainder < 1e-12


def test_modules_called_by_themselves(tmp_path: Path) -> None:
    """A model whose own forward never runs: its parts are seen, batch after batch."""
    model = nn.ModuleDict({"one": nn.Linear(4, 5), "two": nn.Linear(5, 3)}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            x = torch.randn(6, 4).double()
            model["two"](model["one"](x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = dualform.open(tmp_path / "run")
    assert run.audit().coverage == 1.0
    assert run.audit().remainder < 1e-12
    assert len(run.ids) == 18


def test_memory_is_flat_while_cells_are_recorded(tmp_path: Path) -> None:
    """A hook on the two outputs of a cell would keep its graph alive."""
    cell, x = nn.LSTMCell(4, 3), torch.randn(5, 4)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    counts = []
    with dualform.record(cell, optimizer, tmp_path / "run") as recorder:
        for step in range(30):
            recorder.samples(range(5))
            hidden, memory = cell(x)
            (hidden.sum() + memory.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (9, 29):
                recorder.checkpoint()
                counts.append(alive())
    assert counts[1] - counts[0] <= 5
