"""The state machine of a run: what ranks and readers may do to it, in any order.

A model says after every move which steps count and what the books add up to.
"""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.ledger.damaging import flip
from tests.ledger.test_ranks import INFO, LR, rank_block

import dualform
from dualform.errors import LedgerError, UnknownStepError
from dualform.ledger import Ledger, LedgerWriter
from dualform.ledger.copying import copy_run
from dualform.ledger.format import INITIAL_FILE, RUN_FILE

RANKS = 3


class Session:
    """What one session has committed: a step for each rank, and where its shards end."""

    def __init__(self, step: int, of: int) -> None:
        self.step, self.of = step, of
        self.reached: dict[int, int] = {}
        self.ends: dict[int, set[int]] = {}

    @property
    def last(self) -> int:
        """The last step that all ranks have committed."""
        return min(self.reached.values()) if len(self.reached) == self.of else self.step


class Runs(RuleBasedStateMachine):
    """One run, whatever folder it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(mkdtemp())
        self.copies = 0
        self.writers: dict[int, LedgerWriter] = {}
        self.next: dict[int, int] = {}
        self.marked: set[int] = set()

    def teardown(self) -> None:
        for writer in self.writers.values():
            writer.abandon()
        shutil.rmtree(self.folder)

    @initialize(of=st.integers(1, RANKS))
    def create(self, of: int) -> None:
        self.path = self.elsewhere()
        writer = LedgerWriter.create(self.path, INFO, {"w": torch.zeros(1)}, of=of)
        self.sessions = [Session(0, of)]
        self.begin(0, writer)

    def elsewhere(self) -> Path:
        self.copies += 1
        return self.folder / f"run-{self.copies}"

    def begin(self, rank: int, writer: LedgerWriter) -> None:
        session = self.sessions[-1]
        self.writers[rank], self.next[rank] = writer, session.step + 1
        session.reached[rank], session.ends[rank] = session.step, {session.step}

    @property
    def last(self) -> int:
        return self.sessions[-1].last

    def books(self, step: int) -> float:
        """What the books say of w: ranks add 1, 10 and 100 for each of two samples."""
        of_step: dict[int, int] = {}
        for session in self.sessions:
            of_step |= dict.fromkeys(range(session.step + 1, step + 1), session.of)
        return -LR * sum(2 * sum(10**rank for rank in range(of)) for of in of_step.values())

    @precondition(lambda self: self.writers)
    @rule(counts=st.lists(st.integers(1, 3), min_size=1, max_size=RANKS), commits=st.booleans())
    def record(self, counts: list[int], commits: bool) -> None:
        """Some steps by each rank that is there: some ranks are ahead of others."""
        for rank, count in zip(sorted(self.writers), counts, strict=False):
            self.append(rank, count)
            if commits:
                self.writers[rank].flush()
                self.committed(rank)

    def append(self, rank: int, count: int) -> None:
        first = self.next[rank]
        self.next[rank] += count
        block = rank_block(first, first + count - 1, rank)
        if first > self.sessions[-1].step + 1:
            block.streams.clear()  # declared by the first block; such blocks become one shard
        self.writers[rank].append(block)

    @precondition(lambda self: 0 in self.writers)
    @rule(count=st.integers(1, 3))
    def train(self, count: int) -> None:
        """All ranks are there, and commit steps until they are even."""
        for rank in range(len(self.sessions[-1].reached), self.sessions[-1].of):
            self.begin(rank, LedgerWriter.join(self.path, rank))
        until = max(self.next[rank] for rank in self.writers) + count
        for rank, writer in self.writers.items():
            self.append(rank, until - self.next[rank])
            writer.flush()
            self.committed(rank)

    def committed(self, rank: int) -> None:
        session = self.sessions[-1]
        session.reached[rank] = self.next[rank] - 1
        session.ends[rank].add(session.reached[rank])

    @precondition(lambda self: 0 in self.writers and self.last > 0)
    @rule()
    def keep_weights(self) -> None:
        step = self.last
        self.writers[0].weights(step, {"w": torch.tensor([self.books(step)])}, "checkpoint")
        self.writers[0].flush()
        self.committed(0)
        self.marked.add(step)

    @precondition(lambda self: self.writers)
    @rule(torn=st.booleans())
    def die(self, torn: bool) -> None:
        """All that is left is the folder as it was at that moment."""
        left = shutil.copytree(
            self.path,
            self.elsewhere(),
            ignore=lambda _, names: [name for name in names if name.endswith(".lock")],
        )
        if torn:
            for log in left.glob("writer-*/commits.jsonl"):
                if any(log.parent.name == own.folder.name for own in self.writers.values()):
                    with log.open("ab") as file:
                        file.write(b'{"kind": "rows", "fi')
        for writer in self.writers.values():
            writer.abandon()
        self.writers, self.path = {}, left

    @precondition(lambda self: self.writers)
    @rule()
    def close(self) -> None:
        for rank, writer in self.writers.items():
            writer.close()
            self.committed(rank)
        self.writers = {}

    @precondition(lambda self: not self.writers)
    @rule(data=st.data(), of=st.integers(1, RANKS))
    def go_on(self, data: st.DataObject, of: int) -> None:
        step = data.draw(st.integers(0, self.last))
        can = any(
            step == session.step
            or (step <= session.last and all(step in ends for ends in session.ends.values()))
            for session in self.sessions
        )
        if not can:
            with pytest.raises(UnknownStepError, match=f"after step {step}: no file of every rank"):
                LedgerWriter.resume(self.path, step, of=of)
            return
        writer = LedgerWriter.resume(self.path, step, of=of)
        self.sessions = [session for session in self.sessions if session.step <= step]
        for session in self.sessions:
            for rank, reached in session.reached.items():
                session.ends[rank] = {end for end in session.ends[rank] if end <= step}
                session.reached[rank] = max(
                    [end for end in session.ends[rank] if end <= reached], default=session.step
                )
        self.marked = {mark for mark in self.marked if mark <= step}
        self.sessions.append(Session(step, of))
        self.begin(0, writer)

    @precondition(lambda self: not self.writers)
    @rule()
    def copy(self) -> None:
        to = self.elsewhere()
        to.mkdir()
        copy_run(Ledger(self.path), to)
        self.path = to

    @precondition(lambda self: not self.writers)
    @rule(confirmed=st.booleans())
    def compact(self, confirmed: bool) -> None:
        done = dualform.compact(self.path, keep="int8")
        if done.changed:
            done.confirm() if confirmed else done.undo()

    @precondition(lambda self: not self.writers)
    @rule(seed=st.integers(0, 2**32))
    def repair(self, seed: int) -> None:
        """A damaged file costs the steps from it on, and no others; recording can go on."""
        draw, damaged = random.Random(seed), shutil.copytree(self.path, self.elsewhere())
        files = sorted(
            file for file in damaged.rglob("*") if file.is_file() and file.stat().st_size
        )
        file = draw.choice([one for one in files if one.name not in (RUN_FILE, INITIAL_FILE)])
        data = file.read_bytes()
        cut = draw.random() < 0.3
        file.unlink()  # the copy of a compaction may share its bytes
        file.write_bytes(
            data[: draw.randrange(len(data))] if cut else flip(data, draw.randrange(len(data)))
        )
        try:
            found = dualform.repair(damaged)
        except LedgerError as error:
            assert "no log that says how it began" in str(error)  # noqa: PT017
            return
        if found.to is None:
            assert self.is_right(damaged, found.steps)
            return
        assert self.is_right(found.to, found.steps)
        with suppress(UnknownStepError):
            writer = LedgerWriter.resume(found.to, found.steps)
            writer.append(rank_block(found.steps + 1, found.steps + 1, 0))
            writer.close()
            assert Ledger(found.to).last_step == found.steps + 1

    def is_right(self, path: Path, steps: int) -> bool:
        ledger, run = Ledger(path), dualform.open(path)
        assert ledger.last_step == steps <= self.last
        assert list(ledger.check()) == []
        if steps:
            assert float(run.state_dict()["w"]) == self.books(steps)
        return True

    @invariant()
    def what_all_ranks_committed_counts(self) -> None:
        assert self.is_right(self.path, self.last)
        ledger = Ledger(self.path)
        assert ledger.kept_steps == [0, *sorted(s for s in self.marked if s <= self.last)]


def test_any_order_of_moves() -> None:
    run_state_machine_as_test(
        Runs, settings=settings(max_examples=15, stateful_step_count=20, deadline=None)
    )


@pytest.mark.long
def test_many_orders_of_moves() -> None:
    run_state_machine_as_test(
        Runs, settings=settings(max_examples=400, stateful_step_count=50, deadline=None)
    )
