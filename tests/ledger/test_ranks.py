"""Several ranks write one run: a step counts when all of them have committed it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import pytest
import torch
from tests.ledger.damaging import flip, logs
from tests.processes import SERVER, started

import dualform
from dualform.errors import CorruptError, LedgerError, RunLockedError, UnknownStepError
from dualform.ledger import (
    Book,
    Declaration,
    Ledger,
    LedgerWriter,
    RunInfo,
    SampleTable,
    ShardBlock,
    Stream,
    Term,
)
from dualform.ledger.ids import encode_ids

INFO = RunInfo((Book("w", (1,), "float32"),), "sgd", ("lr", "momentum"))
STREAM = Declaration(Stream("fc", (0,), (1,)), {"w": Term("sum", "flat")})
LR = 0.5


def rank_block(first: int, last: int, rank: int, names: list[str] | None = None) -> ShardBlock:
    """Steps of two samples each, whose errors are 1 for rank 0, 10 for rank 1."""
    count = last - first + 1
    steps = torch.arange(first, last + 1)
    segments = torch.stack([steps, steps, torch.ones_like(steps)], 1)
    ids = {} if names is None else {"ids": [encode_ids(names)]}
    arrays = {
        "fc/keys": [torch.zeros(2 * count, 0)],
        "fc/values": [torch.full((2 * count, 1), 10.0**rank)],
        "fc/segments": [segments],
        "batches": [torch.stack([steps, torch.full_like(steps, 2)], 1)],
        "samples": [torch.arange(2).repeat(count)],
        "hyper": [torch.tensor([[[LR, 0.0]]], dtype=torch.float64).expand(count, 1, 2)],
        "groups": [torch.zeros(count, 1, dtype=torch.int16)],
        "states": [torch.ones(count, 1, dtype=torch.uint8)],
        "factors": [torch.ones(count, 1, dtype=torch.float64)],
        **ids,
    }
    return ShardBlock(first, last, arrays, streams=[STREAM])


def write_as_rank(path: Path, rank: int, begin: int, orders: Connection) -> None:
    """Writes a step for each order until it is told to stop; prints each once it is committed."""
    if rank:
        writer = LedgerWriter.join(path, rank)
    elif begin:
        writer = LedgerWriter.resume(path, begin, of=2)
    else:
        writer = LedgerWriter.create(path, INFO, {"w": torch.zeros(1)}, of=2)
    print(begin, flush=True)
    step = begin
    while orders.recv() == "step":
        step += 1
        writer.append(rank_block(step, step, rank))
        writer.flush()
        print(step, flush=True)
    writer.close()


@dataclass(frozen=True)
class Rank:
    """A process that writes as one rank."""

    process: BaseProcess
    printed: IO[str]
    orders: Connection

    @classmethod
    @contextmanager
    def started(cls, path: Path, rank: int, begin: int) -> Iterator[Rank]:
        theirs, ours = SERVER.Pipe(duplex=False)
        with started(write_as_rank, path, rank, begin, theirs) as (process, printed):
            assert printed.readline() == f"{begin}\n"
            yield cls(process, printed, ours)

    def step(self) -> None:
        """Returns when one more step is committed."""
        self.orders.send("step")
        assert self.printed.readline(), "the process ended before it was asked to"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        self.orders.send("end")
        self.process.join()
        assert self.process.exitcode == 0


@contextmanager
def two_ranks(path: Path, begin: int = 0) -> Iterator[tuple[Rank, Rank]]:
    """Two processes; what is left of them at the end is ended."""
    with Rank.started(path, 0, begin) as zero, Rank.started(path, 1, begin) as one:
        yield zero, one


def weight(path: Path) -> float:
    """What the books of a run add up to."""
    run = dualform.open(path)
    return float(run.state_dict()["w"]) if run.steps else 0.0


def test_the_readable_step_is_the_least_and_a_new_session_voids_both(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with two_ranks(path) as (zero, one):
        for _ in range(3):
            zero.step()
        assert Ledger(path).last_step == 0  # nobody knows yet what rank 1 saw
        for _ in range(2):
            one.step()
        assert Ledger(path).last_step == 2
        with pytest.raises(RunLockedError, match="is recording into"):
            LedgerWriter.resume(path, 2)
        zero.kill()
        with pytest.raises(RunLockedError, match=r"is recording into .* as rank 1"):
            LedgerWriter.resume(path, 2)
        one.step()
        one.kill()
    ledger = Ledger(path)
    assert (ledger.last_step, ledger.unfinished, list(ledger.check())) == (3, True, [])
    assert weight(path) == -LR * 3 * 2 * 11

    with two_ranks(path, begin=2) as (zero, one):
        assert Ledger(path).last_step == 2  # what both ranks wrote beyond step 2 is void
        zero.step()
        zero.step()
        assert Ledger(path).last_step == 2  # also while rank 1 has written nothing new
        one.step()
        assert Ledger(path).last_step == 3
        one.step()
        zero.end()
        assert Ledger(path).unfinished
        one.end()
    ledger = Ledger(path)
    assert (ledger.last_step, ledger.unfinished, list(ledger.check())) == (4, False, [])
    assert weight(path) == -LR * 4 * 2 * 11
    assert sorted(file.name for file in path.glob("end-*.json")) == ["end-0.json", "end-1.json"]


def write(path: Path, spans: dict[int, list[tuple[int, int]]], step: int = 0) -> None:
    """A session of two ranks in this process; each span becomes a shard."""
    if step:
        zero = LedgerWriter.resume(path, step, of=2)
    else:
        zero = LedgerWriter.create(path, INFO, {"w": torch.zeros(1)}, of=2)
    for rank, writer in ((0, zero), (1, LedgerWriter.join(path, 1))):
        for first, last in spans[rank]:
            writer.append(rank_block(first, last, rank))
            writer.flush()
        writer.close()


def test_shards_of_ranks_need_not_end_together(tmp_path: Path) -> None:
    """Rows beyond the readable step are there, and are not used."""
    write(tmp_path / "run", {0: [(1, 5)], 1: [(1, 2), (3, 4)]})
    ledger = Ledger(tmp_path / "run")
    assert (ledger.last_step, len(ledger.shards)) == (4, 3)
    assert weight(tmp_path / "run") == -LR * 4 * 2 * 11
    assert len(ledger.by_step("states")) == 4
    with pytest.raises(UnknownStepError, match="no file of every rank ends there"):
        LedgerWriter.resume(tmp_path / "run", 4)
    LedgerWriter.resume(tmp_path / "run", 0).close()


def test_the_number_of_ranks_may_change(tmp_path: Path) -> None:
    """One rank goes on where two were: it alone decides which of its steps count."""
    path = tmp_path / "run"
    write(path, {0: [(1, 2)], 1: [(1, 2)]})
    writer = LedgerWriter.resume(path, 2)
    writer.append(rank_block(3, 4, 0))
    writer.close()
    ledger = Ledger(path)
    assert (ledger.last_step, ledger.unfinished, list(ledger.check())) == (4, False, [])
    assert weight(path) == -LR * 2 * (2 * 11 + 2)


def test_who_may_join(tmp_path: Path) -> None:
    path = tmp_path / "run"
    zero = LedgerWriter.create(path, INFO, {"w": torch.zeros(1)}, of=2)
    for rank in (-1, 0, 2):
        with pytest.raises(LedgerError, match=rf"rank {rank} cannot join session 1 .*2 ranks"):
            LedgerWriter.join(path, rank)
    one = LedgerWriter.join(path, 1)
    with pytest.raises(LedgerError, match=r"\[0, 1\] have begun"):
        LedgerWriter.join(path, 1)
    for writer in (zero, one):
        writer.close()
    assert sorted(p.name for p in path.glob("*.lock")) == ["writer-0.lock", "writer-1.lock"]


def test_each_rank_numbers_its_ids(tmp_path: Path) -> None:
    """The same string is the same sample, whatever number a rank has given it."""
    path = tmp_path / "run"
    zero = LedgerWriter.create(path, INFO, {"w": torch.zeros(1)}, of=2)
    one = LedgerWriter.join(path, 1)
    zero.append(rank_block(1, 1, 0, ["ant", "bee"]))
    one.append(rank_block(1, 1, 1, ["bee", "cat"]))
    for writer in (zero, one):
        writer.close()
    run = dualform.open(path)
    assert run.ids == ["ant", "bee", "cat"]
    now = float(run.state_dict()["w"])
    added = {name: now - float(run.subtract([name])["w"]) for name in run.ids}
    assert added == {"ant": -LR, "bee": -LR * 11, "cat": -LR * 10}


def test_changes_count_once_and_residuals_add_up(tmp_path: Path) -> None:
    """All ranks see a change of a weight; what entries leave is of a rank's own rows."""
    zero = LedgerWriter.create(tmp_path / "run", INFO, {"w": torch.zeros(1)}, of=2)
    for rank, writer in enumerate([zero, LedgerWriter.join(tmp_path / "run", 1)]):
        block = rank_block(1, 2, rank)
        block.arrays["states"] = [torch.tensor([[1], [2]], dtype=torch.uint8)]
        block.arrays |= {"w/residuals": [torch.full((1, 1), 0.25)]}
        block.arrays |= {"w/residual_steps": [torch.tensor([1])]}
        block.arrays |= {"w/changes": [torch.ones(1, 1)], "w/change_steps": [torch.tensor([2])]}
        writer.append(block)
        writer.close()
    assert weight(tmp_path / "run") == -LR * (2 * 11 + 2 * 0.25) + 1


def test_samples_without_ids_are_counted_in_strides() -> None:
    tables = [SampleTable(rank=rank, of=3, counted=7) for rank in range(3)]
    numbers = [n for table in tables for size in (2, 3) for n in table.count(size).tolist()]
    assert sorted(numbers) == list(range(7, 22))
    assert SampleTable().count(4).tolist() == [0, 1, 2, 3]


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Two sessions of two ranks: logs 0 and 1 are the first's, 2 and 3 the second's."""
    write(tmp_path / "run", {0: [(1, 1), (2, 2)], 1: [(1, 1), (2, 2)]})
    write(tmp_path / "run", {0: [(3, 3)], 1: [(3, 3)]}, step=2)
    assert Ledger(tmp_path / "run").last_step == 3
    return tmp_path / "run"


@pytest.mark.parametrize("which", range(4))
def test_damage_to_any_rank_s_log_is_named(which: int, finished: Path, tmp_path: Path) -> None:
    data = logs(finished)[which].read_bytes()
    lines = data.splitlines(keepends=True)
    shorter = [b"".join(lines[:at] + lines[at + 1 :]) for at in range(len(lines))]
    for number, damaged in enumerate([*shorter, flip(data, -3), flip(data, 9)]):
        path = shutil.copytree(finished, tmp_path / f"copy-{number}")
        log = logs(path)[which]
        log.write_bytes(damaged)
        with pytest.raises(CorruptError, match=f"{log.parent.name}"):
            Ledger(path)


@pytest.mark.parametrize("which", range(4))
def test_a_lost_log_of_any_rank_is_named(which: int, finished: Path) -> None:
    log = logs(finished)[which]
    shutil.rmtree(log.parent)
    with pytest.raises(CorruptError, match=log.parent.name):
        Ledger(finished)


def test_a_gap_in_one_rank_ends_what_can_be_read(finished: Path) -> None:
    log = logs(finished)[1]
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    left = Ledger(finished, damaged=True)
    assert left.last_step == 1
    assert any("steps 2 to 2 of rank 1 are missing" in problem for _, problem in left.check())


def test_a_log_under_another_rank_s_name_is_named(finished: Path) -> None:
    folder = logs(finished)[3].parent
    folder.rename(folder.with_name(folder.name.replace("rank1", "rank2")))
    with pytest.raises(CorruptError, match=r"is missing|has another name"):
        Ledger(finished)


def test_a_second_log_of_a_rank_is_named(finished: Path) -> None:
    folder = logs(finished)[3].parent
    shutil.copytree(folder, folder.with_name(folder.name[:-8] + "00000000"))
    with pytest.raises(CorruptError, match="is the second log of rank 1 in session 2"):
        Ledger(finished)
