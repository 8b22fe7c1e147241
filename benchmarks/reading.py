"""The 100 rows that matter most for 64 queries, over 1,000,000 rows of 256 on disk.

`python -m benchmarks.reading`: against the same arithmetic on arrays that are in memory already.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.ledger import WIDTH, make_blocks, write_ledger
from benchmarks.timing import compare
from dualform.read import Run, open_run
from dualform.read.queries import LayerQueries
from dualform.read.spotlight import Reading
from dualform.read.unrecorded import Unrecorded

QUERIES, TOP = 64, 100


def in_memory(keys: Tensor, values: Tensor, queries: Tensor, units: Tensor) -> Callable[[], Tensor]:
    """One GEMM, the choice of each query's output, and top-k: all in memory."""

    def read() -> Tensor:
        scores = keys @ queries.T
        scores.mul_(values.index_select(1, units)).mul_(-0.1)
        return scores.abs_().topk(TOP, dim=0).values

    return read


def ask(run: Run, queries: Tensor, units: Tensor) -> Reading:
    """The layer's outputs for some inputs, one unit of each."""
    count = len(queries)
    directions = torch.nn.functional.one_hot(units, WIDTH).double()
    nothing = Unrecorded.nothing(count, WIDTH)
    names = [str(i) for i in range(count)]
    asked = LayerQueries(names, queries, torch.zeros(count, WIDTH), nothing)
    return Reading("fc", asked, directions, [""] * count, run.source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        torch.manual_seed(0)
        blocks = make_blocks(options.rows, 4000)
        for block in blocks:
            block.arrays["fc/keys"] = [torch.randn(4000, WIDTH)]
        write_ledger(folder / "run", blocks, 16)
        run = open_run(folder / "run", options.device)
        queries, units = torch.randn(QUERIES, WIDTH), torch.arange(QUERIES) % WIDTH
        reading = ask(run, queries, units)
        keys = torch.cat([block.arrays["fc/keys"][0] for block in blocks]).to(options.device)
        values = torch.cat([block.arrays["fc/values"][0] for block in blocks]).to(options.device)
        plain = in_memory(keys, values, queries.to(options.device), units.to(options.device))
        gap = abs(plain().T.flatten().cpu().double() - largest(reading)).max()
        print(f"same rows found: largest difference {gap:.1e}")
        result = compare(
            lambda: reading.rows(TOP), lambda: (plain(), sync(options.device)), options.turns
        )
        print(f"top {TOP} of {options.rows:,} rows for {QUERIES} queries: {result}, ", end="")
        print(f"{result.seconds:.2f} s from disk, {result.reference:.2f} s in memory")
    finally:
        shutil.rmtree(folder)


def sync(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def largest(reading: Reading) -> Tensor:
    """The sizes found, query by query."""
    return torch.tensor([abs(row.value) for row in reading.rows(TOP).rows], dtype=torch.float64)


if __name__ == "__main__":
    main()
