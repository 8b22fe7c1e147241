"""Loops that change what nobody looks at: each book still adds up, and says how it was kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.told import told
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import dualform
from dualform.recording.bookkeeping import OUTSIDE, UNACCOUNTED
from dualform.recording.observer import FORGOTTEN

WIDTH = 200
"""More rows than a probe looks at."""
STEPS = 12
Make = Callable[[nn.Module], Optimizer]
Tamper = Callable[[nn.Module, Optimizer, int], None]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
    )


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.05),
    "momentum": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda model: Adam(model.parameters(), lr=0.01),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "RMSprop": lambda model: RMSprop(model.parameters(), lr=0.003, momentum=0.5),
}


def nothing(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """The loop as it should be."""


def trained(
    make: Make,
    path: Path | None,
    before: Tamper = nothing,
    gradient: Tamper = nothing,
    after: Tamper = nothing,
    **options: Any,
) -> nn.Module:
    """A training in which the loop may do something at three places."""
    model = network()
    optimizer = make(model)
    x = torch.randn(48, 10, generator=torch.Generator().manual_seed(1))
    recording = (
        nullcontext() if path is None else dualform.record(model, optimizer, path, **options)
    )
    with told(path), recording as recorder:
        for number in range(STEPS):
            before(model, optimizer, number)
            ids = torch.arange(8 * number, 8 * number + 8) % 48
            if recorder is not None:
                recorder.samples(ids)
            F.cross_entropy(model(x[ids]), ids % 4).backward()
            gradient(model, optimizer, number)
            optimizer.step()
            optimizer.zero_grad()
            after(model, optimizer, number)
    return model


def audited(make: Make, path: Path, *places: Tamper, **options: Any) -> dict[str, Any]:
    """The lines of the audit; training is the same without the recorder, and all books add up."""
    recorded, plain = trained(make, path, *places, **options), trained(make, None, *places)
    for one, other in zip(recorded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    audit = dualform.open(path).audit()
    assert audit.remainder <= 1e-11, audit
    return {book.name: book for book in audit.books}


def mask_rows(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    model[2].weight.grad[150:] = 0


def mask_rows_once(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    if number == 7:
        model[2].weight.grad[150:] = 0


def zero_a_row(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    model[2].weight.data[0].zero_()


def zero_a_row_once(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    if number == 4:
        with torch.no_grad():
            model[2].weight[190] = 0


def load_a_row_before_the_first_step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    if number == 0:
        model[2].weight.data[3] += 0.1


def forget_all(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    if number == 6:
        optimizer.state.clear()


def halve_the_memory(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    if number == 6:
        for memory in optimizer.state[model[2].weight].values():
            if memory is not None and memory.ndim:
                memory.mul_(0.5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_honest_loop_is_by_row(optimizer: str, tmp_path: Path) -> None:
    lines = audited(OPTIMIZERS[optimizer], tmp_path / "run")
    assert {line.granularity for line in lines.values()} == {"row"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mask", [mask_rows, mask_rows_once])
def test_rows_of_a_gradient_are_masked_where_no_probe_looks(
    mask: Tamper, optimizer: str, tmp_path: Path
) -> None:
    lines = audited(OPTIMIZERS[optimizer], tmp_path / "run", nothing, mask)
    assert lines["2.weight"].granularity == "step"
    assert lines["2.weight"].reason == UNACCOUNTED
    assert lines["0.weight"].granularity == lines["4.weight"].granularity == "row"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("zero", "reason"), [(zero_a_row, OUTSIDE), (zero_a_row_once, UNACCOUNTED)]
)
def test_a_row_of_a_weight_is_zeroed(
    zero: Tamper, reason: str, optimizer: str, tmp_path: Path
) -> None:
    lines = audited(OPTIMIZERS[optimizer], tmp_path / "run", nothing, nothing, zero)
    assert lines["2.weight"].granularity == "step"
    assert lines["2.weight"].reason == reason
    assert lines["0.weight"].granularity == lines["4.weight"].granularity == "row"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_row_is_changed_before_the_first_step(optimizer: str, tmp_path: Path) -> None:
    lines = audited(OPTIMIZERS[optimizer], tmp_path / "run", load_a_row_before_the_first_step)
    assert lines["2.weight"].granularity == "step"
    assert lines["0.weight"].granularity == "row"


@pytest.mark.parametrize("optimizer", ["momentum", "Adam", "AdamW", "RMSprop"])
def test_the_optimizer_forgets(optimizer: str, tmp_path: Path) -> None:
    """What the rows did so far stays; from the next step on, all is kept by step."""
    lines = audited(OPTIMIZERS[optimizer], tmp_path / "run", forget_all)
    assert {line.granularity for line in lines.values()} == {"row, then step"}
    assert {line.reason for line in lines.values()} == {FORGOTTEN}


@pytest.mark.parametrize("optimizer", ["momentum", "Adam", "AdamW", "RMSprop"])
def test_a_part_of_the_optimizer_s_memory_is_changed(optimizer: str, tmp_path: Path) -> None:
    lines = audited(OPTIMIZERS[optimizer], tmp_path / "run", halve_the_memory)
    assert lines["2.weight"].granularity == "row, then step"
    assert lines["2.weight"].reason == FORGOTTEN
    assert lines["2.bias"].granularity == "row"


def test_a_memory_that_is_loaded_as_it_was_is_no_change(tmp_path: Path) -> None:
    def reload(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        optimizer.load_state_dict(optimizer.state_dict())

    lines = audited(OPTIMIZERS["Adam"], tmp_path / "run", reload)
    assert {line.granularity for line in lines.values()} == {"row"}


def test_memory_and_weights_are_both_changed_at_once(tmp_path: Path) -> None:
    """The change of the weights comes between two steps, of which the second is kept by step."""

    def roll_back(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        if number == 6:
            optimizer.state.clear()
            model.load_state_dict({k: 0.5 * v for k, v in model.state_dict().items()})

    audited(OPTIMIZERS["momentum"], tmp_path / "run", roll_back)
    audited(OPTIMIZERS["momentum"], tmp_path / "many", roll_back, buffer_bytes=1 << 16)


@pytest.mark.parametrize("optimizer", ["momentum", "Adam"])
def test_found_in_any_of_many_parcels(optimizer: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[optimizer]
    for name, places in {
        "masked": (nothing, mask_rows_once),
        "zeroed": (nothing, nothing, zero_a_row_once),
        "forgotten": (forget_all,),
    }.items():
        lines = audited(make, tmp_path / name, *places, buffer_bytes=1 << 16)
        assert lines["2.weight"].granularity == "row, then step", name


def test_a_parameter_is_moved_to_another_group(tmp_path: Path) -> None:
    def make(model: nn.Module) -> Optimizer:
        first, *rest = model.parameters()
        return SGD([{"params": [first]}, {"params": rest, "lr": 0.5}], lr=0.05, momentum=0.9)

    def move(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        if number == 5:
            moved = optimizer.param_groups[1]["params"].pop()
            optimizer.param_groups[0]["params"].append(moved)
        if number == 8:  # as many in each group as before
            for one, other in ((0, 1), (1, 0)):
                moved = optimizer.param_groups[one]["params"].pop(0)
                optimizer.param_groups[other]["params"].append(moved)

    lines = audited(make, tmp_path / "run", move)
    assert {line.granularity for line in lines.values()} == {"row"}


def test_parameters_join_a_group_on_the_way(tmp_path: Path) -> None:
    def make(model: nn.Module) -> Optimizer:
        return SGD(list(model.parameters())[2:], lr=0.05)

    def join(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        if number == 5:
            model.zero_grad()
            optimizer.param_groups[0]["params"].extend(model[0].parameters())

    lines = audited(make, tmp_path / "run", join)
    assert {line.granularity for line in lines.values()} == {"row"}


class Odd(Optimizer):
    """An optimizer without a rule."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.05)


def test_weights_are_loaded_before_the_first_step_of_an_unknown_optimizer(tmp_path: Path) -> None:
    def load(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        if number == 0:
            model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()})

    lines = audited(lambda model: Odd(model.parameters()), tmp_path / "run", load)
    assert {line.granularity for line in lines.values()} == {"step"}


def test_a_part_of_a_frozen_parameter_is_changed(tmp_path: Path) -> None:
    def make(model: nn.Module) -> Optimizer:
        model[0].requires_grad_(False)
        return SGD(model.parameters(), lr=0.05)

    def change(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        with torch.no_grad():
            model[0].weight[0] += 0.1

    lines = audited(make, tmp_path / "run", nothing, nothing, change)
    assert lines["0.weight"].granularity == "step"
    assert lines["0.weight"].reason == OUTSIDE
    assert lines["0.bias"].granularity == "frozen"
    assert lines["2.weight"].granularity == "row"


def test_weights_are_put_in_before_a_checkpoint(tmp_path: Path) -> None:
    """They are those of no step, and training goes on from them."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.05)
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for number in range(6):
            model(torch.randn(4, 10)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 2:
                model.load_state_dict({k: 0.9 * v for k, v in model.state_dict().items()})
                recorder.checkpoint()
    audit = dualform.open(tmp_path / "run").audit()
    assert audit.remainder <= 1e-12, audit
    assert {book.reason for book in audit.books} == {OUTSIDE}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_a_muon_s_gradient_is_masked(tmp_path: Path) -> None:
    """Its books cannot be followed in part: every row of the gradient is probed."""

    def make(model: nn.Module) -> Optimizer:
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)

    trained(make, tmp_path / "run", gradient=mask_rows)
    lines = {book.name: book for book in dualform.open(tmp_path / "run").audit().books}
    assert "step" in lines["2.weight"].granularity
    assert lines["0.weight"].granularity == "row"


def test_books_are_followed_from_an_optimizer_that_remembers(tmp_path: Path) -> None:
    """A second recording begins with the momentum that the first part of training left."""
    for name, make in OPTIMIZERS.items():
        model = network()
        optimizer = make(model)
        for part in (None, tmp_path / name):
            recording = nullcontext() if part is None else dualform.record(model, optimizer, part)
            with told(part), recording:
                for _ in range(4):
                    model(torch.randn(4, 10)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        assert dualform.open(tmp_path / name).audit().coverage == 1.0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_column_of_a_weight_is_zeroed(optimizer: str, tmp_path: Path) -> None:
    def zero(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        model[2].weight.data[:, 50].zero_()

    lines = audited(OPTIMIZERS[optimizer], tmp_path / "run", nothing, nothing, zero)
    assert lines["2.weight"].granularity == "step"
    assert lines["0.weight"].granularity == lines["4.weight"].granularity == "row"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_half_of_the_elements_are_pruned(optimizer: str, tmp_path: Path) -> None:
    def prune(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        mask = torch.rand(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) < 0.5
        model[2].weight.data[:, 50:150].mul_(mask[:, 50:150])

    lines = audited(OPTIMIZERS[optimizer], tmp_path / "run", nothing, nothing, prune)
    assert lines["2.weight"].granularity == "step"


def test_wide_layers_are_compared_as_exactly_as_products_of_doubles_are(tmp_path: Path) -> None:
    """The smallest steps, one a hand-over: all that is left is the comparison's own rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3000, 40), nn.Tanh(), nn.Linear(40, 3000))
    optimizer = SGD(model.parameters(), lr=1e-9)
    with dualform.record(model, optimizer, tmp_path / "run", strict=True) as recorder:
        for _ in range(8):
            model(torch.randn(4, 3000)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.checkpoint()
    assert dualform.open(tmp_path / "run").audit().coverage == 1.0
