"""A run whose seals fit may still be made to take memory, or time, that nobody has."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ledger.damaging import logs
from tests.ledger.fuzz import fuzz, in_time_and_memory, read_everything, record_run
from tests.ledger.mutations import seal_again

from dualform.errors import CorruptError, ReadingError
from dualform.ledger import Ledger
from dualform.ledger.tensor_writing import write_tensors
from dualform.ledger.tensors import TensorFile
from dualform.read.coefficients import Accounting
from dualform.read.engine import ShardRange
from dualform.read.scan import chunks
from dualform.testing import tiny_run

LARGE = 1 << 40


def describe(path: Path, **fields: Any) -> None:
    """The description says something else of the book."""
    info = json.loads((path / "run.json").read_text())
    info["books"][0] |= fields
    (path / "run.json").write_text(json.dumps(info))


def say(path: Path, line: int, **fields: Any) -> None:
    """A line of the log says something else."""
    (log,) = logs(path)
    lines = log.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | fields)
    log.write_text("\n".join(lines) + "\n")


def put(path: Path, name: str, array: torch.Tensor | None) -> None:
    """An array of the first shard is another one."""
    (log,) = logs(path)
    file = log.with_name("00000001.safetensors")
    shard = Ledger(path).shards[0].file
    arrays = {known: [shard.read(known)] for known in shard.arrays}
    arrays |= {} if array is None else {name: [array]}
    file.unlink()
    write_tensors(file, arrays)


def stretch(path: Path) -> None:
    """An array of nothing claims to be long."""
    (log,) = logs(path)
    file = log.with_name("00000001.safetensors")
    put(path, "notes", torch.empty(0, 1, dtype=torch.int64))
    data = file.read_bytes()
    text = data[8 : 8 + struct.unpack("<Q", data[:8])[0]]
    longer = text.replace(b"[0,1]", b"[%d,0]" % (1 << 60))
    file.write_bytes(struct.pack("<Q", len(longer)) + longer + data[8 + len(text) :])


def segments(path: Path, at: int, value: int) -> None:
    """A number of the first segment is another."""
    table = Ledger(path).shards[0].file.read("0/segments")
    table[0, at] = value
    put(path, "0/segments", table)


def batches(path: Path, size: int) -> None:
    """The first batch has another size."""
    table = Ledger(path).shards[0].file.read("batches")
    table[0, 1] = size
    put(path, "batches", table)


def declare(path: Path, positions: int) -> None:
    """The first layer becomes a convolution of a line of three, by a kernel of a million."""
    layout = {"kind": "patches", "kernel": [1 << 20], "stride": [1], "dilation": [1]}
    layout |= {"groups": 1, "padding": [[1 << 20, 1 << 20]]}
    (log,) = logs(path)
    streams = json.loads(log.read_text().splitlines()[1])["streams"]
    stream = {"keys": [4, 1], "values": [1, positions], "layout": layout}
    streams[0]["stream"] |= stream
    say(path, 1, streams=streams)


FORGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a book": (lambda path: describe(path, shape=[LARGE]), r"says float32 of \(1099511627776,\)"),
    "a type": (lambda path: describe(path, dtype="float02"), "says float02 of"),
    "steps": (lambda path: say(path, 1, last=LARGE), "has the steps 1 to 1099511627776"),
    "a start": (lambda path: say(path, 0, step=LARGE), "begins after step 0, not 1099511627776"),
    "records": (lambda path: segments(path, 2, LARGE), "/segments' counts [0-9,]+ records in"),
    "a batch": (lambda path: batches(path, LARGE), "its batches have 1,099,511,627,796 samples"),
    "another batch": (lambda path: segments(path, 1, 777), "a sample of the batch 777"),
    "other steps": (lambda path: segments(path, 0, 0), "is of steps 0 to 6, and the file of 1 to"),
    "a form": (
        lambda path: put(path, "batches", torch.tensor([0, 2])),
        r"'batches' is int64 of shape \(2\)",
    ),
    "lines": (
        lambda path: put(path, "states", torch.ones(9, 1, dtype=torch.uint8)),
        "'states' has 9 lines for 6 steps",
    ),
    "fields": (
        lambda path: put(path, "hyper", torch.ones(6, 1, 99, dtype=torch.float64)),
        "has 99 hyper-parameters of 4 books, and the run has others",
    ),
    "a group": (
        lambda path: put(path, "groups", torch.full((6, 4), 99, dtype=torch.int16)),
        "in a parameter group that 'hyper' does not have",
    ),
    "an unsigned group": (
        lambda path: put(path, "groups", torch.zeros(6, 4, dtype=torch.uint16)),
        r"'groups' is uint16 of shape \(6, 4\)",
    ),
    "a layout": (lambda path: declare(path, 4), "has a senseless record: .*the layout of '0' is"),
    "nothing": (stretch, "has shape .*, which nothing can have"),
}


@pytest.fixture(scope="module")
def recorded() -> Path:
    run, _, _ = tiny_run()
    return run.path


def read(path: Path) -> Any:
    ledger = Ledger(path)
    accounting = Accounting(ledger, ledger.last_step)
    assert len(accounting.history(ledger.info.books[0]).hyper) == ledger.last_step
    shards = ShardRange.of(ledger, 1, ledger.last_step)
    return [
        len(chunk.samples)
        for shard in shards
        for stream in ledger.info.streams
        for chunk in chunks(shard, stream)
    ]


@pytest.mark.parametrize("name", FORGED)
def test_numbers_are_compared_before_memory_is_taken(
    name: str, recorded: Path, tmp_path: Path
) -> None:
    forge, problem = FORGED[name]
    path = shutil.copytree(recorded, tmp_path / "run")
    expected = read(path)
    put(path, "", None)
    seal_again(path, path)
    assert read(path) == expected
    forge(path)
    seal_again(path, path)
    with in_time_and_memory(), pytest.raises(CorruptError, match=problem):
        read(path)


@pytest.mark.parametrize("what", ["a description", "a line", "a header"])
def test_json_takes_no_more_than_is_said(what: str, recorded: Path, tmp_path: Path) -> None:
    """64 times its bytes; lists in lists take the most."""
    path, many = shutil.copytree(recorded, tmp_path / "run"), [[[]]] * 100_000
    if what == "a description":
        info = json.loads((path / "run.json").read_text())
        info["metadata"]["many"] = many
        (path / "run.json").write_text(json.dumps(info, separators=(",", ":")))
    elif what == "a line":
        say(path, 1, many=many)
    else:
        file = Ledger(path).shards[0].path
        data = file.read_bytes()
        text = data[8 : 8 + struct.unpack("<Q", data[:8])[0]].rstrip()
        text = text[:-1] + b',"__metadata__":' + json.dumps(many, separators=(",", ":")).encode()
        rest = data[8 + struct.unpack("<Q", data[:8])[0] :]
        file.write_bytes(struct.pack("<Q", len(text) + 1) + text + b"}" + rest)
    seal_again(path, path)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    tracemalloc.start()
    assert read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 10 * size < peak < 64 * size


def test_a_record_that_does_not_fit_is_refused(recorded: Path, tmp_path: Path) -> None:
    """Its positions are as many as its layout says: what they unfold to is another matter."""
    path = shutil.copytree(recorded, tmp_path / "run")
    declare(path, (1 << 20) + 2)
    seal_again(path, path)
    with in_time_and_memory(), pytest.raises(ReadingError, match=r"takes 17,592\.2 GB as rows"):
        read(path)


def test_a_run_whose_rates_have_another_name_is_refused(recorded: Path, tmp_path: Path) -> None:
    path = shutil.copytree(recorded, tmp_path / "run")
    info = json.loads((path / "run.json").read_text())
    info["fields"][info["fields"].index("lr")] = "lp"
    (path / "run.json").write_text(json.dumps(info))
    seal_again(path, path)
    with pytest.raises(CorruptError, match=r"hyper-parameters lp, .*, and 'sgd' has a rate, 'lr'"):
        read(path)


def test_numbers_that_no_optimizer_has_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record_run(path)
    for file in sorted(path.glob("writer-*/*.safetensors")):
        arrays = {name: [TensorFile(file).read(name)] for name in TensorFile(file).arrays}
        if "hyper" in arrays:
            arrays["hyper"][0][:] = 2.0  # among them β2: the square root of a negative number
            file.unlink()
            write_tensors(file, arrays)
    seal_again(path, path)
    with pytest.raises(CorruptError, match=r"none that 'adam' can have \(math domain error\)"):
        read_everything(path)


def test_a_forged_run_is_read_within_bounds() -> None:
    outcomes = fuzz(count=4, seed=0, forged=True)
    assert outcomes["refused"] + outcomes["answered"] == 4


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 107))
def test_many_forged_runs_are_read_within_bounds(seed: int) -> None:
    fuzz(count=800, seed=seed, forged=True)
