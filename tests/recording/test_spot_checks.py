"""Whatever changes a weight in every step is noticed: any element, any optimizer, anywhere."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.cases.optimizers import OPTIMIZERS
from tests.in_turn import in_turn
from tests.told import told
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import dualform
from dualform.errors import RecordingWarning
from dualform.optimizers import rule_for
from dualform.recording import spot_checks
from dualform.recording.bookkeeping import OUTSIDE
from dualform.recording.observer import FORGOTTEN
from dualform.recording.spot_checks import EVERY, WITHIN, stepped_copy

HEIGHT, WIDTH, PLACES = 300, 200, 40_000
STEPS = 6
Edit = Callable[[nn.Module, Optimizer, int], None]
SOME = ("SGD, Nesterov", "Adam", "AdamW, fused", "Lion", "Adafactor", "Muon", "Shampoo", "SOAP")
REPRESENTATIVE = [name for name in SOME if name in OPTIMIZERS]
REMEMBERING = [name for name in REPRESENTATIVE if name not in ("Adafactor", "Shampoo")]


class Network(nn.Module):
    """A weight of 300 × 200, and a table of 40,000 rows of which the first 100 are read."""

    def __init__(self, table: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(PLACES, 4) if table else None
        self.first = nn.Linear(4 if table else WIDTH, HEIGHT, bias=False)
        self.last = nn.Linear(HEIGHT, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        x = x if self.table is None else self.table(x)
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def nothing(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """The loop as it should be."""


def batches(model: Network, steps: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        if model.table is None:
            yield torch.randn(8, WIDTH, generator=generator).to(dtype)
        else:
            yield torch.randint(100, (8,), generator=generator)


def trained(
    make: Callable[[Any], Optimizer],
    path: Path | None,
    *,
    edit: Edit = nothing,
    within: Edit = nothing,
    table: bool = False,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    steps: int = STEPS,
) -> nn.Module:
    """A training in which a loop edits something after each step, or within it."""
    model = Network(table).to(dtype)
    optimizer = make(model.parameters())
    recording = nullcontext() if path is None else dualform.record(model, optimizer, path)
    number = 0
    with told(path), recording:
        # this hook comes after the recorder's own, so that to the recorder it is a part of the step
        optimizer.register_step_pre_hook(lambda *_: within(model, optimizer, number))
        for number, x in enumerate(batches(model, steps, dtype)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(x), torch.arange(8) % 5)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            edit(model, optimizer, number)
    return model


def assert_noticed(
    make: Callable[[Any], Optimizer], path: Path, reason: str, book: str, **options: Any
) -> None:
    """The book goes by step for this reason, adds up, and training is as it is unrecorded."""
    recorded, plain = trained(make, path, **options), trained(make, None, **options)
    for one, other in zip(recorded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    audit = dualform.open(path).audit()
    line = {line.name: line for line in audit.books}[book]
    assert "step" in line.granularity
    assert line.reason == reason
    assert line.remainder <= max(1e-6, line.rounding)
    assert audit.coverage < 1


def one_element(model: Network, optimizer: Optimizer, number: int) -> None:
    place = random.Random(number)
    model.first.weight.data[place.randrange(HEIGHT), place.randrange(WIDTH)] += 1e-3


def zero_a_row(model: Network, optimizer: Optimizer, number: int) -> None:
    model.first.weight.data[250] = 0


def overwrite_a_block(model: Network, optimizer: Optimizer, number: int) -> None:
    model.first.weight.data[200:210, 150:160] = 0.01


def decay_unread_rows(model: Network, optimizer: Optimizer, number: int) -> None:
    assert model.table is not None
    model.table.weight.data[30_000:30_100] *= 0.99


@pytest.mark.parametrize(
    ("place", "edit", "optimizer"),
    in_turn(["edit", "within"], [one_element, zero_a_row, overwrite_a_block], REPRESENTATIVE),
)
def test_a_part_of_a_weight_is_changed(
    place: str, edit: Edit, optimizer: str, tmp_path: Path
) -> None:
    reason = OUTSIDE if place == "edit" else WITHIN
    make = OPTIMIZERS[optimizer]
    assert_noticed(make, tmp_path / "run", reason, "first.weight", **{place: edit})


@pytest.mark.parametrize("optimizer", [name for name in REPRESENTATIVE if name != "Shampoo"])
@pytest.mark.parametrize("place", ["edit", "within"])
def test_unread_rows_of_a_table_are_decayed(place: str, optimizer: str, tmp_path: Path) -> None:
    """Shampoo would need a matrix of 40,000 × 40,000."""
    reason = OUTSIDE if place == "edit" else WITHIN
    options: dict[str, Any] = {place: decay_unread_rows, "table": True}
    assert_noticed(OPTIMIZERS[optimizer], tmp_path / "run", reason, "table.weight", **options)


@pytest.mark.parametrize("optimizer", REMEMBERING)
def test_a_part_of_the_memory_is_changed_behind_torch_s_back(
    optimizer: str, tmp_path: Path
) -> None:
    def halve(model: Network, optimizer: Optimizer, number: int) -> None:
        memory = optimizer.state[model.first.weight]
        buffer = memory.get("momentum_buffer", memory.get("exp_avg"))
        buffer.data[250] *= 0.5

    make = OPTIMIZERS[optimizer]
    assert_noticed(make, tmp_path / "run", FORGOTTEN, "first.weight", edit=halve)


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_subclass_does_more_in_its_step(kind: type[Optimizer], tmp_path: Path) -> None:
    class More(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: None = None) -> None:
            super().step(closure)
            self.param_groups[0]["params"][0].data[250, 150] += 1e-3

    def make(parameters: Any) -> Optimizer:
        return More(parameters, lr=0.01)

    reason = f"More is a subclass of {kind.__name__} and may do anything; by row is {kind.__name__}"
    assert_noticed(make, tmp_path / "run", f"{reason} itself", "first.weight")


@pytest.mark.parametrize(("first", "steps"), [(1, 5), (5, 13), (EVERY + 9, 3 * EVERY + 9)])
def test_an_edit_that_begins_later_is_noticed(first: int, steps: int, tmp_path: Path) -> None:
    """At the latest after as many steps as were made before, and in long runs after 2 · EVERY."""

    def late(model: Network, optimizer: Optimizer, number: int) -> None:
        if number >= first:
            one_element(model, optimizer, number)

    assert_noticed(
        OPTIMIZERS["Adam"], tmp_path / "run", OUTSIDE, "first.weight", edit=late, steps=steps
    )


@pytest.mark.parametrize(
    ("optimizer", "precision"), in_turn(OPTIMIZERS, ["float32", "float64", "autocast"])
)
def test_training_as_usual_raises_no_alarm(optimizer: str, precision: str, tmp_path: Path) -> None:
    path, is_cast = tmp_path / "run", precision == "autocast"
    dtype = torch.float64 if precision == "float64" else torch.float32
    trained(OPTIMIZERS[optimizer], path, dtype=dtype, autocast=is_cast, steps=9)
    assert dualform.open(path).audit().coverage == 1


@pytest.mark.parametrize("optimizer", ["SGD, Nesterov", "Adam"])
def test_weights_are_moved_and_put_back(optimizer: str, tmp_path: Path) -> None:
    """As sharpness-aware training does; what rounding leaves of it is no edit."""

    def move(model: Network, optimizer: Optimizer, number: int) -> None:
        with torch.no_grad():
            shift = 0.05 * torch.randn(HEIGHT, WIDTH)
            model.first.weight.add_(shift)
            model.first.weight.sub_(shift)

    path = tmp_path / "run"
    trained(OPTIMIZERS[optimizer], path, edit=move, steps=9)
    assert dualform.open(path).audit().coverage == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_stepped_copy_is_what_the_step_makes(optimizer: str) -> None:
    """And nothing else changes: gradient, memory, options, hooks, random states."""
    model = Network()
    made = OPTIMIZERS[optimizer](model.parameters())
    called: list[Optimizer] = []
    made.register_step_post_hook(lambda stepped, *_: called.append(stepped))
    for x in batches(model, 3, torch.float32):
        F.cross_entropy(model(x), torch.arange(8) % 5).backward()
        memory = repr(made.state_dict())
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        (group,) = made.param_groups
        copies = [stepped_copy(made, group, parameter) for parameter in model.parameters()]
        assert repr(made.state_dict()) == memory
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (random.getstate(), repr(np.random.get_state())) == states[1:]
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert torch.equal(gradient, parameter.grad)
        count = len(called)
        made.step()
        assert len(called) == count + 1
        made.zero_grad()
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            assert torch.equal(copy, parameter)


def test_a_copy_that_cannot_be_stepped_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording goes on, and so does training: only the comparison of whole weights ends."""

    def failing(*given: object) -> Tensor:
        raise RuntimeError("no copies today")

    monkeypatch.setattr(spot_checks, "stepped_copy", failing)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with dualform.record(model, optimizer, tmp_path / "run"):
            for _ in range(5):
                model(torch.randn(6, 4).double()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    said = r"SGD failed to step a copy.*no copies today"
    with pytest.warns(RecordingWarning, match=said) as told:
        train()
    assert len([one for one in told if one.category is RecordingWarning]) == 1
    audit = dualform.open(tmp_path / "run").audit()
    assert (audit.step, audit.coverage) == (5, 1.0)
    assert audit.remainder <= 1e-12


@pytest.mark.parametrize("at_once", [True, False])
def test_a_hand_over_at_once_has_the_copies_of_a_check(at_once: bool) -> None:
    """They are held once; what is changed after the step is noticed all the same."""
    weight = nn.Parameter(torch.zeros(5, 17))
    optimizer = SGD([weight], lr=1.0)
    checks = spot_checks.SpotChecks({"w": weight}, optimizer, rule_for(optimizer))
    weight.grad = torch.ones(5, 17)
    checks.before_step(["w"])
    optimizer.step()
    assert not bool(checks.after_step()[WITHIN]["w"])
    if not at_once:
        weight.data[2, 3] += 1
    copy = weight.detach().clone()
    before = _alive(weight.shape)
    checks.handed_over({"w": copy}, at_once)
    assert before - _alive(weight.shape) == int(at_once)
    if at_once:
        weight.data[2, 3] += 1
    checks.before_step(["w"])
    optimizer.step()
    assert bool(checks.after_step()[OUTSIDE]["w"])


def _alive(shape: torch.Size) -> int:
    return sum(type(each) is torch.Tensor and each.shape == shape for each in gc.get_objects())
