"""Visits in any order are the rows that were written, however they are read."""

from __future__ import annotations

from contextlib import ExitStack
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
from dualform.read.samples_matrix.buckets import Buckets, Gathered, OneByOne
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


def gathered(visits: Visits, parts: list[list[int]], by: str) -> tuple[Tensor, Tensor]:
    """The rows of the visits of each part, keys and values; a part is asked for in two pieces."""
    arrays, every = visits.arrays(), [torch.tensor(part) for part in parts]
    room = torch.empty(visits.room_for(max(map(len, parts))), dtype=torch.uint8)
    found = []
    with ExitStack() as opened:
        way: Gathered = OneByOne(visits, arrays, room)
        if by == "buckets":
            way = Buckets(visits, every, arrays, room, opened, lambda count: None)
        for number, chosen in enumerate(every):
            way.load(number, chosen)
            for begin, end in ((0, len(chosen) // 2), (len(chosen) // 2, len(chosen))):
                found.append([rows.clone() for rows in visits.made(way.records(begin, end))])
    keys, values = (torch.cat(side) for side in zip(*found, strict=True))
    return keys, values


@pytest.mark.parametrize("by", ["buckets", "one by one"])
@settings(deadline=None, max_examples=25)
@given(SHARDS, st.integers(0, 1 << 16))
def test_visits_in_any_order(
    by: str, tmp_path_factory: pytest.TempPathFactory, shards: list[Shard], seed: int
) -> None:
    """Of shards of different precision, in any number of parts, bit for bit."""
    path, random = tmp_path_factory.mktemp("visits") / "run", Random(seed)
    expected = written(path, shards)
    ledger = Ledger(path)
    visits = Visits(ShardRange.of(ledger, 1, ledger.last_step), STREAM)
    every = torch.arange(len(visits))
    assert visits.rows(every).tolist() == [len(keys) for keys, _ in expected]
    order = random.sample(range(len(expected)), random.randint(1, len(expected)))
    each = random.randint(1, len(order))
    parts = [order[at : at + each] for at in range(0, len(order), each)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "WINDOW_BYTES", random.choice([1, 64, 1 << 20]))
        for side, rows in enumerate(gathered(visits, parts, by)):
            assert torch.equal(rows, torch.cat([expected[at][side].float() for at in order]))


def test_large_visits_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read by itself; a temporary file is for small ones."""
    written(tmp_path / "run", [(torch.float32, [(12, 4)])])
    visits = Visits(ShardRange.of(Ledger(tmp_path / "run"), 1, 1), STREAM)
    assert visits.nbytes == 12 * 4 * 20
    for limit, large in ((80, True), (81, False)):
        monkeypatch.setattr(read, "LARGE_BYTES", limit)
        assert visits.large is large


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


@pytest.mark.parametrize("by", ["buckets", "one by one"])
def test_a_file_that_was_cut(by: str, tmp_path: Path) -> None:
    written(tmp_path / "run", [(torch.float32, [(2, 40)])])
    ledger = Ledger(tmp_path / "run")
    visits = Visits(ShardRange.of(ledger, 1, 1), STREAM)
    path = ledger.shards[0].path
    path.write_bytes(path.read_bytes()[:-600])
    with pytest.raises(CorruptError, match="ends before its arrays do"):
        gathered(visits, [[0, 1]], by)


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
