"""Every read goes through an engine: what folds are made of, and what they do not depend on."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import reduce
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.in_turn import in_turn
from tests.read.engine_runs import (
    KINDS,
    READS,
    SAMPLES,
    STEPS,
    Made,
    answers,
    close,
    offered,
    recorded,
)
from torch import Tensor, nn

import dualform
from dualform.ledger import Ledger
from dualform.ledger.tensors import MappedFile, TensorFile
from dualform.read import Run
from dualform.read.coefficients import Accounting
from dualform.read.engine import BlockFold, Engine, Fold, RowReader, Serial, ShardRange, Threads
from dualform.read.engine.parts import in_parts, in_tree
from dualform.read.progress import LateProgress, watched
from dualform.read.queries import LastVisits


@pytest.fixture(scope="module", autouse=True)
def _double() -> Iterator[None]:
    """The matrix samples × parameters is made in torch's usual precision."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(usual)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Runs of several shards, one optimizer each; of autocast where signs are followed."""
    known: dict[str, Made] = {}

    def make(optimizer: str) -> Made:
        if optimizer not in known:
            path = tmp_path_factory.mktemp("engine") / "run"
            known[optimizer] = (path, *recorded(optimizer, path))
        return known[optimizer]

    return make


def asked_of(optimizer: str, engine: Engine, make: Callable[[str], Made], read: str) -> Any:
    path, model, x = make(optimizer)
    return answers(dualform.open(path, engine=engine), model, x, read)


RESULTS: dict[tuple[str, str], Any] = {}


def one_by_one(optimizer: str, make: Callable[[str], Made], read: str) -> Any:
    """What one shard after the other gives."""
    if (optimizer, read) not in RESULTS:
        RESULTS[optimizer, read] = asked_of(optimizer, Serial(), make, read)
    return RESULTS[optimizer, read]


# Plain data


class Checked(pickle.Pickler):
    """Refuses what is not plain data: what is open, what computes, and functions of ours."""

    def reducer_override(self, obj: Any) -> Any:
        refused = (Ledger, TensorFile, MappedFile, io.IOBase, nn.Module, Accounting, Run)
        ours = isinstance(obj, FunctionType) and obj.__module__.startswith("dualform")
        assert not isinstance(obj, refused), f"a fold holds {type(obj).__name__}"
        assert not ours, f"a fold holds the function {obj.__qualname__}"
        return NotImplemented


def sent(value: Any) -> Any:
    """As it comes out elsewhere."""
    buffer = io.BytesIO()
    Checked(buffer).dump(value)
    return pickle.loads(buffer.getvalue())


class Sending(Serial):
    """Sends folds, shards and partial results before they are used."""

    def __init__(self) -> None:
        self.seen: set[type] = set()

    def reduce(self, fold: Any, shards: Any, onto: Any = None) -> Any:
        self.seen.add(type(fold))
        partial = sent(fold).start() if onto is None else onto
        for shard in shards:
            partial = sent(sent(fold).fold(sent(partial), sent(shard)))
        if isinstance(onto, Tensor):  # in place, as promised
            onto.copy_(partial)
        return partial

    def reduce_blocks(self, fold: Any, shards: Any) -> Any:
        self.seen.add(type(fold))
        for block in sent(fold).blocks(sent(list(shards))):
            yield sent(block)


def concrete(kind: type) -> set[type]:
    """The kinds of folds there are."""
    found = {kind} if not getattr(kind, "__abstractmethods__", None) else set()
    return found.union(*map(concrete, kind.__subclasses__()))


def summarized(path: Path) -> None:
    """A short run that keeps summaries."""
    model = nn.Linear(12, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, path, keep=dualform.summaries(2, 3)):
        for _ in range(STEPS):
            model(torch.randn(SAMPLES, 5, 12)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.long)])
def test_folds_shards_and_partial_results_can_be_sent(
    every: int, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """Every kind of fold, in every read: what comes out elsewhere gives the same result."""
    summarized(tmp_path / "run")
    engine = Sending()
    audits = [dualform.open(tmp_path / "run", engine=e).audit() for e in (engine, Serial())]
    assert audits[0].to_dict() == audits[1].to_dict()
    seen: set[type] = set(engine.seen)
    for at, optimizer in enumerate(KINDS):
        for read in offered(optimizer)[at % every :: every]:
            engine = Sending()
            found = asked_of(optimizer, engine, made, read)
            close(found, one_by_one(optimizer, made, read), 1e-12 if optimizer == "SOAP" else 0)
            assert engine.seen or read == "state_dict"
            seen |= engine.seen
    kinds = concrete(Fold) | concrete(BlockFold)
    assert seen == {kind for kind in kinds if kind.__module__.startswith("dualform.read")}


class OtherProcess(Serial):
    """Folds in a process that was started anew."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def reduce(self, fold: Any, shards: Any, onto: Any = None) -> Any:
        partial = fold.start() if onto is None else onto
        for shard in shards:
            partial = fold.merge(partial, self._pool.submit(folded, fold, shard).result())
        return partial


def folded(fold: Any, shard: ShardRange) -> Any:
    return fold.fold(fold.start(), shard)


def test_folds_in_another_process(made: Callable[[str], Made]) -> None:
    """Which has never seen the ledger."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for read in ("spotlight", "audit"):
            found = asked_of("AdamW, amsgrad", OtherProcess(pool), made, read)
            close(found, one_by_one("AdamW, amsgrad", made, read), 1e-12)


# Any order, any partition


class Shuffled(Engine):
    """Cuts shards between random steps, puts them into random parts, and merges in any order."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def _parts(self, shards: Sequence[ShardRange]) -> list[list[ShardRange]]:
        pieces = []
        for shard in shards:
            steps = range(shard.first + 1, shard.last + 1)
            cuts = [step for step in steps if self._random.random() < 0.5]
            ends = [*(cut - 1 for cut in cuts), shard.last]
            firsts = [shard.first, *cuts]
            pieces += [
                replace(shard, first=pair[0], last=pair[1])
                for pair in zip(firsts, ends, strict=True)
            ]
        self._random.shuffle(pieces)
        count = self._random.randint(1, 4)
        return [pieces[at::count] for at in range(count)]

    def reduce(self, fold: Any, shards: Any, onto: Any = None) -> Any:
        parts = [reduce(fold.fold, part, fold.start()) for part in self._parts(shards)]
        return reduce(fold.merge, parts if onto is None else [onto, *parts])

    def reduce_blocks(self, fold: Any, shards: Any) -> Any:
        streams = [sent(fold).blocks(part) for part in self._parts(shards)]
        for blocks in zip(*streams, strict=True):
            yield reduce(fold.merge, blocks)


@pytest.mark.parametrize(
    ("optimizer", "read"),
    [given for given in in_turn(KINDS, READS) if given.values[1] in offered(str(given.values[0]))],
)
@settings(deadline=None, max_examples=2)
@given(seed=st.integers(0, 1 << 16))
def test_neither_order_nor_partition_matters(
    optimizer: str, read: str, seed: int, made: Callable[[str], Made]
) -> None:
    found = asked_of(optimizer, Shuffled(seed), made, read)
    close(found, one_by_one(optimizer, made, read), 1e-12)


@pytest.mark.parametrize("workers", [2, 3, 16])
def test_threads_give_what_one_gives(workers: int, made: Callable[[str], Made]) -> None:
    for read in offered("AdamW, amsgrad"):
        found = asked_of("AdamW, amsgrad", Threads(workers, part_bytes=1), made, read)
        close(found, one_by_one("AdamW, amsgrad", made, read), 1e-12)


def test_bits_do_not_depend_on_the_number_of_threads(made: Callable[[str], Made]) -> None:
    """Parts, and the order in which they are merged, are those of the run."""
    for read in offered("SGD, Nesterov"):
        one, *others = (
            asked_of("SGD, Nesterov", Threads(workers, part_bytes=1), made, read)
            for workers in (1, 3, 16)
        )
        assert all(np.array_equal(one, other) for other in others)


@given(st.integers(1, 300), st.integers(0, 8))
def test_partial_results_are_merged_in_one_order(count: int, bits: int) -> None:
    """Also where some neighbors are merged beforehand, as tasks of a cluster do."""
    names = [f"{number}" for number in range(count)]
    groups = [names[at : at + (1 << bits)] for at in range(0, count, 1 << bits)]

    def merge(one: str, other: str) -> str:
        return f"({one} {other})"

    merged = in_tree(merge, names)
    assert merged == in_tree(merge, (in_tree(merge, group) for group in groups))
    assert [name.strip("()") for name in merged.split()] == names


def test_parts_are_not_smaller_than_what_they_give(made: Callable[[str], Made]) -> None:
    ledger = Ledger(made("SGD, Nesterov")[0])
    shards = ShardRange.of(ledger, 1, STEPS)
    total = sum(shard.nbytes for shard in shards)
    assert total == sum(shard.shard.record["bytes"] for shard in shards)
    assert [len(part) for part in in_parts(Failing(0), shards)] == [len(shards)]
    assert [len(part) for part in in_parts(Failing(0), shards, 1)] == [1] * len(shards)
    assert len(in_parts(Failing(0), shards, total // 2)) == 2
    assert len(in_parts(Failing(0, nbytes=total // 16), shards, 1)) == 2
    assert len(in_parts(Failing(0, nbytes=total // 4), shards, 1)) == 1


def test_last_visits_are_those_of_the_latest_step(made: Callable[[str], Made]) -> None:
    """They are asked from the last shard back, and could be asked in any order."""
    path, _, _ = made("SGD, Nesterov")
    ledger = Ledger(path)
    fold = LastVisits(ledger.info.stream("mix"), torch.arange(SAMPLES))
    shards = RowReader(ledger).shards(fold, STEPS)
    expected = Serial().reduce(fold, shards)
    assert sorted(step for step, _ in expected.values()) == [10, 10, 11, 11, 11, 12, 12, 12]
    for seed in range(5):
        found = Shuffled(seed).reduce(fold, shards)
        for number, (step, keys) in expected.items():
            assert found[number][0] == step
            assert torch.equal(found[number][1], keys)


# Progress, cancelling, errors


class Failing(Fold[int]):
    """Fails at a step."""

    streams = ("mix",)

    def __init__(self, at: int, nbytes: int = 0) -> None:
        self._at, self._bytes = at, nbytes

    @property
    def partial_bytes(self) -> int:
        return self._bytes

    def start(self) -> int:
        return 0

    def fold(self, partial: int, shard: ShardRange) -> int:
        if shard.first <= self._at <= shard.last:
            raise RuntimeError(f"failed at step {self._at}")
        return partial + shard.last - shard.first + 1

    def merge(self, one: int, other: int) -> int:
        return one + other


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_an_error_in_a_thread_is_raised(workers: int, made: Callable[[str], Made]) -> None:
    shards = ShardRange.of(Ledger(made("SGD, Nesterov")[0]), 1, STEPS)
    assert Threads(workers, part_bytes=1).reduce(Failing(at=99), shards) == STEPS
    for step in (1, STEPS):
        with pytest.raises(RuntimeError, match=f"failed at step {step}"):
            Threads(workers, part_bytes=1).reduce(Failing(step), shards)


@pytest.mark.parametrize("workers", [1, 3])
def test_progress_is_told_by_the_thread_that_asked(
    workers: int, made: Callable[[str], Made]
) -> None:
    news: list[tuple[str, float, int]] = []
    path, model, x = made("SGD, Nesterov")
    run = dualform.open(path, engine=Threads(workers, part_bytes=1))
    reading = run.spotlight(model, x[:1]).last
    with watched(lambda doing, share: news.append((doing, share, threading.get_ident()))):
        reading.samples()
    assert {doing for doing, _, _ in news} == {"reading mix"}
    shares = [share for _, share, _ in news]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert {thread for _, _, thread in news} == {threading.get_ident()}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_watcher_can_cancel(workers: int, made: Callable[[str], Made]) -> None:
    path, model, x = made("SGD, Nesterov")
    run = dualform.open(path, engine=Threads(workers, part_bytes=1))
    reading = run.spotlight(model, x[:1]).last
    told: list[float] = []

    def cancel(doing: str, share: float) -> None:
        told.append(share)
        raise KeyboardInterrupt

    with watched(cancel), pytest.raises(KeyboardInterrupt):
        reading.samples()
    assert len(told) == 1
    assert not [t for t in threading.enumerate() if t.name.startswith("dualform-fold")]


def test_a_bar_is_for_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log file gets not even an empty line."""
    monkeypatch.setattr("dualform.read.progress.PATIENCE", -1.0)
    for forced, bar in (("", ""), ("1", "reading a layer")):
        monkeypatch.setenv("FORCE_COLOR", forced)
        with LateProgress("a layer", 4) as progress:
            progress.advance(1)
            progress.advance(1)
        shown = capsys.readouterr().err
        assert bar in shown
        assert bool(shown) == bool(bar)
