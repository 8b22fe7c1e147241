"""Reading on a Ray cluster of three nodes: the same bits as here, whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.objects import access, put_folder
from tests.read.engine_runs import SAMPLES, STEPS, Made, answers, offered, recorded

import dualform
from dualform.cli import cli
from dualform.errors import ClusterError, CorruptError, ReadingError
from dualform.ledger import Ledger
from dualform.ledger.object_path import ObjectPath
from dualform.read.engine import BlockSum, Engine, Fold, Ray, ShardRange, Threads
from dualform.read.engine.cluster import PIECES
from dualform.read.engine.remote import check_version
from dualform.read.progress import watched
from dualform.read.samples_matrix import block_sums, matrix
from dualform.read.timeline import EpochSamples

ray = pytest.importorskip("ray", reason="it needs the extra 'ray'")
pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
NOTICED = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
"""How soon a cluster notices that a node is gone; by default after some 15 seconds."""


def test_what_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before this process is connected to a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for address, why in (("127.0.0.1:1", "refused"), ("nonsense", "Invalid")):
        with pytest.raises(ClusterError, match=f"address='{address}': .*{why}.*ray start --head"):
            dualform.engine("ray", address=address)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ReadingError, match=r'Ray, which is not installed: pip install "dualform\['):
        dualform.engine("ray")


@pytest.fixture(scope="module")
def cluster(s3_port: int) -> Iterator[Any]:
    """Three nodes on this machine, each with a processor, that reach one object storage."""
    from ray.cluster_utils import Cluster

    usual = dict(os.environ)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    os.environ |= access(s3_port)
    head = {**NODE, "include_dashboard": False, "_system_config": NOTICED}
    started = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        started.add_node(**NODE)
    os.environ["RAY_ADDRESS"] = started.address
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield started
    ray.shutdown()
    started.shutdown()
    os.environ.clear()
    os.environ |= usual


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Ray:
    made = dualform.engine("ray", address=cluster.address, part_bytes=1)
    assert isinstance(made, Ray)
    assert made.speedup == 3
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = tmp_path_factory.mktemp("ray") / "run"
    return path, *recorded("SGD, Nesterov", path)


def shards_of(made: Made) -> list[ShardRange]:
    return ShardRange.of(Ledger(made[0]), 1, STEPS)


def asked(engine: Engine, made: Made, read: str) -> Any:
    path, model, x = made
    return answers(dualform.open(path, engine=engine), model, x, read)


def test_every_read_gives_the_bits_of_this_process(engine: Ray, made: Made) -> None:
    for read in offered("SGD, Nesterov"):
        assert np.array_equal(
            asked(engine, made, read), asked(Threads(1, part_bytes=1), made, read)
        ), read


class Pieces(Ray):
    """Notes in how many pieces sums over blocks were cut."""

    def __init__(self) -> None:
        super().__init__(part_bytes=1)
        self.cut: list[int] = []

    def sum_blocks(self, asked: Any, shards: Any) -> Any:
        self.cut.append(len(asked.cut(PIECES)))
        return super().sum_blocks(asked, shards)


@pytest.mark.parametrize("read", ["influence", "fisher", "tracin"])
def test_lines_of_many_samples_are_added_up_on_the_cluster(
    engine: Ray, made: Made, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task makes the blocks of some samples; sums round otherwise than one."""
    expected, pieces = asked(Threads(1), made, read), Pieces()
    monkeypatch.setattr(matrix, "COLUMN_BYTES", 1)
    monkeypatch.setattr(block_sums, "LEAST_GROUPS", 1)
    found = asked(pieces, made, read)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert set(pieces.cut) == {SAMPLES}


def test_what_is_replayed_has_the_same_bits(engine: Ray, tmp_path: Path) -> None:
    made = (tmp_path / "run", *recorded("AdamW, amsgrad", tmp_path / "run"))
    for read in ("audit", "spotlight", "explain"):
        assert np.array_equal(
            asked(engine, made, read), asked(Threads(1, part_bytes=1), made, read)
        ), read


def test_every_machine_reads_object_storage_by_itself(
    engine: Ray, made: Made, bucket: ObjectPath
) -> None:
    """What is sent to them is a URL, and no file."""
    put_folder(made[0], bucket / "run")
    far = (bucket / "run", *made[1:])
    for read in ("audit", "spotlight", "explain"):
        assert np.array_equal(
            asked(engine, far, read), asked(Threads(1, part_bytes=1), made, read)
        ), read


class Order(Fold[str]):
    """Says what was merged with what."""

    streams = ("mix",)

    def start(self) -> str:
        return ""

    def fold(self, partial: str, shard: ShardRange) -> str:
        return f"{partial} {shard.first}"

    def merge(self, one: str, other: str) -> str:
        return f"({one}{other})"


@pytest.mark.parametrize("small", [1 << 20, -1])
def test_results_are_merged_in_the_same_order(
    engine: Ray, made: Made, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight of them by a task, or two."""
    monkeypatch.setattr("dualform.read.engine.cluster.SMALL_BYTES", small)
    steps = [
        replace(shard, first=step, last=step)
        for shard in shards_of(made)
        for step in range(shard.first, shard.last + 1)
    ]
    expected = Threads(1, part_bytes=1).reduce(Order(), steps)
    assert expected.startswith("(((( 1 2)( 3 4))(( 5 6)( 7 8)))")
    assert engine.reduce(Order(), steps) == expected


def test_the_command_line_asks_the_cluster(cluster: Any, engine: Ray, made: Made) -> None:
    def printed(*options: str) -> Any:
        found = CliRunner().invoke(cli, ["audit", str(made[0]), "--json", *options])
        return found.output if found.exception is None else found.exception

    assert printed("--engine", "ray", "--address", cluster.address) == printed()
    assert "give it with --engine ray" in str(printed("--address", cluster.address))


# What dies


@dataclass(frozen=True)
class Interrupted(Fold[Any]):
    """Another fold, whose process is killed, or waits for the end of its node, some times."""

    fold_of: Fold[Any]
    folder: Path
    """Where each interruption leaves a file that names the node."""
    how: str
    times: int = 1
    spared: str = field(default_factory=lambda: str(ray.get_runtime_context().get_node_id()))
    """The node of the process that asks."""

    @property
    def streams(self) -> Sequence[str]:
        return self.fold_of.streams

    def start(self) -> Any:
        return self.fold_of.start()

    def fold(self, partial: Any, shard: ShardRange) -> Any:
        node = ray.get_runtime_context().get_node_id()
        if node != self.spared:
            for number in range(self.times):
                with suppress(FileExistsError), (self.folder / f"{number}").open("x") as file:
                    file.write(node)
                    file.flush()
                    if self.how == "process":
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(600)
        return self.fold_of.fold(partial, shard)

    def merge(self, one: Any, other: Any) -> Any:
        return self.fold_of.merge(one, other)


class Interrupting(Ray):
    """Interrupts the first fold over all of a run that a read makes."""

    def __init__(self, folder: Path, how: str) -> None:
        super().__init__(part_bytes=1)
        self._folder, self._how = folder, how

    def reduce(self, fold: Any, shards: Any, onto: Any = None) -> Any:
        whole = sum(shard.steps for shard in shards) == STEPS
        if whole and not any(self._folder.iterdir()):
            fold = Interrupted(fold, self._folder, self._how)
        return super().reduce(fold, shards, onto)


def test_a_killed_process_is_replaced(engine: Ray, made: Made, tmp_path: Path) -> None:
    found = asked(Interrupting(tmp_path, "process"), made, "rows")
    assert np.array_equal(found, asked(Threads(1, part_bytes=1), made, "rows"))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.long
def test_a_part_whose_processes_always_die_is_given_up(
    engine: Ray, made: Made, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError, match=f"(?s)the shards from '{made[0]}.*after 3 more tries"):
        engine.reduce(Interrupted(Steps(), tmp_path, "process", times=99), shards_of(made))
    assert len(list(tmp_path.iterdir())) >= 4


def test_the_parts_of_a_node_that_is_gone_are_read_elsewhere(
    cluster: Any, engine: Ray, made: Made, tmp_path: Path
) -> None:
    """What it had read is lost with it."""
    expected = asked(Threads(1, part_bytes=1), made, "spotlight")
    removed, answered = list[str](), threading.Event()

    def remove() -> None:
        while not (removed or answered.wait(0.05)):
            named = "".join(marker.read_text() for marker in tmp_path.iterdir())
            for node in [node for node in cluster.worker_nodes if node.node_id == named]:
                cluster.remove_node(node, allow_graceful=False)
                removed.append(named)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        found = asked(Interrupting(tmp_path, "node"), made, "spotlight")
    finally:
        answered.set()
        remover.join()
    cluster.add_node(**NODE)
    assert len(removed) == 1
    assert np.array_equal(found, expected)


# Progress, cancelling, errors


@dataclass(frozen=True)
class Steps(Fold[int]):
    """Counts steps; fails at one of them, or waits for a file."""

    fails: int = 0
    waits: Path | None = None

    streams = ("mix",)

    def start(self) -> int:
        return 0

    def fold(self, partial: int, shard: ShardRange) -> int:
        if shard.first <= self.fails <= shard.last:
            raise ZeroDivisionError("a number that is 0")
        while self.waits is not None and not self.waits.exists():
            time.sleep(0.05)
        return partial + shard.steps

    def merge(self, one: int, other: int) -> int:
        return one + other


def test_an_error_names_its_shard(engine: Ray, made: Made) -> None:
    shards = shards_of(made)
    assert engine.reduce(Steps(), shards) == STEPS
    for step in (1, STEPS):
        path = next(s for s in shards if s.first <= step <= s.last).shard.path
        expected = f"the shard '{path}' could not be read on the node '.*': ZeroDivisionError: a n"
        with pytest.raises(ClusterError, match=expected):
            engine.reduce(Steps(fails=step), shards)


@dataclass(frozen=True)
class Failing(BlockSum[int]):
    """In one of its pieces it fails; or its process is killed, once, and leaves a file."""

    killed: Path | None = None
    number: int = 0

    def cut(self, pieces: int) -> list[Failing]:
        return [replace(self, number=number) for number in range(4)]

    def total(self, shards: Sequence[ShardRange]) -> int:
        if self.number == 2:
            if self.killed is None:
                raise ZeroDivisionError("a number that is 0")
            with suppress(FileExistsError):
                self.killed.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return self.number

    def merge(self, one: int, other: int) -> int:
        return one + other


@pytest.mark.long
def test_a_piece_whose_process_is_killed_is_made_again(
    engine: Ray, made: Made, tmp_path: Path
) -> None:
    assert engine.sum_blocks(Failing(tmp_path / "killed"), shards_of(made)) == 6
    assert (tmp_path / "killed").exists()


def test_an_error_in_a_piece_names_its_shards(engine: Ray, made: Made) -> None:
    """Each reads all of them."""
    shards = shards_of(made)
    first, last = shards[0].shard.path, shards[-1].shard.path
    expected = f"the shards from '{first}' to '{last}' could not be put .* ZeroDivisionError: "
    with pytest.raises(ClusterError, match=expected):
        engine.sum_blocks(Failing(), shards)


def test_a_damaged_shard_is_the_error_it_is_here(engine: Ray, tmp_path: Path) -> None:
    made = (tmp_path / "run", *recorded("SGD, Nesterov", tmp_path / "run"))
    fold, shards = EpochSamples(("mix",)), shards_of(made)
    assert all(map(fold.reads, shards))  # they are opened here, while nothing is wrong with them
    damaged = shards[1].shard
    with damaged.path.open("r+b") as file:
        file.truncate(damaged.record["bytes"] - 1)
    with pytest.raises(CorruptError, match=f"'{damaged.path}' has .* its log says .* on the node"):
        engine.reduce(fold, shards)


def test_progress_is_told_by_the_thread_that_asked(engine: Ray, made: Made) -> None:
    news: list[tuple[str, float, int]] = []
    path, model, x = made
    reading = dualform.open(path, engine=engine).spotlight(model, x[:1]).last
    with watched(lambda doing, share: news.append((doing, share, threading.get_ident()))):
        reading.samples()
    assert {doing for doing, _, _ in news} == {"reading mix"}
    shares = [share for _, share, _ in news]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert len(set(shares)) >= len(shards_of(made))
    assert {thread for _, _, thread in news} == {threading.get_ident()}


def test_a_watcher_can_cancel(engine: Ray, made: Made, tmp_path: Path) -> None:
    """Also while nothing ends; what has begun ends by itself, and nothing else begins."""
    told: list[float] = []

    def cancel(doing: str, share: float) -> None:
        told.append(share)
        raise KeyboardInterrupt

    with watched(cancel), pytest.raises(KeyboardInterrupt):
        engine.reduce(Steps(waits=tmp_path / "go on"), shards_of(made))
    assert told == [0]
    (tmp_path / "go on").touch()
    assert engine.reduce(Steps(), shards_of(made)) == STEPS


# What is refused


@pytest.mark.skipif(sys.platform != "linux", reason="a path that is another one in each process")
def test_a_folder_that_others_do_not_see(
    engine: Ray, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made[0].parent)
    run = dualform.open("/proc/self/cwd/run", engine=engine)
    expected = (
        "there is no folder '/proc/self/cwd/run/.*every machine of the cluster must see the run"
    )
    with pytest.raises(ClusterError, match=expected):
        run.suspicion()


def test_a_path_may_be_relative(engine: Ray, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = dualform.open(made[0]).suspicion().values
    monkeypatch.chdir(made[0].parent)
    found = dualform.open("run", engine=engine).suspicion().values
    assert np.abs(found - expected).max() <= 1e-12 * expected.max()


def test_what_is_not_there_is_refused_in_words(engine: Ray, made: Made) -> None:
    with pytest.raises(
        ReadingError, match=r"no engine 'dask'; there are 'threads', 'ahead' and 'ray'\."
    ):
        dualform.open(made[0], engine="dask")
    with pytest.raises(ClusterError, match=r"is connected to the Ray cluster at .*ray\.shutdown"):
        dualform.engine("ray", address="10.0.0.1:6379")
    with pytest.raises(ClusterError, match=r"no node .* has 64 processors for a task; the 3 nodes"):
        Ray(cpus=64, part_bytes=1).reduce(Steps(), shards_of(made))
    with pytest.raises(ClusterError, match=r"has dualform .*, and 0\.0 asks: install the same on"):
        check_version("0.0")
    with pytest.raises(ReadingError, match="computes on processors, and device='cuda' was given"):
        engine.reduce(OnGpu(), shards_of(made))


class OnGpu(Steps):
    device = "cuda"


CONNECTING = """
import sys
{first}
import dualform
try:
    dualform.engine("ray", address={address!r})
except dualform.DualformError as error:
    print(error)
"""
