"""Runs may come from strangers: only plain files are read, and nonsense is an error of ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ledger.damaging import INFO, logs, record

import dualform
from dualform.errors import CorruptError
from dualform.ledger import Ledger, LedgerWriter, Samples
from dualform.ledger.log import seal_line
from dualform.ledger.samples import describe_samples
from dualform.ledger.tensors import TensorFile


class TooLong(Exception):
    """Something waited for a pipe."""


@pytest.fixture
def at_once() -> Iterator[None]:
    """Fails after ten seconds instead of waiting forever."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def link(path: Path) -> None:
    moved = path.with_name(path.name + ".elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


def pipe(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero: it never ends


PLACES = [
    "run.json",
    "end-0.json",
    "initial.safetensors",
    "samples",
    "samples/0001.json",
    "writer-*-rank0-*",
    "writer-*-rank0-*/commits.jsonl",
    "writer-*-rank0-*/00000001.safetensors",
]


def read_all(path: Path) -> Any:
    ledger = Ledger(path)
    return ledger.weights(0), ledger.column("fc/keys"), Samples(path)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("put", "name"), [(link, "a symbolic link"), (pipe, "a named pipe"), (device, "a device")]
)
def test_only_plain_files_are_read(
    put: Callable[[Path], None], name: str, place: str, tmp_path: Path
) -> None:
    record(tmp_path / "run", 1, 2)
    describe_samples(tmp_path / "run", [0, 1], ["cat", "dog"])
    (entry,) = (tmp_path / "run").glob(place)
    expected = "a folder" if entry.is_dir() else "a file"
    read_all(tmp_path / "run")
    put(entry)
    with pytest.raises(CorruptError, match=f"is {name} and not {expected}; a run has only plain"):
        read_all(tmp_path / "run")


@pytest.mark.usefixtures("at_once")
def test_the_lock_is_no_link(tmp_path: Path) -> None:
    """Taking it would empty what the link leads to."""
    record(tmp_path / "run", 1, 2)
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / "writer-0.lock").unlink()
    (tmp_path / "run" / "writer-0.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CorruptError, match="is a symbolic link and not a file"):
        LedgerWriter.resume(tmp_path / "run", 2)
    assert (tmp_path / "precious").read_text() == "precious"


def test_overwriting_a_run_writes_through_no_link(tmp_path: Path) -> None:
    record(tmp_path / "run", 1, 2)
    (tmp_path / "precious").mkdir()
    shutil.rmtree(tmp_path / "run" / "samples")
    (tmp_path / "run" / "samples").symlink_to(tmp_path / "precious")
    LedgerWriter.create(tmp_path / "run", INFO, {}, overwrite=True).close()
    describe_samples(tmp_path / "run", [0], ["cat"])
    assert not list((tmp_path / "precious").iterdir())


DEEP = "[" * 100_000 + "]" * 100_000


def deep_description(path: Path) -> Any:
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(info)[:-1] + f',"x":{DEEP}}}')
    return dualform.open(path)


def deep_line(path: Path) -> Any:
    (log,) = logs(path)
    log.write_text(log.read_text() + seal_line({"x": 0}).replace('"x":0', f'"x":{DEEP}'))
    return dualform.open(path)


def deep_header(path: Path) -> Any:
    text = f'{{"x":{DEEP}}}'.encode()
    (path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return TensorFile(path / "x.safetensors")


def deep_page(path: Path) -> Any:
    (path / "samples" / "0001.json").write_text(DEEP)
    return Samples(path)


@pytest.mark.parametrize("read", [deep_description, deep_line, deep_header, deep_page])
def test_deep_json_is_an_error_of_ours(read: Callable[[Path], Any], tmp_path: Path) -> None:
    record(tmp_path / "run", 1, 2)
    with pytest.raises(CorruptError, match=r"nested too deeply|seal of line"):
        read(tmp_path / "run")


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [
        ("stream", {"name": 7, "keys": [1], "values": [1]}, "has no name or no layout"),
        ("stream", {"name": "fc", "keys": ["a"], "values": [1]}, "not made of whole numbers"),
        ("stream", {"name": "fc", "values": [1]}, "KeyError"),
        ("terms", {"fc.weight": {"form": None, "at": [0, 0]}}, "cannot be made of 'fc' by"),
        ("terms", {"fc.weight": {"form": "outer", "at": [0]}}, "cannot be made of 'fc' by"),
        ("terms", {"fc.weight": {"form": "outer", "at": [0, 0], "groups": 0}}, "cannot be made"),
        ("terms", ["fc.weight"], "AttributeError"),
        ("codec", None, "None names no codec"),
        ("codec", {"keys": "float32", "values": "float32"}, "names no codec"),
        ("codec", {"name": "exact"}, r"has the parameters \['keys', 'values'\], not \[\]"),
        ("codec", {"name": "exact", "keys": 4, "values": "float32"}, "keys=4 is none of the types"),
        (
            "codec",
            {"name": "exact", "keys": "float32", "values": "int64"},
            "values='int64' is none of the types",
        ),
        (
            "codec",
            {"name": "bfloat16", "keys": "float32", "values": "float32", "level": 9},
            r"has the parameters \['keys', 'values'\], not \['keys', 'level', 'values'\]",
        ),
    ],
)
def test_a_senseless_declaration_is_named(
    part: str, value: Any, problem: str, tmp_path: Path
) -> None:
    """A log whose seals fit may still come from a stranger."""
    log = record(tmp_path / "run", 1, 1)
    start, rows = (json.loads(line) for line in log.read_text().splitlines()[:2])
    codec = {"name": "exact", "keys": "float32", "values": "float32"}
    declared = {"stream": {"name": "fc", "keys": [1], "values": [1]}, "terms": {}, "codec": codec}
    declared[part] = value
    rows = {name: v for name, v in rows.items() if name != "line_crc32"} | {"streams": [declared]}
    log.write_text(
        seal_line({k: v for k, v in start.items() if k != "line_crc32"}) + seal_line(rows)
    )
    (tmp_path / "run" / "end-0.json").unlink()
    with pytest.raises(CorruptError, match=f"has a senseless record: .*{problem}"):
        Ledger(tmp_path / "run")
