"""Appending to and scanning a ledger, against raw files of the same bytes.

`python -m benchmarks.ledger`: 1,000,000 rows of 256 + 256 float32 (2 GB), in shards of 128 MB.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.timing import compare
from dualform.ledger import (
    Book,
    Declaration,
    Ledger,
    LedgerWriter,
    RunInfo,
    ShardBlock,
    Stream,
    Term,
)
from dualform.read.engine import ShardRange
from dualform.read.scan import chunks

WIDTH = 256
STREAM = Stream("fc", (WIDTH,), (WIDTH,))


def make_blocks(rows: int, per_block: int) -> list[ShardBlock]:
    """Blocks that share their arrays: what is timed is writing, not making numbers."""
    keys, values = torch.randn(per_block, WIDTH), torch.randn(per_block, WIDTH)
    blocks = []
    for step in range(1, rows // per_block + 1):
        arrays = {
            "fc/keys": [keys],
            "fc/values": [values],
            "fc/segments": [torch.tensor([[step, step, 1]])],
            "batches": [torch.tensor([[step, per_block]])],
            "samples": [torch.arange(per_block)],
            "states": [torch.ones(1, 1, dtype=torch.uint8)],
            "groups": [torch.zeros(1, 1, dtype=torch.int16)],
            "hyper": [torch.tensor([[[0.1, 0, 0, 0, 0, 0]]], dtype=torch.float64)],
            "factors": [torch.ones(1, 1, dtype=torch.float64)],
        }
        blocks.append(ShardBlock(step, step, arrays))
    blocks[0].streams = [Declaration(STREAM, {"fc.weight": Term("outer")})]
    return blocks


def info() -> RunInfo:
    """A run with one layer."""
    from dualform.optimizers.sgd import SGDRule

    return RunInfo(
        books=(Book("fc.weight", (WIDTH, WIDTH), "float32"),),
        rule="sgd",
        fields=SGDRule.fields,
    )


def write_ledger(
    path: Path, blocks: list[ShardBlock], per_shard: int, final: torch.Tensor | None = None
) -> None:
    """Appends all blocks, a flush every `per_shard`; `final` are the weights that they lead to."""
    initial = {"fc.weight": torch.zeros(WIDTH, WIDTH)}
    writer = LedgerWriter.create(path, info(), initial, overwrite=True)
    for number, block in enumerate(blocks, 1):
        writer.append(block)
        if number % per_shard == 0:
            writer.flush()
    writer.weights(len(blocks), initial if final is None else {"fc.weight": final}, "final")
    writer.close()


def write_raw(path: Path, blocks: list[ShardBlock], per_shard: int) -> None:
    """The same keys and values through a memory map, made durable at the same points."""
    rows = len(blocks) * len(blocks[0].arrays["fc/keys"][0])
    raw = np.memmap(path, np.float32, "w+", shape=(2, rows, WIDTH))
    at = 0
    for number, block in enumerate(blocks, 1):
        keys, values = block.arrays["fc/keys"][0], block.arrays["fc/values"][0]
        raw[0, at : at + len(keys)] = keys.numpy()
        raw[1, at : at + len(keys)] = values.numpy()
        at += len(keys)
        if number % per_shard == 0:
            raw.flush()
    raw.flush()


def scan_ledger(path: Path) -> float:
    """Sums every number, chunk by chunk."""
    total = 0.0
    for shard in ShardRange.of(Ledger(path), 1, 1 << 40):
        for chunk in chunks(shard, STREAM):
            total += float(chunk.keys.sum()) + float(chunk.values.sum())
    return total


def scan_raw(path: Path, rows: int) -> float:
    """Sums every number of the memory map, in the same pieces."""
    raw = np.memmap(path, np.float32, "c", shape=(2, rows, WIDTH))
    total, step = 0.0, 2048
    for start in range(0, rows, step):
        for part in raw:
            total += float(torch.from_numpy(part[start : start + step]).sum())
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        blocks = make_blocks(options.rows, 4000)
        ledger, raw = folder / "run", folder / "raw"
        size = options.rows * 2 * WIDTH * 4
        result = compare(
            lambda: write_ledger(ledger, blocks, 16),
            lambda: write_raw(raw, blocks, 16),
            options.turns,
        )
        rate = size / result.seconds / 1e9
        print(f"append: {1 / result.ratio:.2f} of a raw memory map, {rate:.2f} GB/s")
        result = compare(
            lambda: scan_ledger(ledger), lambda: scan_raw(raw, options.rows), 4 * options.turns
        )
        rate = size / result.seconds / 1e9
        print(f"scan: {1 / result.ratio:.2f} of a raw memory map, {rate:.2f} GB/s")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
