"""Writes steps as one rank of two until it is told to stop; run by test_ranks in its own process.

Prints each step once it is committed, and goes on when it is sent a line.
"""

import sys
from pathlib import Path

import torch
from tests.ledger.test_ranks import INFO, rank_block

from dualform.ledger import LedgerWriter


def main(path: Path, rank: int, begin: int) -> None:
    if rank:
        writer = LedgerWriter.join(path, rank)
    elif begin:
        writer = LedgerWriter.resume(path, begin, of=2)
    else:
        writer = LedgerWriter.create(path, INFO, {"w": torch.zeros(1)}, of=2)
    print(begin, flush=True)
    step = begin
    while sys.stdin.readline() == "step\n":
        step += 1
        writer.append(rank_block(step, step, rank))
        writer.flush()
        print(step, flush=True)
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
