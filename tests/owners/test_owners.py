"""Whose row is it? What an experiment is, and what it finds."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.cases.case import Case, classes
from tests.cases.structures import B, D, numbers, tokens
from tests.laws.attribution import attribution_holds
from tests.told import told
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import dualform
from dualform.layers import Finder, Seen, kinds
from dualform.layers.watching import Watching
from dualform.owners import CHANGED, Batch, Owners
from dualform.owners import twins as twins_module
from dualform.owners.patterns import (
    MIXES,
    NOBODY,
    Pattern,
    codes,
    judge,
    owners_by,
    patterns,
)
from dualform.owners.trial import TOO_LARGE, Trial
from dualform.owners.twins import Twins

# Codes and patterns


@given(st.integers(2, 300), st.integers(0, 5))
def test_codes_tell_one_sample_from_two(samples: int, seed: int) -> None:
    table = codes(samples, random.Random(seed))
    words = [frozenset(torch.nonzero(table[:, s]).flatten().tolist()) for s in range(samples)]
    assert len(set(words)) == samples
    draw = random.Random(seed)
    for _ in range(50):
        one, other = draw.sample(range(samples), 2)
        assert words[one] | words[other] not in words


@st.composite
def orders(draw: st.DrawFn) -> tuple[tuple[int, ...], int, Pattern]:
    samples = draw(st.integers(2, 6))
    lead = draw(st.lists(st.integers(1, 4), max_size=2))
    lead.insert(draw(st.integers(0, len(lead))), samples * draw(st.integers(1, 4)))
    return tuple(lead), samples, draw(st.sampled_from(list(patterns(lead, samples))))


@given(orders(), st.integers(0, 5))
def test_every_pattern_is_found(order: tuple[tuple[int, ...], int, Pattern], seed: int) -> None:
    lead, samples, pattern = order
    members, places = codes(samples, random.Random(seed)), torch.arange(samples)
    owners = owners_by(pattern, lead, places)
    found = judge(lead, members[:, owners], members, places).pattern
    assert found is not None
    assert torch.equal(owners_by(found, lead, places), owners)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 5))
def test_rows_in_any_order_are_given_to_their_samples(owners: list[int], seed: int) -> None:
    members, rows = codes(6, random.Random(seed)), torch.tensor(owners)
    found = judge((len(rows),), members[:, rows], members, torch.arange(6))
    if found.pattern is not None:
        found_owners = owners_by(found.pattern, (len(rows),), torch.arange(6))
    else:
        assert found.owners is not None
        found_owners = found.owners
    assert torch.equal(found_owners, rows)


def test_rows_of_two_samples_and_of_none() -> None:
    members = codes(6, random.Random(0))
    both = members[:, [0, 1, 2, 3, 4, 5, 0]].clone()
    both[:, 6] |= members[:, 1]
    assert judge((7,), both, members, torch.arange(6)).reason == MIXES
    assert judge((7,), torch.zeros_like(both), members, torch.arange(6)).reason == NOBODY


# Worlds


GENERATOR = torch.Generator()
PRODUCTS = torch.randn(4, 6, 6, generator=GENERATOR)
autocast = torch.autocast("cpu", torch.bfloat16)


def cast_products(x: Tensor) -> Tensor:
    """A kernel that is made of further calls, which autocast sees."""
    return F.bilinear(x, x, PRODUCTS)


def calls() -> Iterator[tuple[str, Any]]:
    layers = {
        "dropout": nn.Dropout(0.5),
        "batch norm": nn.BatchNorm2d(3),
        "instance norm": nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        "pooling": nn.FractionalMaxPool2d(2, output_size=2),
        "random slope": nn.RReLU(),
    }
    yield from layers.items()
    yield "bilinear, cast", autocast(cast_products)
    yield "noise", lambda x: x + torch.randn_like(x) * torch.rand(x.shape)
    yield "in place", lambda x: x.clone().mul_(2).relu_().view(-1).add_(1).view(x.shape)
    yield "into a part", lambda x: torch.zeros_like(x).index_copy_(0, torch.tensor([1, 0]), x[:2])
    yield "own generator", lambda x: x * torch.rand(x.shape, generator=GENERATOR)


@pytest.mark.parametrize(("name", "call"), list(calls()), ids=[name for name, _ in calls()])
def test_the_real_pass_and_its_random_numbers_stay_as_they_are(name: str, call: Any) -> None:
    x, state = torch.randn(4, 3, 6, 6), {}
    found = []
    for experiment in (False, True):
        if isinstance(call, nn.Module):
            state = state or {k: v.clone() for k, v in call.state_dict().items()}
            call.load_state_dict(state)
        torch.manual_seed(0)
        GENERATOR.manual_seed(0)
        twins = Twins(2)
        if experiment:
            for world in range(2):
                twins.change([x], world, [x.roll(1 + world, 0)])
        with twins if experiment else nullcontext():
            out = call(x)
        after = call.state_dict().values() if isinstance(call, nn.Module) else ()
        found.append([out, torch.rand(3), torch.rand(3, generator=GENERATOR), *after])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_world_is_the_pass_with_other_inputs() -> None:
    """Outside of cross-sample statistics, what a world holds is what the model would have given."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(144, 5),
    )
    x = torch.randn(4, 3, 6, 6)
    other = torch.cat([x[:2], x[:1], x[3:]])
    twins = Twins(1)
    twins.change([x], 0, [other])
    with twins:
        out = model(x)
    assert torch.equal(twins.twin(out, 0), model(other))


def changed_in_worlds(x: Tensor, worlds: int, room: int) -> Twins:
    """Worlds in which all of a tensor differs."""
    twins = Twins(worlds, room)
    for world in range(worlds):
        twins.change([x], world, [x + 1 + world])
    return twins


def test_what_was_not_used_for_long_goes_first_and_from_two_worlds_last() -> None:
    x = torch.randn(1000)  # 4 kB
    twins = changed_in_worlds(x, worlds=4, room=64_000)
    with twins:
        made = [x * n for n in range(1, 4)]
        assert not any(twins.lost(y).any() for y in (x, *made))
        made.append(x * 4)
        assert [twins.lost(y).tolist() for y in made[:2]] == [[False, False, True, True]] * 2
        assert not any(twins.lost(y).any() for y in made[2:])
        later = [x * n for n in range(20)]
        assert twins.lost(made[0]).all()
        assert twins._memories.nbytes <= 64_000
        below = made[0] + later[-1]
    assert not twins.lost(later[-1]).any()
    assert twins.lost(below).all()


def test_a_result_that_is_too_large_is_lost_with_all_that_follows_from_it() -> None:
    x = torch.randn(1000)
    twins = changed_in_worlds(x, worlds=4, room=64_000)  # 16 kB for an operation
    with twins:
        half = x.expand(2, 1000).clone()
        wide = x.expand(3, 1000).clone()
        shape, places = torch.zeros_like(wide), wide.argmax(1)
        total, buffer = wide.sum(), torch.zeros(3)
        buffer.copy_(wide[:, 0])
    assert twins.lost(half).tolist() == [False, False, True, True]
    assert all(twins.lost(y).all() for y in (wide, wide[0], total, buffer))
    assert not any(twins.lost(y).any() for y in (x, shape, places))


def test_a_world_that_a_device_has_no_memory_for_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, worlds = twins_module.call_there, iter(range(3))

    def call_there(*args: Any) -> Any:
        if next(worlds) == 1:
            raise torch.OutOfMemoryError
        return made(*args)

    monkeypatch.setattr(twins_module, "call_there", call_there)
    x = torch.randn(10)
    twins = changed_in_worlds(x, worlds=3, room=1 << 20)
    with twins:
        y = x * 2
    assert twins.alive == [True, False, True]
    assert twins.differing(y, dims=1).tolist() == [True, False, True]


def test_copies_of_tensors_that_are_no_more_are_let_go() -> None:
    x = torch.randn(1000)
    twins = changed_in_worlds(x, worlds=2, room=1 << 30)
    with twins:
        for _ in range(200):
            x * 2
    assert twins._memories.nbytes < 40 * 8_000


def test_worlds_that_are_let_go_leave_their_memory_at_once() -> None:
    x = torch.randn(100)
    twins = changed_in_worlds(x, worlds=2, room=1 << 30)
    gc.disable()  # a circle would keep copies until Python looks for its garbage
    try:
        with twins:
            doubled = 2 * x
            made = [doubled, torch.cat([x, doubled])]
        kept = [twins.twin(y, world) for y in made for world in range(2)]
        copies = [StorageWeakRef(twin.untyped_storage()) for twin in kept]
        kept.clear()
        assert not any(copy.expired() for copy in copies)
        twins.clear()
        assert all(copy.expired() for copy in copies)
    finally:
        gc.enable()


def test_a_slice_of_a_dataset_costs_no_more_than_itself() -> None:
    data = torch.randn(1000, 100)
    twins = Twins(1)
    twins.change([data[40:44]], 0, [torch.zeros(4, 100)])
    assert twins._memories.nbytes == 4 * 100 * 4


# What cannot be given to samples


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        return self.head(torch.tanh(h - h.mean(0)))


def fit(model: nn.Module, path: Path, inputs: list[Tensor]) -> dualform.Audit:
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with told(path), dualform.record(model, optimizer, path) as recorder:
        for x in inputs:
            recorder.samples(range(len(x)))
            F.cross_entropy(model(x), torch.arange(len(x)) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path).audit()


def reasons(audit: dualform.Audit) -> dict[str, str]:
    """Why layers are kept by step; an empty reason where they are kept by row."""
    return {
        book.name.split(".")[0]: book.reason if book.granularity == "step" else ""
        for book in audit.books
    }


def test_rows_that_mix_samples_are_kept_by_step(tmp_path: Path) -> None:
    audit = fit(Centered(), tmp_path / "run", [numbers(B, D)(step) for step in range(3)])
    assert reasons(audit) == {"enter": "", "head": MIXES}
    assert audit.remainder < 1e-9


class Turning(nn.Module):
    """Samples come in another order from some pass on, for no reason that the data shows."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head, self.passes = nn.Linear(D, D), nn.Linear(D, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        h = torch.tanh(self.mix(x.flip(0) if self.passes > 4 else x))
        return self.head(h.flip(0) if self.passes > 4 else h)


def test_an_order_that_changes_is_noticed_by_a_later_experiment(tmp_path: Path) -> None:
    audit = fit(Turning(), tmp_path / "run", [numbers(B, D)(step) for step in range(20)])
    assert reasons(audit) == {"mix": CHANGED, "head": ""}
    assert audit.remainder < 1e-9


def test_a_layer_first_used_later_is_seen_by_an_experiment(tmp_path: Path) -> None:
    class Late(Turning):
        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return self.head(torch.tanh(self.mix(x)) if self.passes > 3 else x)

    audit = fit(Late(), tmp_path / "run", [numbers(B, D)(step) for step in range(6)])
    assert reasons(audit) == {"mix": "", "head": ""}


@pytest.mark.parametrize("frozen", [lambda step: step < 41, lambda step: step > 3])
@pytest.mark.parametrize("part", ["0", "2.weight"])
def test_what_is_thawed_or_frozen_late_is_seen_by_an_experiment(
    part: str, frozen: Any, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    changing = [p for name, p in model.named_parameters() if name.startswith(part)]
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(45):
            for parameter in changing:
                parameter.requires_grad_(not frozen(step))
            recorder.samples(range(B))
            F.cross_entropy(model(numbers(B, D)(step)), torch.arange(B) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    audit = dualform.open(tmp_path / "run").audit()
    assert reasons(audit) == {"0": "", "2": ""}


def test_one_sample_in_all_places_needs_no_experiment(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(3):
            recorder.samples(["only"] * B)
            F.cross_entropy(model(numbers(B, D)(step)), torch.arange(B) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    run = dualform.open(tmp_path / "run")
    assert run.ids == ["only"]
    assert reasons(run.audit()) == {"0": "", "2": ""}


def test_a_later_experiment_that_tells_nothing_changes_nothing(tmp_path: Path) -> None:
    """Such as one in which a layer happens to see the same of every sample."""

    class Gated(Turning):
        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            h = torch.tanh(self.mix(x))
            return self.head(h * 0 if self.passes > 4 else h)

    audit = fit(Gated(), tmp_path / "run", [numbers(B, D)(step) for step in range(20)])
    assert reasons(audit) == {"mix": "", "head": ""}


def test_no_experiment_is_made_where_no_rows_are_kept() -> None:
    """Not even in the first pass."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    parameters = dict(model.named_parameters())
    batch = Batch(1, None, 1, size=4)
    assert Owners(parameters, 0).begin(batch, [x], frozenset(["weight"])) is not None
    assert Owners(parameters, 0).begin(batch, [x], frozenset(parameters)) is None


# Memory


class Words(nn.Module):
    """A layer, then far more logits than it has numbers, and the losses inside of the model."""

    def __init__(self, behind: bool = False) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(D, D), nn.Linear(D, 500, bias=False)
        self.behind = nn.Linear(500, 3) if behind else None

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.enter(x)))
        logits = logits if self.behind is None else self.behind(torch.tanh(logits))
        return F.cross_entropy(logits, torch.arange(len(x)) % 3, reduction="none")


def losses_inside(model: nn.Module, x: Tensor) -> Tensor:
    losses: Tensor = model(x)
    return losses


ROOM = "dualform.owners.world_memory.HOST_BYTES"
SOME = 4 * 2 * B * 500 * 4
"""Room for results as large as the logits in one world, but not in two."""


def test_a_head_behind_the_last_layer_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, clear = [], Twins.clear

    def count(twins: Twins) -> None:
        sizes.append(twins._memories.nbytes)
        clear(twins)

    monkeypatch.setattr(Twins, "clear", count)
    case = Case(Words, numbers(B, D), losses_inside)
    for room in (1 << 30, SOME):
        monkeypatch.setattr(ROOM, room)
        audit = attribution_holds(case, tmp_path / str(room))
        assert {book.granularity for book in audit.books} == {"row"}
    without, within = sizes[0], sizes[len(sizes) // 2]
    assert without > 4 * B * 500 * 8
    assert within < without / 10
    assert sizes[-1] == 0  # all were let go as soon as nothing could follow the logits


def test_layers_behind_what_is_too_large_are_kept_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ROOM, SOME)
    case = Case(lambda: Words(True), numbers(B, D), losses_inside, {"behind": TOO_LARGE})
    attribution_holds(case, tmp_path / "run")


class Beside(nn.Module):
    """A class token beside the inputs, and a layer behind them that is too large or not."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.enter, self.head = nn.Linear(D, 3), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        beside = torch.cat([self.token.expand(len(x), 1, D), x[:, None]], 1)
        return self.enter(beside).sum(1) + self.head(beside.repeat(1, 50, 1)).mean(1)


@pytest.mark.parametrize("room", [1 << 30, 4 * 2 * B * D * 8 * 10])
def test_a_pattern_that_could_not_be_tried_everywhere_is_not_taken(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ROOM, room)
    small = {} if room == 1 << 30 else {"head": TOO_LARGE, "token": TOO_LARGE}
    attribution_holds(Case(Beside, numbers(B, D), classes, small), tmp_path / "run")


def test_a_smaller_batch_in_the_first_step_tells_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ROOM, SOME)
    model = Words(True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    path = tmp_path / "run"
    uneven = pytest.warns(dualform.errors.RecordingWarning, match="the batch of step 1 has 2")
    with uneven, dualform.record(model, optimizer, path):
        for step in range(20):
            model(numbers(2 if step == 0 else B, D)(step)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    audit = dualform.open(path).audit()
    assert reasons(audit) == {"enter": "", "head": "", "behind": ""}


# Patterns that shapes propose, and 16 bits


class Attending(nn.Module):
    """A layer of attention; what all samples have in common is much larger than what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(31, 16), nn.Embedding(12, 16)
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = 0.1 * self.words(x) + self.places(torch.arange(x.shape[1]))
        q, k, v = self.qkv(self.norm(h)).chunk(3, dim=-1)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(h + self.down(F.gelu(self.up(h)))).mean(1)


def test_worlds_of_a_pattern_that_rows_contradict_are_given_up_at_once() -> None:
    """A table of positions has as many entries as two for each sample, but all samples share it."""
    model, x = Attending(), tokens(B, 12)(0)
    trial = Trial.of(B, [x], 0)
    assert trial is not None
    alive = []

    def take(use: Seen) -> None:
        trial.observe(use)
        alive.append(sum(trial.twins.alive))

    with Watching(Finder(dict(model.named_parameters())), kinds(), take), trial.twins:
        model(x)
    proposed = len(trial.twins.alive)
    assert alive[:2] == [proposed, proposed]
    assert alive[2:] == [proposed - 4] * (len(alive) - 2)


def test_owners_are_found_under_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what differs alone: no pattern that a shape proposes helps."""
    monkeypatch.setattr("dualform.owners.trial.PROPOSALS", 0)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return classes(model, x)

    case = Case(Attending, tokens(B, 12), losses)
    audit = attribution_holds(case, tmp_path / "run", reach=0.02, dtype=torch.float32)
    assert {book.granularity for book in audit.books} == {"row"}
