"""Visits in any order are the rows that were written, however they are read."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualform.errors import CorruptError
from dualform.ledger import Declaration, Ledger, Records, RunInfo, Stream
from dualform.ledger.codecs import Exact
from dualform.ledger.writer import LedgerWriter, ShardBlock
from dualform.read.engine import ShardRange
from dualform.read.grouping import BySample
from dualform.read.samples_matrix import folds
from dualform.read.samples_matrix import visits as read
from dualform.read.samples_matrix.matrix import SamplesMatrix
from dualform.read.samples_matrix.sparse import SparseLines
from dualform.read.samples_matrix.visits import Visits
from dualform.testing import tiny_run

STREAM = Stream("fc", (2,), (3,))
PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]
SHARDS = st.lists(
    st.tuples(
        st.sampled_from(PRECISIONS),
        st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=2, max_size=4),
    ),
    min_size=1,
    max_size=3,
)
Shard: TypeAlias = tuple[torch.dtype, list[tuple[int, int]]]
"""Its precision, and of its steps: how many samples, and rows of each."""


def written(path: Path, shards: list[Shard]) -> list[tuple[Tensor, Tensor]]:
    """Writes a ledger; the keys and values of each visit, in the order of time."""
    writer = LedgerWriter.create(path, RunInfo(), {"w": torch.zeros(2)})
    step, found = 0, []
    for dtype, steps in shards:
        rows = sum(samples * each for samples, each in steps)
        keys = torch.randn(rows, 2).to(dtype)
        values = torch.randn(rows, 3).to(dtype)
        numbers = range(step + 1, step + 1 + len(steps))
        segments = [[at, at, each] for at, (_, each) in zip(numbers, steps, strict=True)]
        batches = [[at, samples] for at, (samples, _) in zip(numbers, steps, strict=True)]
        lengths = [each for samples, each in steps for _ in range(samples)]
        arrays = {"fc/keys": [keys], "fc/values": [values]}
        arrays |= {"fc/segments": [torch.tensor(segments)], "batches": [torch.tensor(batches)]}
        arrays |= {"samples": [torch.arange(len(lengths))]}
        declared = Declaration(STREAM, {}, Exact.for_records(Records(keys, values)))
        writer.append(ShardBlock(step + 1, step + len(steps), arrays, streams=[declared]))
        writer.flush()
        found += zip(keys.split(lengths), values.split(lengths), strict=True)
        step += len(steps)
    writer.close()
    return found


def loaded(visits: Visits, order: list[int]) -> tuple[Tensor, Tensor]:
    """The rows of some visits after others, keys and values."""
    chosen = torch.tensor(order)
    return visits.made(visits.load(chosen), 0, int(visits.records(chosen).sum()))


@settings(deadline=None, max_examples=25)
@given(SHARDS, st.integers(0, 1 << 16))
def test_visits_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, shards: list[Shard], seed: int
) -> None:
    """Of shards of different precision, with gaps skipped or read along, large visits or small."""
    path, random = tmp_path_factory.mktemp("visits") / "run", Random(seed)
    expected = written(path, shards)
    ledger = Ledger(path)
    visits = Visits(ShardRange.of(ledger, 1, ledger.last_step), STREAM)
    every = torch.arange(len(visits))
    assert visits.rows(every).tolist() == [len(keys) for keys, _ in expected]
    order = random.sample(range(len(expected)), random.randint(1, len(expected)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "GAP_BYTES", random.choice([0, 16, 1 << 30]))
        patch.setattr(read, "LARGE_BYTES", random.choice([0, 16, 1 << 30]))
        for side, rows in enumerate(loaded(visits, order)):
            assert torch.equal(rows, torch.cat([expected[at][side].float() for at in order]))


def test_gaps_are_read_along_or_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of keys between visits 0 and 2, five between 3 and 9."""
    expected = written(tmp_path / "run", [(torch.float32, [(12, 1)])])
    visits, order = Visits(ShardRange.of(Ledger(tmp_path / "run"), 1, 1), STREAM), [9, 0, 3, 2, 11]
    monkeypatch.setattr(read, "GAP_BYTES", 16)
    keys, values = loaded(visits, order)
    assert torch.equal(keys, torch.cat([expected[at][0] for at in order]))
    assert torch.equal(values, torch.cat([expected[at][1] for at in order]))


def test_until_a_step(tmp_path: Path) -> None:
    written(tmp_path / "run", [(torch.float32, [(2, 1), (3, 2)]), (torch.float32, [(1, 1)])])
    visits = Visits(ShardRange.of(Ledger(tmp_path / "run"), 1, 2), STREAM)
    every = torch.arange(len(visits))
    assert visits.steps(every).tolist() == [1, 1, 2, 2, 2]
    assert visits.samples(every).tolist() == [0, 1, 2, 3, 4]
    steps, samples, positions = visits.of_rows(torch.tensor([3, 0]))
    assert steps.tolist() == [2, 2, 1]
    assert samples.tolist() == [3, 3, 0]
    assert positions.tolist() == [0, 1, 0]


def test_one_visit_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What samples add does not depend on how many visits are held at once."""
    run, _, _ = tiny_run()
    grouping = BySample(run.source.numbers)

    def columns() -> list[Tensor]:
        matrix = SamplesMatrix(run.source.accounting, grouping)
        return [columns.values.clone() for columns in matrix.columns()]

    together = columns()
    monkeypatch.setattr(folds, "GATHERED_BYTES", 1)
    monkeypatch.setattr(read, "CACHED_BYTES", 1)
    for one, all_ in zip(columns(), together, strict=True):
        torch.testing.assert_close(one, all_)


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    written(tmp_path / "run", [(torch.float32, [(2, 40)])])
    ledger = Ledger(tmp_path / "run")
    visits = Visits(ShardRange.of(ledger, 1, 1), STREAM)
    path = ledger.shards[0].path
    path.write_bytes(path.read_bytes()[:-600])
    with pytest.raises(CorruptError, match="ends before its arrays do"):
        loaded(visits, [0, 1])


def test_lines_that_are_mostly_0() -> None:
    """Against dense algebra; of lines of which one alone has too much, nothing is left out."""
    C = torch.randn(30, 4, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = torch.rand(30, 40, generator=torch.Generator().manual_seed(1)) < 0.1
    C *= seen[:, None]
    lines = SparseLines.of(C)
    assert lines is not None
    assert len(lines.values) == int(seen.sum())
    torch.testing.assert_close(lines.grams(), torch.einsum("nls,nlt->lst", C, C))
    x = torch.randn(5, 4, 40, dtype=torch.float64)
    torch.testing.assert_close(lines.times(x), torch.einsum("nls,qls->nq", C, x))
    C[:, 2] = 1.0
    assert SparseLines.of(C) is None
    assert SparseLines.of(C[:, 2:]) is None
