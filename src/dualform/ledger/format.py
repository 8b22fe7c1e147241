"""The names and records of the run folder; FORMAT.md describes them byte by byte."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dualform.errors import CorruptError, FormatVersionError, NotARunError
from dualform.ledger.codecs import Codec, Exact, read_codec
from dualform.ledger.files import ASIDE, is_there, open_plain, parse_json
from dualform.ledger.object_path import ObjectPath

FORMAT = 4
RUN_FILE = "run.json"
INITIAL_FILE = "initial.safetensors"
SAMPLES_FOLDER = "samples"
LOG_FILE = "commits.jsonl"
FOLDER = re.compile(r"writer-([0-9]{4,})-rank(0|[1-9][0-9]*)-[0-9a-f]{8}")
"""What a writer calls its folder: the session, the writer's rank, and eight random digits."""
COMPACTED_FILE = "compacted.json"
"""In a run that was compacted, until that is confirmed; no sum depends on it."""
BEFORE_COMPACT = ".before-compact"
"""Behind the name of a run's folder: the run as it was before it was compacted."""
BUFFER = "buffer:"
"""The momentum training started with is filed under this and the parameter's name."""
STATE = "state:"
"""What else an optimizer remembers: under this, the state's name, a colon and the parameter's."""
MARKS = ("checkpoint", "final", "flush", "state", "resume")
"""Why the weights of a step may have been kept; FORMAT.md says what each means."""
NEWER = "update with `pip install -U dualform`."
NOTHING = "there is nothing at that path"
OLDER = "formats 1 to 3 were never released and are no longer read: record the run again."
ROOT = "model"
"""The stream of a model that is itself a single layer."""


@dataclass(frozen=True)
class Stream:
    """Where rows come from: one way in which parameters are used, giving keys and values.

    `keys` and `values` are the shapes of one stored record; `layout` says how rows are found in
    it where it is more than one (see FORMAT.md).

    >>> Stream("fc1", keys=(784,), values=(128,)).name
    'fc1'
    """

    name: str
    keys: tuple[int, ...]
    values: tuple[int, ...]
    layout: dict[str, Any] = field(default_factory=dict)
    shared: tuple[int, ...] = ()
    """Height and width of a matrix that all rows of a use share, where they share one."""
    layer: str = ""
    """The stream whose rows are summarized here, sample by sample; empty where rows are kept."""
    bases: tuple[int, ...] = ()
    """How many directions there are for outputs and for inputs, where rows are kept in bases.

    0 stands for a side that is kept whole. The bases are in the first shard of the stream.
    """


@dataclass(frozen=True)
class Term:
    """How a parameter is made of a stream's rows: each row adds a rank-one block to its matrix.

    The forms: "outer" (value ⊗ key), "sum" (value), "scale" (value ∘ key) and "lookup" (the value,
    at the row of the matrix that the key names). `view` says how the parameter is seen as a
    matrix: "rows" (first dimension × the others), "swapped" (the second × the first and the
    others), or "flat" (a single column). `at` is where the block begins.

    >>> Term("outer").at
    (0, 0)
    """

    form: str
    view: str = "rows"
    groups: int = 1
    at: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Book:
    """One parameter: its shape, and which streams its changes are made of.

    A book without terms is booked by step, for the `reason` given.

    >>> Book("fc1.bias", (128,), "float32", {"fc1": Term("sum", "flat")}).size
    128
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    terms: dict[str, Term] = field(default_factory=dict)
    reason: str = ""

    @cached_property
    def size(self) -> int:
        """How many numbers the parameter holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Declaration:
    """A stream that rows are about to be committed for, and the terms of the books it feeds.

    `codec` says how its rows are kept, from the shard on that the declaration comes with.

    >>> Declaration(Stream("fc", (3,), (2,)), {"fc.weight": Term("outer")}).stream.name
    'fc'
    """

    stream: Stream
    terms: dict[str, Term]
    codec: Codec = Exact()  # noqa: RUF009

    def to_json(self) -> dict[str, Any]:
        """What a commit's record says of the stream."""
        terms = {book: asdict(term) for book, term in self.terms.items()}
        stream = asdict(self.stream)
        if not self.stream.layer:
            del stream["layer"], stream["bases"]
        return {"stream": stream, "terms": terms, "codec": self.codec.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Declaration:
        """What a commit's record says of a stream."""
        given = {"shared": (), "layer": "", "bases": (), **data["stream"]}
        shapes = {name: tuple(given[name]) for name in ("keys", "values", "shared", "bases")}
        stream: dict[str, Any] = {**given, **shapes}
        terms = {book: Term(**{**t, "at": tuple(t["at"])}) for book, t in data["terms"].items()}
        return cls(Stream(**stream), terms, read_codec(data["codec"])).of_right_types()

    def of_right_types(self) -> Declaration:
        """The same, or a ValueError that says which part of it cannot be."""
        stream = self.stream
        if not isinstance(stream.name, str) or not isinstance(stream.layout, dict):
            raise ValueError(f"the stream {stream.name!r} has no name or no layout")
        if not isinstance(stream.layer, str) or len(stream.bases) not in (0, 2):
            raise ValueError(f"the stream '{stream.name}' has no two bases, or no name of a layer")
        if not _are_counts(*stream.keys, *stream.values, *stream.shared, *stream.bases):
            raise ValueError(f"the shapes of '{stream.name}' are not made of whole numbers")
        if stream.layout and not _is_convolution(stream):
            raise ValueError(f"the layout of '{stream.name}' is {stream.layout}")
        for book, term in self.terms.items():
            named = isinstance(term.form, str) and isinstance(term.view, str)
            placed = len(term.at) == 2 and _are_counts(term.groups, *term.at) and term.groups > 0
            if not (named and placed):
                raise ValueError(f"'{book}' cannot be made of '{stream.name}' by {term}")
        return self


@dataclass(frozen=True)
class RunInfo:
    """What `run.json` says of a run, with the streams its commits have declared.

    >>> RunInfo.from_json(RunInfo(rule="sgd").to_json()).rule
    'sgd'
    """

    books: tuple[Book, ...] = ()
    rule: str = "observed"
    fields: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    streams: tuple[Stream, ...] = ()

    def to_json(self) -> str:
        """The text of `run.json`; streams and terms are declared by the commits."""
        books = [
            {"name": b.name, "shape": b.shape, "dtype": b.dtype, "reason": b.reason}
            for b in self.books
        ]
        facts = {"rule": self.rule, "fields": self.fields, "metadata": self.metadata}
        return json.dumps({"format": FORMAT, "books": books, **facts}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> RunInfo:
        """What such a text says; another format is refused."""
        data = parse_json(text)
        version = data.pop("format")
        if type(version) is not int or version < 1:
            raise ValueError(f"its format is {version!r}, not a number from 1 to {FORMAT}")
        if version != FORMAT:
            raise FormatVersionError(
                f"the run has format {version}, and this dualform reads format {FORMAT}; "
                + (NEWER if version > FORMAT else OLDER)
            )
        if "streams" in data:
            raise ValueError("it declares streams, which only logs do")
        data["books"] = tuple(
            Book(**{**book, "shape": tuple(book["shape"])}) for book in data["books"]
        )
        data["fields"] = tuple(data["fields"])
        return cls(**data).of_right_types()

    def of_right_types(self) -> RunInfo:
        """The same, or a ValueError: everything else relies on names and shapes being some."""
        names = [self.rule, *self.fields]
        names += [name for book in self.books for name in (book.name, book.dtype, book.reason)]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("a name in it is not a text")
        if not all(_are_counts(*book.shape) for book in self.books):
            raise ValueError("a shape in it is not made of whole numbers")
        if not isinstance(self.metadata, dict):
            raise ValueError("its metadata is not an object")
        return self

    @property
    def checksum(self) -> int:
        """CRC-32 of what sums depend on: everything but the metadata for people.

        The first start of a run vouches for it.
        """
        facts = json.loads(replace(self, metadata={}).to_json())
        aliases = json.loads(json.dumps(self.metadata.get("aliases", {})))
        told = {"aliases": aliases, **facts}
        del told["format"], told["metadata"]
        return zlib.crc32(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        """The streams again, each with its terms."""
        return tuple(Declaration(stream, self.terms_of(stream.name)) for stream in self.streams)

    def stream(self, name: str) -> Stream:
        """The stream of this name."""
        return {stream.name: stream for stream in self.streams}[name]

    @property
    def layers(self) -> tuple[Stream, ...]:
        """The streams of layers, without those that summarize them."""
        return tuple(stream for stream in self.streams if not stream.layer)

    def fed_by(self, stream: str) -> tuple[Book, ...]:
        """The books that a stream's rows enter."""
        return tuple(book for book in self.books if stream in book.terms)

    def terms_of(self, stream: str) -> dict[str, Term]:
        """How a stream's rows enter each of them, by the book's name."""
        return {book.name: book.terms[stream] for book in self.fed_by(stream)}

    def declared(self, declarations: Iterable[Declaration]) -> RunInfo:
        """The same with these streams, each once, and their terms in the books."""
        found = {d.stream.name: d for d in [*self.declarations, *declarations]}
        books = [
            replace(
                b, terms={name: d.terms[b.name] for name, d in found.items() if b.name in d.terms}
            )
            for b in self.books
        ]
        return replace(self, books=tuple(books), streams=tuple(d.stream for d in found.values()))


def _is_convolution(stream: Stream) -> bool:
    """Whether a layout says of records of this shape at which positions they have rows.

    >>> layout = dict(kind="patches", kernel=[2], stride=[1], dilation=[1], padding=[[0, 0]])
    >>> [_is_convolution(Stream("conv", (1, 4), (1, n), layout)) for n in (3, 9)]
    [True, False]
    """
    layout, sizes = stream.layout, stream.keys[1:]
    sides = [layout[name] for name in ("kernel", "stride", "dilation", "padding")]
    apart = layout.get("stuffing", [1] * len(sizes))
    if layout["kind"] != "patches" or any(len(side) != len(sizes) for side in (*sides, apart)):
        return False
    positions = []
    for size, gap, kernel, stride, dilation, (before, after) in zip(
        sizes, apart, *sides, strict=True
    ):
        if not (_are_counts(gap, kernel, stride, dilation) and gap * kernel * stride * dilation):
            return False
        reach = gap * (size - 1) + 1 + before + after - dilation * (kernel - 1) - 1
        positions.append(reach // stride + 1)
    return not stream.keys[0] or positions == [*stream.values[1:]]


def _are_counts(*values: Any) -> bool:
    """Whether all are whole numbers from 0."""
    return all(type(value) is int and value >= 0 for value in values)


def read_info(path: Path) -> RunInfo:
    """Reads `run.json`, or says what the path holds instead."""
    file = path / RUN_FILE
    if not is_there(file):
        raise NotARunError(f"'{path}' is not a dualform run: {describe(path)}.")
    with open_plain(file) as opened:
        text = opened.readall()
    try:
        return RunInfo.from_json(text.decode())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"'{file}' is not a run description: {error}.") from error


def describe(path: Path) -> str:
    """Says in words what is at `path`: nothing, a file, or a folder of other things."""
    if isinstance(path, ObjectPath):
        return _described([one.name for one in path.iterdir()]) if path.is_dir() else NOTHING
    if not os.path.exists(path):
        if os.path.exists(f"{path}{BEFORE_COMPACT}{ASIDE}"):
            return f"a compaction of it was killed; `dualform compact {path} --undo` brings it back"
        return NOTHING
    if not os.path.isdir(path):
        return "it is a file, and a run is a folder"
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return f"its folder cannot be read ({error.strerror})"
    return _described(names) if names else "the folder is empty"


def _described(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"the folder has no {RUN_FILE} but holds {shown}"
