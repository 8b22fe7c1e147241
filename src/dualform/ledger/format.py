"""The names and records of the run folder; FORMAT.md describes them byte by byte."""

from __future__ import annotations

import json
import math
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dualform.errors import CorruptError, FormatVersionError, NotARunError

FORMAT = 1
RUN_FILE = "run.json"
INITIAL_FILE = "initial.safetensors"
LOCK_FILE = "writer.lock"
LOG_FILE = "commits.jsonl"
SAMPLES_FOLDER = "samples"
BUFFER = "buffer:"
"""The momentum training started with is filed under this and the parameter's name."""
ROOT = "model"
"""The stream of a model that is itself a single layer."""


@dataclass(frozen=True)
class Stream:
    """Where rows come from: one use of a weight, giving keys (inputs) and values (errors).

    >>> Stream("fc1", keys=784, values=128)
    Stream(name='fc1', keys=784, values=128)
    """

    name: str
    keys: int
    values: int


@dataclass(frozen=True)
class Book:
    """One parameter: its shape, and which streams its changes are made of.

    `terms` maps a stream to its form: "outer" (values ⊗ keys, a weight) or "sum" (values, a bias).
    A book without terms is booked by step, for the `reason` given.

    >>> Book("fc1.bias", (128,), "float32", {"fc1": "sum"}).name
    'fc1.bias'
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    terms: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def size(self) -> int:
        """How many numbers the parameter holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class RunInfo:
    """What `run.json` says: the streams, the books, the optimizer, and where the run came from.

    >>> RunInfo.from_json(RunInfo(streams=(Stream("fc", 2, 3),)).to_json()).streams[0].keys
    2
    """

    streams: tuple[Stream, ...] = ()
    books: tuple[Book, ...] = ()
    accounts: tuple[tuple[str, ...], ...] = ()
    """Books that share one factor a step: usually a weight and its bias."""
    rule: str = "observed"
    fields: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of `run.json`."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> RunInfo:
        """What such a text says; a newer format is refused."""
        data = json.loads(text)
        version = data.pop("format")
        if version > FORMAT:
            raise FormatVersionError(
                f"the run has format {version}, and this dualform reads formats up to {FORMAT}; "
                "update with `pip install -U dualform`."
            )
        data["streams"] = tuple(Stream(**stream) for stream in data["streams"])
        data["books"] = tuple(
            Book(**{**book, "shape": tuple(book["shape"])}) for book in data["books"]
        )
        data["accounts"] = tuple(tuple(books) for books in data["accounts"])
        data["fields"] = tuple(data["fields"])
        return cls(**data)


def read_info(path: Path) -> RunInfo:
    """Reads `run.json`, or says what the path holds instead."""
    if not (path / RUN_FILE).is_file():
        raise NotARunError(f"'{path}' is not a dualform run: {describe(path)}.")
    try:
        return RunInfo.from_json((path / RUN_FILE).read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FormatVersionError):
            raise
        raise CorruptError(f"'{path / RUN_FILE}' is not a run description: {error}.") from error


def describe(path: Path) -> str:
    """Says in words what is at `path`: nothing, a file, or a folder of other things."""
    if not path.exists():
        return "there is nothing at that path"
    if path.is_file():
        return "it is a file, and a run is a folder"
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "the folder is empty"
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"the folder has no {RUN_FILE} but holds {shown}"


def seal_line(record: dict[str, Any]) -> str:
    """One line of the commit log: the record as JSON, ending in the CRC-32 of what precedes.

    >>> open_line(seal_line({"kind": "rows"}))
    {'kind': 'rows'}
    """
    body = json.dumps(record, separators=(",", ":"))[:-1]
    return f'{body},"line_crc32":{zlib.crc32(body.encode())}}}\n'


def open_line(line: str) -> dict[str, Any] | None:
    """The record of a log line, or None where the line is torn or altered."""
    body, mark, checksum = line.rpartition(',"line_crc32":')
    if not mark or checksum != f"{zlib.crc32(body.encode())}}}\n":
        return None
    try:
        record = json.loads(body + "}")
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def write_durably(path: Path, text: str) -> None:
    """Writes a small file so that it is either wholly there after a crash, or not at all."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable (POSIX; elsewhere the file system sees to it)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
