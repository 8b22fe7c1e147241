"""Weight norms: what a sample adds to `g` and `v`, of any size and along any dimension.

The rows of `v` share a matrix, which is kept once a use. The other form that computed weights have,
each sample's gradient in full, says the same; it is what reads are compared with.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases.case import Case, squares
from tests.cases.structures import numbers
from tests.laws.attribution import attribution_holds
from tests.told import told
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import dualform
from dualform.layers.derived import LARGEST, WeightNorm
from dualform.recording.recorder import Recorder

normed = parametrizations.weight_norm


class ByHooks(nn.Module):
    """A layer normed as torch did first, which cannot be copied once it was called."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self._make = make
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.layer = nn.utils.weight_norm(make())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def __deepcopy__(self, memo: Any) -> ByHooks:
        twin = ByHooks(self._make).double()
        twin.load_state_dict(self.state_dict())
        return twin


LARGE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: normed(nn.Linear(600, 600)), (600,)),
    "Linear by hooks": (lambda: ByHooks(lambda: nn.Linear(600, 600)), (600,)),
    "Linear of tokens, by input": (lambda: normed(nn.Linear(600, 500), dim=1), (3, 600)),
    "Conv1d": (lambda: normed(nn.Conv1d(256, 256, 7, padding=3)), (256, 9)),
    "Conv1d by hooks": (lambda: ByHooks(lambda: nn.Conv1d(256, 256, 7, padding=3)), (256, 9)),
    "Conv1d in groups, by place": (
        lambda: normed(nn.Conv1d(128, 128, 66, padding=33, groups=4), dim=2),
        (128, 8),
    ),
    "Conv2d": (lambda: normed(nn.Conv2d(64, 64, 9)), (64, 10, 10)),
    "Conv2d, one norm": (lambda: normed(nn.Conv2d(64, 64, 9), dim=None), (64, 10, 10)),
    "ConvTranspose1d": (lambda: normed(nn.ConvTranspose1d(256, 128, 16, stride=8)), (256, 4)),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_sample_added_what_its_loss_did_however_large_the_weight(
    name: str, tmp_path: Path
) -> None:
    make, shape = LARGE[name]
    assert max(p.numel() for p in make().parameters()) > LARGEST
    case = Case(make, numbers(6, *shape), squares)
    audit = attribution_holds(case, tmp_path / "run", steps=2)
    assert audit.coverage == 1.0, audit
    assert audit.remainder < 1e-12, audit


class Routed(nn.Module):
    """Two layers, of which the data says which sees a token."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = normed(nn.Linear(5, 4)), normed(nn.Linear(5, 4), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        first = x[..., 0] > 0
        out = x.new_zeros(*x.shape[:-1], 4)
        out[first], out[~first] = self.one(x[first]), self.two(x[~first])
        return out


def test_rows_that_the_data_moves(tmp_path: Path) -> None:
    case = Case(lambda: Routed().double(), numbers(6, 3, 5), squares)
    assert attribution_holds(case, tmp_path / "run").coverage == 1.0


def tokens(dim: int | None) -> nn.Module:
    layers = normed(nn.Linear(6, 5), dim=dim), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)
    return nn.Sequential(*layers)


def lines(dim: int | None) -> nn.Module:
    return nn.Sequential(
        normed(nn.Conv1d(4, 6, 3, groups=2), dim=dim),
        nn.Tanh(),
        normed(nn.ConvTranspose1d(6, 4, 3, stride=2, groups=2), dim=dim),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


MODELS = {
    **{f"tokens, {dim}": partial(tokens, dim) for dim in (0, 1, None)},
    **{f"lines, {dim}": partial(lines, dim) for dim in (0, 1, 2, None)},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


def trained(
    make: Callable[[], nn.Module], optimizer: str, path: Path
) -> tuple[dualform.Run, nn.Module, Tensor]:
    """Eight steps in float64, the third of which is marked between its backward pass and it."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = make().double()
    shape = (4, 6)
    x = torch.randn(12, *shape, generator=generator).double()
    y = torch.randint(0, 3, (12,), generator=generator)
    steps = OPTIMIZERS[optimizer](model.parameters())
    with dualform.record(model, steps, path) as recorder:
        for number in range(8):
            ids = torch.randperm(12, generator=generator)[:5]
            recorder.samples(ids)
            F.cross_entropy(model(x[ids]), y[ids]).backward()
            if number == 2:
                recorder.checkpoint()
            steps.step()
            steps.zero_grad()
    return dualform.open(path), model, x


def reads(run: dualform.Run, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What a run says, by the name of the read."""
    spotlight, explained = run.spotlight(model, x[:2]), run.explain(model, x[:3], 1)
    found = {f"without {name}": part for name, part in run.subtract([0, 3]).items()}
    found |= {f"state {name}": part for name, part in run.at(5).state_dict().items()}
    found |= {f"layer {name}": spotlight[name].samples().values for name in spotlight}
    found |= {f"book {name}": part for name, part in explained.books.items()}
    found["explain"] = explained.values
    found["timeline"] = explained.timeline().values
    found["accounting"] = run.influence(model, x[:3], 1, method="accounting").values
    return {name: torch.as_tensor(part) for name, part in found.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_reads_agree_with_gradients_in_full(
    name: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, *asked = trained(MODELS[name], optimizer, tmp_path / "shared")
    audit = shared.audit()
    assert audit.coverage == 1.0, audit
    assert audit.remainder < 1e-12, audit
    assert any(stream.shared for stream in shared.info.streams)
    monkeypatch.setattr(WeightNorm, "use", lambda *_: None)  # then found by differentiating again
    full, *_ = trained(MODELS[name], optimizer, tmp_path / "full")
    assert not any(stream.shared for stream in full.info.streams)
    expected = reads(full, *asked)
    for read, found in reads(shared, *asked).items():
        size = float(expected[read].abs().max())
        gap = float((found - expected[read]).abs().max())
        assert gap <= 1e-6 * size, (read, gap / size)  # columns are held in float32


def test_rows_that_no_step_used(tmp_path: Path) -> None:
    """Each step throws a larger batch away first, and is handed over by itself."""
    model = normed(nn.Linear(5, 4)).double()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    with dualform.record(model, adam, tmp_path / "run") as recorder:
        for _ in range(3):
            for size in (4, 3):
                adam.zero_grad()
                model(torch.randn(size, 5, generator=generator).double()).square().mean().backward()
            adam.step()
            recorder.checkpoint()
    audit = dualform.open(tmp_path / "run").audit()
    assert (audit.coverage, audit.remainder < 1e-12) == (1.0, True), audit


@pytest.mark.parametrize("name", ["tokens, 0", "lines, 2"])
def test_what_entries_miss_is_kept_beside_them(name: str, tmp_path: Path) -> None:
    """Rows are rounded to 16 bits, their matrices are not; residuals make up for the difference."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Recorder(model, adam, tmp_path / "run", keep="half"):
        for _ in range(4):
            model(torch.randn(5, 4, 6).double()).square().mean().backward()
            adam.step()
            adam.zero_grad()
    audit = dualform.open(tmp_path / "run").audit()
    assert (audit.coverage, audit.remainder < 1e-12) == (1.0, True), audit
    assert any(book.residual for book in audit.books)


def test_a_matrix_is_kept_once_a_step(tmp_path: Path) -> None:
    """A step takes what a change of the parameter would, and what the layer's own rows do."""
    model, x = normed(nn.Conv1d(64, 64, 7, padding=3)), torch.randn(16, 64, 5)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, sgd, tmp_path / "run"):
        for _ in range(3):
            model(x).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
    run = dualform.open(tmp_path / "run")
    (stored,) = [shard.file.arrays for shard in run.source.ledger.shards]
    v = model.parametrizations.weight.original1
    rows = 3 * 16 * (64 * 5 * 3 + 2 * 64)  # inputs, errors for weight and bias; what the norms add
    floats = sum(entry.nbytes for entry in stored.values() if entry.dtype == torch.float32) // 4
    assert floats == 3 * v.numel() + rows
    assert sum(book.bytes for book in run.audit().books) == 4 * floats


def test_a_large_weight_under_autocast_says_why(tmp_path: Path) -> None:
    model = normed(nn.Linear(600, 500))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with told(tmp_path / "run"), dualform.record(model, sgd, tmp_path / "run"):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.randn(4, 600))
        out.float().square().mean().backward()
        sgd.step()
    reasons = {book.reason for book in dualform.open(tmp_path / "run").audit().books}
    assert reasons >= {
        "a weight is computed from it in a way that leaves no rows, or under autocast"
    }
