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
from tests.cases.optimizers import OPTIMIZERS
from tests.in_turn import in_turn
from tests.told import told
from torch import Tensor, nn

import dualform
from dualform.ledger import Ledger
from dualform.ledger.codecs import CODECS
from dualform.ledger.tensors import MappedFile, TensorFile
from dualform.read import Run
from dualform.read.coefficients import Accounting
from dualform.read.engine import BlockFold, Engine, Fold, RowReader, Serial, ShardRange, Threads
from dualform.read.progress import LateProgress, watched
from dualform.read.queries import LastVisits
from dualform.recording.recorder import Recorder

KINDS = ["SGD, Nesterov", "AdamW, amsgrad", "Lion", "Muon", "Shampoo", "SOAP"]
KINDS = [name for name in KINDS if name in OPTIMIZERS]
"""Coefficients that are numbers, one for each element, of signs, and made of matrices."""
LOSSY = ("AdamW, amsgrad", "SOAP")
"""Recorded with entries that leave a residual."""
READS = ("audit", "spotlight", "timeline", "explain", "influence", "suspicion", "state_dict")
READS += ("revisit", "rows", "keys_only", "memory", "subtract", "fisher", "tracin", "zoom")
STEPS, SAMPLES = 12, 8


class Small(nn.Module):
    """A table, a convolution and a matrix that is used twice."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.conv = nn.Conv1d(2, 3, 2, bias=bias)
        self.mix = nn.Linear(6, 6, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.table(x).tanh()
        seen = self.conv(seen.reshape(-1, 2, 3)).flatten(1)
        return self.mix(self.mix(seen).tanh())[:, :3]


@pytest.fixture(scope="module", autouse=True)
def _double() -> Iterator[None]:
    """The matrix samples × parameters is made in torch's usual precision."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(usual)


Made = tuple[Path, nn.Module, Tensor]


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


def recorded(optimizer: str, path: Path) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    narrow = optimizer == "Lion"
    x, y = torch.randint(0, 5, (SAMPLES,)), torch.randn(SAMPLES, 3)
    model: nn.Module = Small(bias=True)
    if optimizer in ("Muon", "Shampoo", "SOAP"):  # which take matrices
        model, x = (
            nn.Sequential(nn.Linear(4, 3, False), nn.Tanh(), nn.Linear(3, 3, False)),
            (torch.randn(SAMPLES, 4)),
        )
    if narrow:
        model, y = model.float(), y.float()
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    codec = "bfloat16" if optimizer in LOSSY else "exact"
    with told(path), Recorder(model, made, path, keep=CODECS[codec].policy) as recorder:
        for step in range(STEPS):
            ids = (torch.arange(3) + 3 * step) % SAMPLES
            recorder.samples(ids)
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                out = model(x[ids])
            (out - y[ids]).square().sum().backward()
            made.step()
            made.zero_grad()
            if step == 6:  # weights that somebody changes are booked by step
                with torch.no_grad():
                    next(model.parameters())[0].add_(0.01)
            if step % 3 == 2:
                recorder.checkpoint()
    return model.eval(), x


def answers(run: Run, model: nn.Module, x: Tensor, read: str) -> Any:
    """What a read gives, as an array; remainders are relative already, and are left so."""
    asked = x[:2]
    layer = run.layers[-1]
    numbers = {
        "audit": lambda: [1 + book.remainder for book in run.audit().books],
        "spotlight": lambda: np.concatenate(
            [reading.samples().values for reading in run.spotlight(model, asked).values()], 1
        ),
        "timeline": lambda: run.timeline(model, asked, by="epoch").values,
        "explain": lambda: run.explain(model, asked, 1).values,
        "influence": lambda: run.influence(model, asked, 1).values,
        "fisher": lambda: run.influence(model, asked, 1, method="fisher").values,
        "tracin": lambda: run.influence(model, asked, 1, method="tracin").values,
        "suspicion": lambda: run.suspicion().values,
        "state_dict": lambda: flat(run.at(STEPS - 1).state_dict()),
        "subtract": lambda: flat(run.subtract([0, 3])),
        "revisit": lambda: run.revisit([1, 4])[layer].samples().values,
        "rows": lambda: [row.value for row in run.spotlight(model, asked)[layer].rows(4)],
        "keys_only": lambda: run.spotlight(model, asked)[layer].keys_only().values,
        "memory": lambda: run.spotlight(model, asked)[layer].memory().values.sum(0).numpy(),
        "zoom": lambda: (
            run.zoom([1], model, lambda net, ids: net(x[ids]).square().sum(), steps=[1])
            .contributions(run.spotlight(model, asked)[layer])
            .check.stored
        ),
    }
    return np.asarray(numbers[read](), dtype=float)


def flat(weights: dict[str, Tensor]) -> Any:
    return torch.cat([w.double().flatten() for _, w in sorted(weights.items())]).numpy()


def asked_of(optimizer: str, engine: Engine, make: Callable[[str], Made], read: str) -> Any:
    path, model, x = make(optimizer)
    return answers(dualform.open(path, engine=engine), model, x, read)


RESULTS: dict[tuple[str, str], Any] = {}


def one_by_one(optimizer: str, make: Callable[[str], Made], read: str) -> Any:
    """What one shard after the other gives."""
    if (optimizer, read) not in RESULTS:
        RESULTS[optimizer, read] = asked_of(optimizer, Serial(), make, read)
    return RESULTS[optimizer, read]


def offered(optimizer: str) -> list[str]:
    """Rows with a number each are what `memory` is made of."""
    return [read for read in READS if read != "memory" or optimizer.startswith("SGD")]


def close(found: Any, expected: Any, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


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


def test_folds_shards_and_partial_results_can_be_sent(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    """Every kind of fold, in every read: what comes out elsewhere gives the same result."""
    summarized(tmp_path / "run")
    engine = Sending()
    audits = [dualform.open(tmp_path / "run", engine=e).audit() for e in (engine, Serial())]
    assert audits[0].to_dict() == audits[1].to_dict()
    seen: set[type] = set(engine.seen)
    for optimizer in KINDS:
        for read in offered(optimizer):
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
        found = asked_of("AdamW, amsgrad", Threads(workers), made, read)
        close(found, one_by_one("AdamW, amsgrad", made, read), 1e-12)


def test_threads_give_the_same_bits_each_time(made: Callable[[str], Made]) -> None:
    for read in offered("SGD, Nesterov"):
        one, other = (asked_of("SGD, Nesterov", Threads(3), made, read) for _ in range(2))
        assert np.array_equal(one, other)


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

    def __init__(self, at: int) -> None:
        self._at = at

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
    assert Threads(workers).reduce(Failing(at=99), shards) == STEPS
    for step in (1, STEPS):
        with pytest.raises(RuntimeError, match=f"failed at step {step}"):
            Threads(workers).reduce(Failing(step), shards)


@pytest.mark.parametrize("workers", [1, 3])
def test_progress_is_told_by_the_thread_that_asked(
    workers: int, made: Callable[[str], Made]
) -> None:
    news: list[tuple[str, float, int]] = []
    path, model, x = made("SGD, Nesterov")
    reading = dualform.open(path, engine=Threads(workers)).spotlight(model, x[:1]).last
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
    reading = dualform.open(path, engine=Threads(workers)).spotlight(model, x[:1]).last
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
