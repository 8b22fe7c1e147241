"""A small run, and ways to damage it."""

from __future__ import annotations

from pathlib import Path

import torch

from dualform.ledger import Book, LedgerWriter, RunInfo
from dualform.testing.ledgers import block

INFO = RunInfo((Book("fc.weight", (1,), "float32"),), "sgd", ("lr",), {"model": "one layer"})


def record(path: Path, first: int, last: int, *, killed: bool = False) -> Path:
    """Steps in a log of their own, a line each, and the weights after the last; returns the log."""
    make = LedgerWriter.resume(path, first - 1) if first > 1 else None
    writer = make or LedgerWriter.create(path, INFO, {"fc.weight": torch.zeros(1)})
    for step in range(first, last + 1):
        writer.append(block(step, step))
        writer.flush()
    writer.weights(last, {"fc.weight": torch.ones(1)}, "checkpoint")
    writer.flush()
    end = path / "end-0.json"
    before = end.read_bytes() if end.exists() else None
    writer.close()
    if killed:  # then it could not note its end
        end.write_bytes(before) if before else end.unlink()
    return writer.folder / "commits.jsonl"


def logs(path: Path) -> list[Path]:
    return sorted(path.glob("writer-*/commits.jsonl"))


def flip(data: bytes, at: int, bit: int = 0) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
