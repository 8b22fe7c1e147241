"""The 100 rows that matter most for 64 queries, on a GPU, against what the disk and the bus give.

`python -m benchmarks.gpu_reading --gigabytes 2 60`: runs of rows of 256 + 256 float32, written by
the ledger's own writer, whose books balance. For each:

- *bus*: pinned memory to the GPU; *memory*: files that the system has in memory, to pinned memory,
  by as many threads as there are readers; *disk*: the same once they are not in memory (synced and
  dropped by `posix_fadvise`), and past the system's memory (O_DIRECT);
- the read, with files in memory and not, in turns with those;
- the read of 2 GB on processors, whether the rows are the same, and what else reads all rows.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.ledger import WIDTH, make_blocks, write_ledger
from benchmarks.reading import ask
from benchmarks.timing import seconds
from dualform.read import Run, open_run
from dualform.read.engine import Engine, ReadAhead
from dualform.read.engine.read_ahead import READERS
from dualform.read.grouping import BySample
from dualform.read.spotlight import Reading

QUERIES, TOP, PER_STEP, STEPS_PER_SHARD = 64, 100, 4000, 16
POOL = 8
"""How many arrays of keys there are, and of values: a step has one of each, and its own factor."""
PIECE = 8 << 20
COMPARED = 2.5e9
"""Up to how many bytes the processors read a run, too."""


def make_run(path: Path, size: int) -> None:
    """A run of so many bytes, whose last weights are what its rows add up to."""
    steps = max(2, size // (PER_STEP * WIDTH * 8))
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(POOL, PER_STEP, WIDTH, generator=generator) for _ in range(2))
    factors = 0.5 + torch.rand(steps, generator=generator, dtype=torch.float64)
    blocks = make_blocks(steps * PER_STEP, PER_STEP)
    counts = torch.zeros(POOL, POOL, dtype=torch.float64)
    for step, block in enumerate(blocks):
        which = step % POOL, step // POOL % POOL
        block.arrays["fc/keys"], block.arrays["fc/values"] = [keys[which[0]]], [values[which[1]]]
        block.arrays["factors"] = [factors[step].reshape(1, 1)]
        counts[which] += factors[step]
    final = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for at, some in enumerate(values.double().unbind()):
        final += some.T @ torch.einsum("k,krw->rw", counts[:, at], keys.double())
    write_ledger(path, blocks, STEPS_PER_SHARD, (-0.1 * final).float())


def files(path: Path) -> list[Path]:
    """The shards of a run."""
    return sorted(path.glob("writer-*/*.safetensors"))


def drop(path: Path) -> None:
    """Takes a run out of the system's memory."""
    for file in files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_plainly(path: Path, memory: Tensor, readers: int, flags: int = 0) -> None:
    """Reads the files piece by piece into memory, and does nothing with them."""
    view = memoryview(memory.numpy())
    places = [
        (file, at)
        for file in files(path)
        for at in range(0, file.stat().st_size // 4096 * 4096, PIECE)
    ]

    def read(number: int) -> None:
        file, at = places[number]
        slot = number % (len(view) // PIECE) * PIECE
        descriptor = os.open(file, os.O_RDONLY | flags)
        os.preadv(descriptor, [view[slot : slot + PIECE]], at)
        os.close(descriptor)

    with ThreadPoolExecutor(readers) as pool:
        for _ in pool.map(read, range(len(places))):
            pass


def bus(device: str) -> float:
    """Bytes a second from pinned memory."""
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=device != "cpu")
    there = torch.empty_like(host, device=device)

    def copy() -> None:
        for _ in range(16):
            there.copy_(host, non_blocking=True)
        wait(device)

    copy()
    return 16 * len(host) / statistics.median(seconds(copy) for _ in range(3))


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def reading_of(run: Run) -> Reading:
    """The questions."""
    generator = torch.Generator().manual_seed(1)
    return ask(run, torch.randn(QUERIES, WIDTH, generator=generator), torch.arange(QUERIES) % WIDTH)


def rates(
    size: int, turns: int, works: dict[str, tuple[Callable[[], object], Callable[[], object]]]
) -> dict[str, float]:
    """Bytes a second of each, all of them once a turn; each is a preparation and what is timed."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        for name, (prepare, work) in works.items():
            prepare()
            times[name].append(seconds(work))
    return {name: size / statistics.median(each) for name, each in times.items()}


def measure(path: Path, device: str, engine: Engine | None, turns: int) -> None:
    """One run: rates of what is under the read, and of the read."""
    size = sum(file.stat().st_size for file in files(path))
    run = open_run(path, device, engine=engine)
    reading = reading_of(run)
    memory = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=device != "cpu")
    aligned = torch.frombuffer(mmap.mmap(-1, 256 << 20), dtype=torch.uint8)

    def nothing() -> None:
        pass

    def largest() -> None:
        reading.rows(TOP)

    print(f"{size / 1e9:.1f} GB in {len(files(path))} files, {READERS} readers", flush=True)
    print(f"the first read, with the device's start: {seconds(largest):.2f} s", flush=True)
    under = bus(device)
    warm = rates(
        size,
        2 * turns,
        {
            "memory": (nothing, lambda: read_plainly(path, memory, READERS)),
            "read": (nothing, largest),
        },
    )
    cold = rates(
        size,
        turns,
        {
            "disk": (lambda: drop(path), lambda: read_plainly(path, memory, READERS)),
            "read": (lambda: drop(path), largest),
            "direct": (
                lambda: drop(path),
                lambda: read_plainly(path, aligned, READERS, os.O_DIRECT),
            ),
        },
    )
    print("| files | read, GB/s | seconds | of the bus | of memory | of the disk | of O_DIRECT |")
    of_bus, of_memory = warm["read"] / under, warm["read"] / warm["memory"]
    print(
        f"| in memory | {warm['read'] / 1e9:.1f} | {size / warm['read']:.3f} | {of_bus:.2f} "
        f"(of {under / 1e9:.1f}) | {of_memory:.2f} (of {warm['memory'] / 1e9:.1f}) | | |"
    )
    of_disk, of_direct = (cold["read"] / cold[name] for name in ("disk", "direct"))
    print(
        f"| on disk | {cold['read'] / 1e9:.2f} | {size / cold['read']:.2f} | | | {of_disk:.2f} "
        f"(of {cold['disk'] / 1e9:.2f}) | {of_direct:.2f} (of {cold['direct'] / 1e9:.2f}) |",
        flush=True,
    )
    if device != "cpu":
        print(f"the device's memory, at most: {torch.cuda.max_memory_allocated() / 1e6:.0f} MB")


def compare_with_processors(path: Path, device: str, engine: Engine | None) -> None:
    """Whether the rows are the same, and how long each read takes here and there."""
    here, there = open_run(path), open_run(path, device, engine=engine)
    own, found = (reading_of(run).rows(TOP).rows for run in (here, there))
    pairs = list(zip(own, found, strict=True))
    same = sum(a._replace(value=0.0) == b._replace(value=0.0) for a, b in pairs)
    gap = max(abs(a.value - b.value) / abs(a.value) for a, b in pairs)
    print(f"the same rows at {same} of {len(pairs)} places, values within {gap:.0e}")
    other = open_run(path, device, engine=ReadAhead(chunk_bytes=9 << 20, buffers=7))
    rows = reading_of(other).rows(TOP).rows
    same = sum(a == b for a, b in zip(found, rows, strict=True))
    print(f"with other chunks and buffers the same bits at {same} of {len(pairs)} places")
    sums = [reading_of(run).sums(BySample(run.source.numbers)) for run in (here, there)]
    print(f"sums by sample agree to {abs(sums[0] - sums[1]).max() / abs(sums[0]).max():.0e}")
    reads: dict[str, Callable[[Run], object]] = {
        "largest rows": lambda run: reading_of(run).rows(TOP),
        "sums by sample": lambda run: reading_of(run).sums(BySample(run.source.numbers)),
        "audit": lambda run: run.audit(),
    }
    print(f"| read | processors, s | {device}, s |")
    for name, read in reads.items():
        times = [[seconds(partial(read, run)) for run in (here, there)] for _ in range(3)]
        medians = [statistics.median(each) for each in zip(*times, strict=True)]
        print(f"| {name} | {medians[0]:.2f} | {medians[1]:.2f} |", flush=True)
    print(f"remainder of the audit: {there.audit().remainder:.0e}")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[2])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where there is room; by default for a while")
    options = parser.parse_args(given)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    engine = ReadAhead() if options.device == "cpu" else None
    try:
        for gigabytes in options.gigabytes:
            path = folder / f"{gigabytes:g}"
            took = seconds(lambda path=path, size=int(1e9 * gigabytes): make_run(path, size))
            print(f"written in {took:.0f} s", flush=True)
            measure(path, options.device, engine, options.turns)
            if gigabytes * 1e9 <= COMPARED:
                compare_with_processors(path, options.device, engine)
            shutil.rmtree(path)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
