"""Reads of runs that grow: what is held, and how it is cut, changes no answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import dualform
from dualform.ledger import Ledger
from dualform.memory.blocks import Sides
from dualform.memory.summary import Bases, SummarySides
from dualform.memory.views import Region
from dualform.read.engine import ShardRange
from dualform.read.grouping import BySample
from dualform.read.sample_names import distinct
from dualform.read.samples_matrix import folds, group_sums, matrix, visits
from dualform.read.samples_matrix.cost import Work
from dualform.read.samples_matrix.visits import Visits, sorted_pairs
from dualform.recording.keep import Keep

SAMPLES, BATCH, STEPS = 30, 12, 15
KEPT: dict[str, Keep] = {"rows": "rows", "summaries": dualform.summaries(3, 4, "rows")}
MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
ROUNDING = 1e-5
"""Columns are held in float32."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))


def record(path: Path, keep: Keep, optimizer: str, shards: bool) -> tuple[nn.Module, Tensor]:
    """A run in one shard, or with a shard for each step; its bases are renewed on the way."""
    model, x = network(), torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(1))
    stepper = MAKE[optimizer](model.parameters())
    buffer = 1 if shards else 1 << 20
    with dualform.record(model, stepper, path, keep=keep, buffer_bytes=buffer) as recorder:
        for step in range(STEPS):
            ids = torch.arange(step * 7, step * 7 + BATCH) % SAMPLES
            recorder.samples(ids)
            (model(x[ids]) - 0.5).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    return model, x


def influence(path: Path, model: nn.Module, x: Tensor) -> NDArray[np.float64]:
    return dualform.open(path).influence(model, x[:3], 1).values


def near(found: NDArray[np.float64], expected: NDArray[np.float64], tolerance: float) -> None:
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("keep", KEPT)
def test_shards_do_not_matter(keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Visits come in the order of samples, wherever they lie: the same numbers in the same order.

    So it is only where rows are asked one by one that a sum is taken in another order. (An adaptive
    optimizer's memory is kept at some flushes, so that more of them show more of it.)
    """
    monkeypatch.setattr(matrix, "COLUMN_BYTES", 1 << 10)
    for at, shards in enumerate((False, True)):
        model, x = record(tmp_path / str(at), KEPT[keep], "SGD", shards)
    assert [len(Ledger(tmp_path / str(at)).shards) for at in (0, 1)] == [1, STEPS]
    for by_rows, tolerance in ((False, 1e-12), (True, ROUNDING)):
        monkeypatch.setattr(Work, "row_by_row", lambda *_, by_rows=by_rows, **__: by_rows)
        one, many = (influence(tmp_path / str(at), model, x) for at in (0, 1))
        near(many, one, tolerance)


@pytest.mark.parametrize("optimizer", MAKE)
@pytest.mark.parametrize("keep", KEPT)
def test_neither_do_blocks(
    keep: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many samples a block has, and however much is gathered or read for it."""
    model, x = record(tmp_path / "run", KEPT[keep], optimizer, True)
    expected = influence(tmp_path / "run", model, x)
    monkeypatch.setattr(matrix, "COLUMN_BYTES", 1 << 12)
    for groups, gathered, window in ((1, 1, 1), (3, 1 << 11, 64), (512, 1 << 20, 1 << 20)):
        monkeypatch.setattr(matrix, "BLOCK_BYTES", 1)
        monkeypatch.setattr(matrix, "BLOCK_GROUPS", groups)
        monkeypatch.setattr(folds, "GATHERED_BYTES", gathered)
        monkeypatch.setattr(visits, "WINDOW_BYTES", window)
        near(influence(tmp_path / "run", model, x), expected, ROUNDING)


def test_streams_share_what_is_gathered(tmp_path: Path) -> None:
    """However large they are, and however many: so much, and a visit of each."""
    record(tmp_path / "run", KEPT["summaries"], "SGD", True)
    ledger = Ledger(tmp_path / "run")
    shards = ShardRange.of(ledger, 1, ledger.last_step)
    streams = [Visits(shards, stream) for stream in ledger.info.streams]
    assert len(streams) > 2
    total = sum(stream.nbytes for stream in streams)
    single = sum(stream.room_for(1) for stream in streams)
    with pytest.MonkeyPatch.context() as patch:
        for gathered in (1, total // 3, total, 10 * total):
            patch.setattr(folds, "GATHERED_BYTES", gathered)
            assert sum(folds._rooms(streams)) <= min(gathered, total) + single


@given(
    st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans(), st.lists(st.integers(1, 4))
)
def test_rows_or_their_sums_are_expanded(
    tall: int, wide: int, outputs: bool, inputs: bool, sizes: list[int]
) -> None:
    """Whichever costs less: against each sample's `U (Σ a ⊗ b) Vᵀ`, of a part of the matrix."""
    if not (outputs or inputs):
        return
    height, width, counts = 7, 9, torch.tensor([2, *sizes])
    rows, region = int(counts.sum()), Region(slice(1, 6), slice(2, 9))
    U = torch.randn(height, tall, dtype=torch.float64) if outputs else None
    V = torch.randn(width, wide, dtype=torch.float64) if inputs else None
    a = torch.randn(rows, tall if outputs else height, dtype=torch.float64)
    b = torch.randn(rows, wide if inputs else width, dtype=torch.float64)
    bases = Bases(U, V)
    blocks = bases.expand(a[:, :, None] * b[:, None, :])
    expected = torch.stack([part.sum(0) for part in blocks.split(counts.tolist())])
    for by_rows in (False, True):
        into = torch.zeros(len(counts), *region.shape, dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group_sums, "_by_rows", lambda *_, by_rows=by_rows: by_rows)
            sides = SummarySides(Sides(a, b), bases)
            group_sums.add_segments(into, sides, counts, region)
        torch.testing.assert_close(into, region.of(expected), rtol=1e-12, atol=1e-12)


def test_what_costs_less_to_expand() -> None:
    """A single row of each sample, or many of them."""
    bases, region = Bases(torch.eye(32)[:, :8], torch.eye(48)[:, :16]), Region.whole(32, 48)
    for each, by_rows in ((1, True), (1000, False)):
        rows = Sides(torch.ones(10 * each, 8), torch.ones(10 * each, 16))
        assert group_sums._by_rows(rows, bases, 10, region) is by_rows


@given(st.lists(st.integers(0, 1 << 40)))
def test_numbers_and_where_they_were(numbers: list[int]) -> None:
    given = torch.tensor(numbers, dtype=torch.long)
    for found, expected in zip(sorted_pairs(given), given.sort(stable=True), strict=True):
        assert torch.equal(found, expected)


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)))
def test_distinct_numbers(parts: list[list[int]]) -> None:
    found = distinct(torch.tensor(part, dtype=torch.long) for part in parts)
    assert found.tolist() == sorted({number for part in parts for number in part})


@given(st.sets(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(-(2**40), 2**40))
def test_the_place_of_a_sample(ids: set[int], first: int) -> None:
    """Of ids that lie far apart, and of ids that lie side by side."""
    for numbers in (sorted(ids), [first + 3 * at for at in range(len(ids))]):
        stored = torch.tensor(numbers)
        order = torch.randperm(len(stored))
        assert torch.equal(BySample(stored).of(order, stored[order], order), order)
