"""The ledger under its contract, and against damage, strangers and full disks."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dualform
from dualform.errors import (
    CorruptError,
    FormatVersionError,
    LedgerError,
    NotARunError,
    RecordingEndedWarning,
    RunExistsError,
    RunLockedError,
)
from dualform.ledger import Declaration, Ledger, LedgerWriter, RunInfo, ShardBlock, Stream
from dualform.ledger.log import LogWriter, seal_line
from dualform.ledger.tensor_writing import write_tensors
from dualform.ledger.tensors import CODES, TensorFile
from dualform.testing import LedgerContract
from dualform.testing.ledgers import block


class TestFolder(LedgerContract):
    """The run folder on a local disk."""

    def create(self, path: Path, initial: dict[str, Tensor]) -> LedgerWriter:
        return LedgerWriter.create(path, RunInfo(), initial)

    def resume(self, path: Path, step: int) -> LedgerWriter:
        return LedgerWriter.resume(path, step)

    def read(self, path: Path) -> Ledger:
        return Ledger(path)


shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3)


@given(
    arrays=st.dictionaries(
        st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=5),
        st.tuples(shapes, st.sampled_from(list(CODES)), st.integers(1, 3)),
        max_size=4,
    )
)
@settings(max_examples=50, deadline=None)
def test_files_are_safetensors(
    arrays: dict[str, tuple[list[int], torch.dtype, int]],
) -> None:
    """Whatever is written in parts, the safetensors package reads as the whole."""
    parts = {
        name: [torch.randn(shape).mul(9).to(dtype) for _ in range(count)]
        for name, (shape, dtype, count) in arrays.items()
        if name != "__metadata__"
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        length, checksum = write_tensors(path, parts)
        theirs, ours = load_file(path), TensorFile(path)
        assert path.stat().st_size == length
        assert ours.checksum() == checksum
        for name, pieces in parts.items():
            assert torch.equal(theirs[name], torch.cat(pieces))
            assert torch.equal(ours.read(name), torch.cat(pieces))


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    arrays = {"a": torch.randn(3, 2), "scalar": torch.tensor(2.5), "n": torch.arange(4)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"by": "them"})
    file = TensorFile(tmp_path / "x.safetensors")
    assert all(torch.equal(file.read(name), array) for name, array in arrays.items())
    assert torch.equal(file.read("a", 1, 3), arrays["a"][1:3])


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"\xff" * 16, "its header claims"),
        (struct.pack("<Q", 4) + b"nope", "not a safetensors file"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}}, "does not lie within"),
        ({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 8]}}, "does not lie within"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, r"has shape \(-2,\)"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "does not lie within"),
        ({"a": {"dtype": "X99", "shape": [2], "data_offsets": [0, 8]}}, "not a safetensors file"),
    ],
)
def test_a_stranger_s_file_is_validated(
    header: bytes | dict[str, object], problem: str, tmp_path: Path
) -> None:
    if isinstance(header, dict):
        text = json.dumps(header).encode()
        header = struct.pack("<Q", len(text)) + text + b"\0" * 8
    (tmp_path / "x.safetensors").write_bytes(header)
    with pytest.raises(CorruptError, match=problem):
        TensorFile(tmp_path / "x.safetensors")


def test_a_log_that_names_a_file_elsewhere(tmp_path: Path) -> None:
    LedgerWriter.create(tmp_path / "run", RunInfo(), {"w": torch.zeros(1)}).close()
    (log,) = (tmp_path / "run").glob("writer-*/commits.jsonl")
    record = {"kind": "rows", "file": "../../secret", "bytes": 1, "crc32": 0}
    start = json.loads(log.read_text())
    record |= {"first": 1, "last": 1, "notes": [], "streams": [], "after": start["line_crc32"]}
    log.write_text(log.read_text() + seal_line(record))
    with pytest.raises(CorruptError, match="names a file outside the run"):
        Ledger(tmp_path / "run")


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda path: None, "is not a dualform run: there is nothing at that path"),
        (lambda path: path.mkdir(), "the folder is empty"),
        (lambda path: path.write_text("hello"), "it is a file, and a run is a folder"),
        (
            lambda path: [path.mkdir(), (path / "photo.jpg").touch()],
            "the folder has no run.json but holds photo.jpg",
        ),
    ],
)
def test_opening_something_else(put: object, message: str, tmp_path: Path) -> None:
    put(tmp_path / "x")  # type: ignore[operator]
    with pytest.raises(NotARunError, match=re.escape(message)):
        dualform.open(tmp_path / "x")


def test_recording_into_something_else(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "photo.jpg").write_text("precious")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = r"cannot record into .*holds photo.jpg; choose another path"
    for overwrite in (False, True):
        recorder = dualform.record(model, optimizer, tmp_path / "x", overwrite=overwrite)
        with pytest.raises(NotARunError, match=message):
            recorder.__enter__()
    assert (tmp_path / "x" / "photo.jpg").read_text() == "precious"


def test_recording_over_a_run(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with dualform.record(model, optimizer, tmp_path / "run", overwrite=True) as recorder:
            recorder.samples(["a", "b", "c"])
            model(torch.randn(3, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert dualform.open(tmp_path / "run").steps == 1
    with pytest.raises(RunExistsError, match=r"already holds a run of 1 steps; choose another"):
        dualform.record(model, optimizer, tmp_path / "run").__enter__()


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (99, r"format 99, and this dualform reads format 4; update with `pip install -U dualform`"),
        (3, "format 3, and .* formats 1 to 3 were never released and are no longer read: record"),
        (1, "format 1, and .* formats 1 to 3 were never released and are no longer read: record"),
    ],
)
def test_a_run_of_another_format(format: int, message: str, tmp_path: Path) -> None:
    LedgerWriter.create(tmp_path / "run", RunInfo(), {"w": torch.zeros(1)}).close()
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**info, "format": format}))
    with pytest.raises(FormatVersionError, match=message):
        dualform.open(tmp_path / "run")


def test_a_description_that_is_none(tmp_path: Path) -> None:
    LedgerWriter.create(tmp_path / "run", RunInfo(), {"w": torch.zeros(1)}).close()
    (tmp_path / "run" / "run.json").write_text("{]")
    with pytest.raises(CorruptError, match="is not a run description"):
        dualform.open(tmp_path / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.fail(f"a test of full disks needs the right to mount a tmpfs: {made.stderr}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills(small_disk: Path) -> None:
    """Training stops with a clear error; what was committed is still there and balances."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    path = small_disk / "run"
    with (  # noqa: PT012
        pytest.raises(
            LedgerError, match=r"is full .*The run is readable up to step \d+; make room"
        ),
        dualform.record(model, optimizer, path, strict=True) as recorder,
    ):
        for _ in range(400):
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.checkpoint()
    run = dualform.open(path)
    assert run.steps > 10
    assert run.check() == []
    assert run.audit().remainder <= 1e-6
    assert not list(path.rglob("*.draft"))


def test_a_disk_that_fills_does_not_stop_training(small_disk: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with (  # noqa: PT031
        pytest.warns(
            RecordingEndedWarning, match=r"is full .*is readable up to step \d+"
        ) as warned,
        dualform.record(model, optimizer, small_disk / "run") as recorder,
    ):
        for _ in range(400):
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.checkpoint()
    assert len(warned) == 1
    run = dualform.open(small_disk / "run")
    assert 10 < run.steps < 400
    assert run.audit().remainder <= 1e-6
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with pytest.raises(LedgerError, match=r"cannot write to .*No space left on device; make room"):
        dualform.record(model, optimizer, small_disk / "another").__enter__()


def test_a_disk_that_is_full_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours; the half-made folder is nobody's, and the lock is free again."""
    path = tmp_path / "run"
    LedgerWriter.create(path, RunInfo(), {"w": torch.zeros(1)}).close()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(LogWriter, "_append", full)
        with pytest.raises(LedgerError, match=r"is full .*The run is readable up to step 0"):
            LedgerWriter.resume(path, 0)
    LedgerWriter.resume(path, 0).close()
    assert list(Ledger(path).check()) == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_leaves_the_run_alone(tmp_path: Path) -> None:
    """Workers of data loaders are copies of the process that records, and end before it."""
    path = tmp_path / "run"
    writer = LedgerWriter.create(path, RunInfo(), {"w": torch.zeros(1)})
    child = os.fork()
    if not child:
        writer.abandon()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert Ledger(path).unfinished
    with pytest.raises(RunLockedError):
        LedgerWriter.resume(path, 0)
    writer.append(block(1, 1))
    writer.close()
    assert (Ledger(path).last_step, Ledger(path).unfinished) == (1, False)


def test_permission_lost(tmp_path: Path) -> None:
    writer = LedgerWriter.create(tmp_path / "run", RunInfo(), {"w": torch.zeros(1)})
    writer.append(block(1, 1))
    writer.flush()
    os.rename(writer.folder, tmp_path / "gone")
    writer.append(block(2, 2))
    with pytest.raises(LedgerError, match=r"cannot write to .*readable up to step 1"):
        writer.flush()
    writer.abandon()


def test_steps_that_are_missing_are_noticed(tmp_path: Path) -> None:
    """The log of the first of two writers breaks off: what the second wrote hangs in the air."""
    path = tmp_path / "run"
    writer = LedgerWriter.create(path, RunInfo(), {"w": torch.zeros(1)})
    for step in (1, 2, 3):
        writer.append(block(step, step))
        writer.flush()
    writer.close()
    second = LedgerWriter.resume(path, 3)
    second.append(block(4, 5))
    second.close()
    log = writer.folder / "commits.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))
    with pytest.raises(CorruptError, match=r"has 3 lines where .* counted 4 \(and 1 more\)"):
        Ledger(path)
    ledger = Ledger(path, damaged=True)
    assert ledger.last_step == 2
    _, (_, problem) = ledger.check()
    assert "steps 3 to 3 are missing" in problem


def test_a_changed_start_is_noticed(tmp_path: Path) -> None:
    LedgerWriter.create(tmp_path / "run", RunInfo(), {"w": torch.zeros(2)}).close()
    initial = tmp_path / "run" / "initial.safetensors"
    initial.write_bytes(initial.read_bytes()[:-1] + b"!")
    ((_, problem),) = Ledger(tmp_path / "run").check()
    assert "initial.safetensors' is altered" in problem


def test_killed_while_being_made(tmp_path: Path) -> None:
    """Leftovers of a run that never began are no obstacle; anything else is."""
    (tmp_path / "run" / "samples").mkdir(parents=True)
    (tmp_path / "run" / "initial.safetensors").write_text("half")
    LedgerWriter.create(tmp_path / "run", RunInfo(), {"w": torch.zeros(2)}).close()
    assert Ledger(tmp_path / "run").last_step == 0


def test_segments_that_claim_too_much(tmp_path: Path) -> None:
    from dualform.read.scan import count_rows

    writer = LedgerWriter.create(tmp_path / "run", RunInfo(), {"w": torch.zeros(2)})
    arrays = {"fc/keys": [torch.ones(2, 1)], "fc/values": [torch.ones(2, 1)]}
    arrays |= {"fc/segments": [torch.tensor([[1, 1, 3]])], "batches": [torch.tensor([[1, 2]])]}
    arrays["samples"] = [torch.tensor([0, 1])]
    writer.append(ShardBlock(1, 1, arrays, streams=[Declaration(Stream("fc", (1,), (1,)), {})]))
    writer.close()
    with pytest.raises(CorruptError, match="the segments of 'fc' do not fit its rows"):
        count_rows(Ledger(tmp_path / "run"), Stream("fc", (1,), (1,)), 1)


def test_blocks_that_do_not_fit_together_become_two_shards(tmp_path: Path) -> None:
    writer = LedgerWriter.create(tmp_path / "run", RunInfo(), {"w": torch.zeros(1)})
    done: list[int] = []
    for step, width in ((1, 2), (2, 2), (3, 5)):
        keys = {"fc/keys": [torch.ones(1, width)]}
        writer.append(ShardBlock(step, step, keys, written=lambda step=step: done.append(step)))
    assert done == [1, 2]
    writer.close()
    assert done == [1, 2, 3]
    assert [shard.file.arrays["fc/keys"].shape for shard in Ledger(tmp_path / "run").shards] == [
        (2, 2),
        (1, 5),
    ]


def test_a_folder_that_cannot_be_written(small_disk: Path, tmp_path: Path) -> None:
    """It is read as any other; what would write says so, and repairs go elsewhere."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = small_disk / "run"
    with dualform.record(model, optimizer, path) as recorder:
        for _ in range(4):
            model(torch.randn(3, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.checkpoint()
    damaged = shutil.copytree(path, small_disk / "damaged")
    next(damaged.glob("writer-*/00000003.safetensors")).write_bytes(b"")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run = dualform.open(path)
    assert run.check() == []
    assert run.audit().remainder <= 1e-6
    refused: list[Callable[[], object]] = [
        lambda: dualform.record(model, optimizer, path, resume=True).__enter__(),
        lambda: dualform.record(model, optimizer, small_disk / "new").__enter__(),
        lambda: dualform.compact(path, keep="half"),
        lambda: dualform.repair(damaged),
    ]
    for action in refused:
        with pytest.raises(LedgerError, match="Read-only file system"):
            action()
    found = dualform.repair(damaged, tmp_path / "sound")
    assert found.to is not None
    assert found.steps == dualform.open(found.to).steps == 1
