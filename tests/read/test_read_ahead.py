"""Reading ahead: any number of threads, buffers and any size of chunks gives the same rows."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.objects import put_folder
from tests.read.engine_runs import Made, answers, close, offered, recorded
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import dualform
from dualform.cli import cli
from dualform.errors import CorruptError, ReadingError
from dualform.ledger import Stream
from dualform.ledger.codecs import CODECS
from dualform.ledger.object_path import ObjectPath
from dualform.read import Run
from dualform.read.engine import Engine, Part, ReadAhead, Serial, ShardRange, read_ahead
from dualform.read.engine.bus import Bus
from dualform.read.engine.devices import exact_products
from dualform.read.progress import watched
from dualform.read.scan import chunks
from dualform.read.stream_folds import StreamFold

READS = ("audit", "spotlight", "timeline", "suspicion", "rows", "keys_only", "memory", "subtract")
"""Those that go through the rows of streams."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Runs of several shards in float64, one optimizer each."""
    known: dict[str, Made] = {}

    def make(optimizer: str) -> Made:
        if optimizer not in known:
            path = tmp_path_factory.mktemp("ahead") / "run"
            usual = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            known[optimizer] = (path, *recorded(optimizer, path))
            torch.set_default_dtype(usual)
        return known[optimizer]

    return make


@pytest.mark.parametrize("optimizer", ["SGD, Nesterov", "AdamW, amsgrad", "Lion"])
def test_every_read_is_the_same(made: Callable[[str], Made], optimizer: str) -> None:
    """Of each optimizer and codec: tables, convolutions, operators, summaries of changes."""
    path, model, x = made(optimizer)
    engine = ReadAhead(readers=3, buffers=2, chunk_bytes=200)
    for read in [read for read in READS if read in offered(optimizer)]:
        found, expected = (
            answers(dualform.open(path, engine=who), model, x, read) for who in (engine, Serial())
        )
        close(found, expected, 1e-11)


def whole_numbers(path: Path, keep: str) -> tuple[nn.Module, Tensor]:
    """A run whose rows and coefficients are whole numbers, so that many are of the same size."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with dualform.record(model, optimizer, path, keep=keep) as recorder:
        for step in range(9):
            x, y = torch.randint(-2, 3, (7, 2, 4)).float(), torch.randint(-1, 2, (7, 2, 3))
            recorder.samples([(5 * step + at) % 20 for at in range(7)])
            (model(x) * y).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 1:
                recorder.checkpoint()
    return model, torch.randint(-2, 3, (5, 4)).float()


@pytest.fixture(scope="module")
def each_codec(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, nn.Module, Tensor]]:
    found = []
    for name, codec in CODECS.items():
        path = tmp_path_factory.mktemp(name) / "run"
        found.append((path, *whole_numbers(path, codec.policy)))
    return found


@pytest.fixture(scope="module")
def equal_rows(
    each_codec: list[tuple[Path, nn.Module, Tensor]],
) -> tuple[Path, nn.Module, Tensor]:
    return each_codec[0]


def largest(run: Run, model: nn.Module, x: Tensor, k: int) -> list[Any]:
    return [row._asdict() for row in run.spotlight(model, x, output=1)["model"].rows(k).rows]


@settings(deadline=None, max_examples=4)
@given(
    readers=st.integers(1, 5),
    buffers=st.integers(1, 6),
    chunk_bytes=st.integers(1, 2000),
    k=st.integers(1, 40),
)
def test_the_same_rows_whatever_the_buffers(
    each_codec: list[tuple[Path, nn.Module, Tensor]],
    readers: int,
    buffers: int,
    chunk_bytes: int,
    k: int,
) -> None:
    """Bit for bit, of each codec, and of rows of the same size the earlier."""
    engine = ReadAhead(readers=readers, buffers=buffers, chunk_bytes=chunk_bytes)
    for path, model, x in each_codec:
        found = largest(dualform.open(path, engine=engine), model, x, k)
        assert found == largest(dualform.open(path), model, x, k)


class LateBus(Bus):
    """To memory of its own; each copy is made some time after it was asked for."""

    def __init__(self) -> None:
        self._copies: list[threading.Timer] = []

    main_memory = device_memory = staticmethod(partial(torch.empty, dtype=torch.uint8))

    def computed(self) -> Any:
        done = threading.Timer(0, int)
        done.start()
        return done

    def copy(self, source: Tensor, into: Tensor, free: Any) -> Any:
        def work() -> None:
            free.join()
            into.copy_(source)

        copied = threading.Timer(random.uniform(0, 2e-3), work)
        copied.synchronize = copied.join  # type: ignore[attr-defined]
        copied.start()
        self._copies.append(copied)
        return copied

    def wait(self, copied: Any) -> None:
        copied.join()

    def end(self) -> None:
        assert len(self._copies) > 3
        for copied in self._copies:
            copied.join()


@pytest.mark.parametrize(("readers", "buffers", "chunk_bytes"), [(5, 2, 300), (3, 1, 900)])
def test_memory_is_used_again_only_behind_its_copy(
    each_codec: list[tuple[Path, nn.Module, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    readers: int,
    buffers: int,
    chunk_bytes: int,
) -> None:
    """The way to a GPU, with copies to main memory that come late, and any number of buffers."""
    monkeypatch.setattr(read_ahead, "bus_to", lambda device: LateBus())
    engine = ReadAhead(readers=readers, buffers=buffers, chunk_bytes=chunk_bytes)
    for path, model, x in each_codec:
        found = largest(dualform.open(path, engine=engine), model, x, 9)
        assert found == largest(dualform.open(path), model, x, 9)
    assert not reading_threads()


def test_what_rows_share_is_read_too(tmp_path: Path) -> None:
    """Summaries in bases, a weight norm's matrices, and keys that are stored once."""
    x, y = torch.randn(8, 3, 12), torch.randn(8, 3, 9)
    for keep in ("rows", dualform.summaries(2, 3)):
        last = weight_norm(nn.Linear(12, 9)) if keep == "rows" else nn.Linear(12, 9)
        model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        path = tmp_path / str(keep == "rows")
        with dualform.record(model, optimizer, path, keep=keep) as recorder:
            for step in range(12):
                ids = (torch.arange(4) + 4 * step) % 8
                recorder.samples(ids)
                (model(x[ids]) - y[ids]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 5:
                    recorder.checkpoint()
        engine = ReadAhead(readers=2, buffers=2, chunk_bytes=500)
        runs = [dualform.open(path, engine=who) for who in (engine, Serial())]
        streams = runs[0].info.streams
        assert any(stream.shared or any(stream.bases) for stream in streams)
        if keep == "rows":
            assert any(shard.repeating for shard in runs[0].source.ledger.shards)
        for read in ("audit", "subtract"):
            found, expected = (answers(run, model, x, read) for run in runs)
            close(found, expected, 1e-5)
        for layer in ("0", "2"):
            both = [run.spotlight(model, x[:2])[layer] for run in runs]
            close(*(reading.samples().values for reading in both), 1e-5)
            close(*(np.array([row.value for row in r.rows(9).rows]) for r in both), 1e-5)


@dataclass(frozen=True)
class Places(StreamFold[list[int]]):
    """Where the memory of each chunk lies."""

    read: Stream

    @property
    def read_streams(self) -> list[Stream]:
        return [self.read]

    def start(self) -> list[int]:
        return []

    def fold(self, partial: list[int], shard: ShardRange) -> list[int]:
        return partial + [chunk.values.data_ptr() for chunk in chunks(shard, self.read)]

    def merge(self, one: list[int], other: list[int]) -> list[int]:
        return one + other


def folded(path: Path, kind: type[Places], engine: Engine) -> list[int]:
    run = dualform.open(path, engine=engine)
    return run.source.reader.reduce(kind(run.info.streams[0]), run.steps)


def test_memory_is_that_of_the_buffers(equal_rows: tuple[Path, nn.Module, Tensor]) -> None:
    """However many chunks there are, and however far readers are ahead."""
    found = folded(equal_rows[0], Places, ReadAhead(readers=5, buffers=3, chunk_bytes=64))
    assert len(found) > 20 > 3 >= len(set(found))


class Forgetful(Places):
    def fold(self, partial: list[int], shard: ShardRange) -> list[int]:
        return partial


class Small(Places):
    """On a device that has room for chunks of 3 MB at most."""

    room = 3 << 20

    def parts(self, shard: ShardRange, chunk_bytes: int) -> Iterator[Part]:
        if chunk_bytes > self.room:
            raise torch.OutOfMemoryError
        return super().parts(shard, chunk_bytes)


class Smallest(Small):
    room = 0


def test_where_a_device_has_little_memory_chunks_are_smaller(
    equal_rows: tuple[Path, nn.Module, Tensor],
) -> None:
    assert len(folded(equal_rows[0], Small, ReadAhead())) == len(
        folded(equal_rows[0], Places, ReadAhead())
    )
    with pytest.raises(ReadingError, match=r"'cpu' has not enough memory .* chunks of 1 MB\. Ask"):
        folded(equal_rows[0], Smallest, ReadAhead())


def test_a_fold_that_does_not_read_what_it_says(
    equal_rows: tuple[Path, nn.Module, Tensor],
) -> None:
    with pytest.raises(
        RuntimeError, match=r"Forgetful\.parts names 'model', which its fold did not"
    ):
        folded(equal_rows[0], Forgetful, ReadAhead())
    assert not reading_threads()


def reading_threads() -> list[str]:
    every = [thread.name for thread in threading.enumerate()]
    return [name for name in every if name.startswith(("dualform-read", "dualform-plan"))]


def test_what_goes_wrong_while_reading_is_raised(tmp_path: Path) -> None:
    """As the same error as without reading ahead, and no thread is left."""
    model, x = whole_numbers(tmp_path / "run", "rows")
    run = dualform.open(tmp_path / "run", engine=ReadAhead(readers=2, chunk_bytes=300))
    reading = run.spotlight(model, x, output=1)["model"]
    last = run.source.ledger.shards[-1]
    assert last.file  # whose header is known
    os.truncate(last.path, last.path.stat().st_size - 40)
    with pytest.raises(CorruptError, match="ends before its arrays do"):
        reading.rows(3)
    assert not reading_threads()


def test_a_read_can_be_cancelled(equal_rows: tuple[Path, nn.Module, Tensor]) -> None:
    path, model, x = equal_rows
    reading = dualform.open(path, engine=ReadAhead(chunk_bytes=200)).spotlight(model, x)["model"]

    def stop(doing: str, share: float) -> None:
        if share > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watched(stop):
        reading.rows(3)
    assert not reading_threads()
    assert len(reading.rows(3).rows) == 15


def test_what_cannot_be_is_refused_in_words(equal_rows: tuple[Path, nn.Module, Tensor]) -> None:
    with pytest.raises(ReadingError, match=r"buffers=0: expected 1 or more\."):
        dualform.engine("ahead", buffers=0)
    with pytest.raises(ReadingError, match=r"no device 'gpu': torch .* finds 'cpu'.* on this"):
        dualform.open(equal_rows[0], device="gpu")
    with pytest.raises(ReadingError, match=r"no device 'cuda:63': .*leave the device out"):
        dualform.open(equal_rows[0], device="cuda:63")


def test_objects_are_read_ahead(
    bucket: ObjectPath, equal_rows: tuple[Path, nn.Module, Tensor]
) -> None:
    """By several threads at a time, from a real server."""
    path, model, x = equal_rows
    put_folder(path, bucket / "ahead")
    engine = ReadAhead(readers=4, chunk_bytes=500)
    far = dualform.open(str(bucket / "ahead"), engine=engine)
    assert largest(far, model, x, 9) == largest(dualform.open(path), model, x, 9)


def test_the_command_line_says_where(equal_rows: tuple[Path, nn.Module, Tensor]) -> None:
    def printed(*options: str) -> Any:
        found = CliRunner().invoke(cli, ["audit", str(equal_rows[0]), "--json", *options])
        return found.output if found.exception is None else found.exception

    assert printed("--engine", "ahead", "--device", "cpu") == printed()
    assert "there is no device 'cuda:63'" in str(printed("--device", "cuda:63"))


def test_a_gpu_computes_with_all_digits_and_then_as_before() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with exact_products():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
