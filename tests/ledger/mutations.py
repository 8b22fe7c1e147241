"""What may happen to a file of a run: by accident, or by somebody who then mends its seals."""

from __future__ import annotations

import json
import random
import re
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from dualform.errors import DualformError
from dualform.ledger.format import INITIAL_FILE, RUN_FILE, RunInfo
from dualform.ledger.log import LOG_FILE, end_file, seal_line, session_and_rank, writer_folders
from dualform.ledger.tensors import DTYPES, TensorFile, in_index

Mutation: TypeAlias = Callable[[bytes, random.Random], bytes]


def flip_a_bit(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def change_bytes(data: bytes, draw: random.Random) -> bytes:
    at, count = draw.randrange(len(data)), draw.randint(1, 16)
    return data[:at] + draw.randbytes(len(data[at : at + count])) + data[at + count :]


def zero_bytes(data: bytes, draw: random.Random) -> bytes:
    at, count = draw.randrange(len(data)), draw.randint(1, 64)
    return data[:at] + bytes(len(data[at : at + count])) + data[at + count :]


def insert_bytes(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.randbytes(draw.randint(1, 8)) + data[at:]


def remove_bytes(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + data[at + draw.randint(1, 64) :]


def repeat_bytes(data: bytes, draw: random.Random) -> bytes:
    at, count = draw.randrange(len(data)), draw.randint(1, 64)
    return data[: at + count] + data[at : at + count] + data[at + count :]


def change_a_digit(data: bytes, draw: random.Random) -> bytes:
    """A number of a header or a description becomes another: the text stays JSON."""
    places = [at for at, byte in enumerate(data[:2000]) if 48 <= byte < 58]
    if not places:
        return flip_a_bit(data, draw)
    at = draw.choice(places)
    return data[:at] + str(draw.randrange(10)).encode() + data[at + 1 :]


def cut_off(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


ACCIDENTS: list[Mutation] = [
    flip_a_bit,
    change_bytes,
    zero_bytes,
    insert_bytes,
    remove_bytes,
    repeat_bytes,
    change_a_digit,
    cut_off,
]

# What a forger would try

NUMBERS = [0, 1, 2, 7, 1 << 20, 1 << 31, 1 << 40, (1 << 62) + 1, (1 << 63) - 1]
"""What a count, a place or a size is changed to; as many bytes, or rows, nobody has."""
VALUES = ["-1", "1.5", "1e999", "null", '"a"', "[]", "{}", "true", *map(str, [*NUMBERS, 1 << 80])]
"""What a value in a text is changed to."""


def change_a_number(data: bytes, draw: random.Random) -> bytes:
    """A number of a text, or of a header that is then as long as it says."""
    head, text, rest = _parts(data)
    found = list(re.finditer(rb"(?<![\w.\"])\d+(?![\w.\"])", text))
    if not found:
        return flip_a_bit(data, draw)
    at, value = draw.choice(found).span(), draw.choice(VALUES).encode()
    return _whole(head, text[: at[0]] + value + text[at[1] :], rest)


def change_a_shape(data: bytes, draw: random.Random) -> bytes:
    """A list of numbers becomes another with the same product, or one of nothing that is long."""
    head, text, rest = _parts(data)
    found = list(re.finditer(rb'"(?:shape|keys|values|shared|bases)":\s*\[([\d,\s]*)\]', text))
    if not found:
        return change_a_word(data, draw)
    match = draw.choice(found)
    lengths = [int(length) for length in match[1].split(b",") if length.strip()]
    draw.shuffle(lengths)
    long = draw.choice(NUMBERS)
    made = draw.choice([lengths, [1, *lengths], [*lengths, 1], [0, long], [long, 0], lengths[:-1]])
    shape = json.dumps(made)[1:-1].encode()
    return _whole(head, text[: match.start(1)] + shape + text[match.end(1) :], rest)


def change_a_type(data: bytes, draw: random.Random) -> bytes:
    """Of an array; mostly to one of the same size."""
    head, text, rest = _parts(data)
    found = list(re.finditer(rb'"dtype":\s*"(\w+)"', text))
    if not found:
        return change_a_number(data, draw)
    match = draw.choice(found)
    size = DTYPES[match[1].decode()].itemsize if match[1].decode() in DTYPES else 4
    alike = [code for code, dtype in DTYPES.items() if dtype.itemsize == size]
    code = draw.choice(draw.choice([alike, [*DTYPES]])).encode()
    return _whole(head, text[: match.start(1)] + code + text[match.end(1) :], rest)


def change_a_word(data: bytes, draw: random.Random) -> bytes:
    """A number of an array of 64 bits, such as those that say where rows lie."""
    head, text, rest = _parts(data)
    if len(rest) < 8:
        return change_a_number(data, draw)
    at = draw.randrange(len(rest) // 8) * 8
    word = struct.pack("<q", draw.choice([-1, *NUMBERS]))
    return _whole(head, text, rest[:at] + word + rest[at + 8 :])


FORGERIES: list[Mutation] = [
    flip_a_bit,
    change_a_digit,
    change_a_number,
    change_a_number,
    change_a_shape,
    change_a_type,
    change_a_word,
    change_a_word,
]


def _parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    """The length of a header, the header, and what follows; a text is all header."""
    if data[:1] in (b"{", b"["):
        return b"", data, b""
    (length,) = struct.unpack("<Q", data[:8])
    return data[:8], data[8 : 8 + length], data[8 + length :]


def _whole(head: bytes, text: bytes, rest: bytes) -> bytes:
    return (struct.pack("<Q", len(text)) if head else b"") + text + rest


def seal_again(path: Path, mutated: Path) -> None:
    """Makes all seals of a run fit again, as far as what was mutated can be read."""
    last: dict[int, dict[str, Any]] = {}
    for folder in writer_folders(path):
        file, rank = folder / LOG_FILE, session_and_rank(folder)[1]
        lines: list[bytes] = []
        after: Any = last.get(rank)
        for line in file.read_bytes().splitlines(keepends=True):
            with suppress(ValueError, TypeError, KeyError, AttributeError):
                record = json.loads(line)
                _vouch(record, folder)
                record.pop("line_crc32", None)
                record["after"] = after
                line = seal_line(record).encode()
                after = json.loads(line)["line_crc32"]
            lines.append(line)
        file.write_bytes(b"".join(lines))
        last[rank] = {"folder": folder.name, "lines": len(lines), "seal": after}
    for rank, head in last.items():
        if path / end_file(rank) != mutated:
            (path / end_file(rank)).write_text(seal_line(head))


def _vouch(record: dict[str, Any], folder: Path) -> None:
    """What a record says of files, as they are."""
    if "initial" in record:
        record["initial"] |= _vouched(folder.parent / INITIAL_FILE)
        with suppress(DualformError, ValueError, KeyError, TypeError, AttributeError):
            info = RunInfo.from_json((folder.parent / RUN_FILE).read_text("utf-8"))
            record["run_crc32"] = info.checksum
    elif "file" in record and (folder / str(record["file"])).is_file():
        record |= _vouched(folder / str(record["file"]))


def _vouched(file: Path) -> dict[str, int]:
    data = file.read_bytes()
    found = {"bytes": len(data), "crc32": zlib.crc32(data)}
    with suppress(DualformError):
        arrays = TensorFile(file).arrays
        (length,) = struct.unpack("<Q", data[:8])
        index = zlib.crc32(data[: 8 + length])
        for name, place in arrays.items():
            if in_index(name, place.dtype):
                index = zlib.crc32(data[place.offset : place.offset + place.nbytes], index)
        found["index_crc32"] = index
    return found
