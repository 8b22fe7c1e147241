"""Reading on Ray against reading in this process: `python -m benchmarks.ray_reading`.

With `OMP_NUM_THREADS=1`, so that each process and thread computes on one core.

The 100 rows that matter most for 64 queries, and the sums of 4,000 samples, of runs of several
sizes in the page cache:

- by a cluster of three nodes on this machine, against one thread and one for each core: what a
  query costs beyond the work (a run of a few kilobytes), and from which size on Ray is faster;
- of the largest run by 1, 2, 4, … processes: is it linear in processes? And the most memory that
  any process of the cluster took;
- with `--influence 20000`, the first call of `influence` for so many samples of a network of
  784-128-10, by as many processes, and here by one thread.

A machine with many cores: `--processes 1 2 4 8 16 --megabytes 128 512 2048 8192`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
import torch
from ray.cluster_utils import Cluster

from benchmarks.explaining import inputs_of, network, record
from benchmarks.ledger import WIDTH, make_blocks, write_ledger
from benchmarks.reading import ask
from benchmarks.timing import seconds
from dualform.read import open_run
from dualform.read.engine import Engine, Ray, Threads
from dualform.read.grouping import BySample

QUERIES, TOP, PER_STEP, STEPS_PER_SHARD = 64, 100, 4000, 8
STEP_BYTES = PER_STEP * WIDTH * 8
STORE = 256 << 20
"""Bytes of each node's memory for what tasks hand on."""

PARTS = 6
"""Of the run that shows what a query costs beyond the work."""
READS = ("largest rows", "sums")


@contextmanager
def three_nodes() -> Iterator[None]:
    """A cluster of three nodes on this machine, as many processors each as fit."""
    node = {"num_cpus": max(1, (os.cpu_count() or 1) // 3), "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def processes(count: int, store: int = STORE) -> Iterator[None]:
    """A cluster of one node, with so many processors."""
    ray.init(
        num_cpus=count,
        object_store_memory=store,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield
    finally:
        ray.shutdown()


def asks(path: Path, engine: Engine) -> dict[str, Callable[[], object]]:
    """What is timed."""
    torch.manual_seed(0)
    run = open_run(path, engine=engine)
    reading = ask(run, torch.randn(QUERIES, WIDTH), torch.arange(QUERIES) % WIDTH)
    by_sample = BySample(run.source.numbers)
    return {"largest rows": lambda: reading.rows(TOP), "sums": lambda: reading.sums(by_sample)}


def median(read: Callable[[], object], turns: int) -> float:
    """Seconds, after one that is not counted."""
    read()
    return statistics.median(seconds(read) for _ in range(turns))


def in_turns(reads: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """The median seconds of each, all of them once a turn, after a turn that is not counted."""
    times = [{name: seconds(read) for name, read in reads.items()} for _ in range(turns + 1)]
    return {name: statistics.median(turn[name] for turn in times[1:]) for name in reads}


def peak_memory() -> float:
    """The most MB that any process which folded has ever taken."""
    peaks = []
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0].startswith("ray::"):
            status = Path(f"/proc/{process.pid}/status").read_text()
            peaks += [int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line]
    return max(peaks, default=0) / 1e3


def against_local(runs: dict[int, Path], tiny: Path, turns: int) -> None:
    """Three nodes against this process."""
    cores = os.cpu_count() or 1
    print(f"top {TOP} rows and sums by sample for {QUERIES} queries; three nodes, {cores} cores")
    with three_nodes():
        for name in READS:
            read = asks(tiny, Ray(part_bytes=1))[name], asks(tiny, Threads(1, part_bytes=1))[name]
            there, here = in_turns(dict(zip(("there", "here"), read, strict=True)), turns).values()
            print(f"{name} of {PARTS} parts of 8 kB: {1e3 * (there - here):.0f} ms more than here")
        print("| run, MB | read | Ray, s | one thread, s | a thread for each core, s |")
        for size, path in runs.items():
            for name in READS:
                engines = {"ray": Ray(), "one": Threads(1), "all": Threads(cores)}
                reads = {engine: asks(path, of)[name] for engine, of in engines.items()}
                found = in_turns(reads, turns)
                times = " | ".join(f"{took:.3f}" for took in found.values())
                print(f"| {size:,} | {name} | {times} |", flush=True)
        print(f"most memory of a process that folded: {peak_memory():,.0f} MB")


def by_processes(path: Path, counts: list[int], turns: int) -> None:
    """One run by more and more processes."""
    print("| processes | read | s | times as fast as one | most memory of one, MB |")
    first: dict[str, float] = {}
    for count in counts:
        with processes(count):
            for name in READS:
                took = median(asks(path, Ray())[name], turns)
                gain = first.setdefault(name, took) / took
                found = f"{took:.2f} | {gain:.2f} | {peak_memory():,.0f}"
                print(f"| {count} | {name} | {found} |", flush=True)


def influence_by_processes(path: Path, samples: int, counts: list[int]) -> None:
    """The first call of influence by more and more processes; how far it is from one thread's."""
    model, x = network([784, 128, 10]), inputs_of(samples, 784)
    record(path, model, x, 4, "SGD")

    def asked(engine: Engine) -> tuple[float, torch.Tensor]:
        run, began = open_run(path, engine=engine), time.perf_counter()
        found = torch.from_numpy(run.influence(model, x[:1], 1).values)
        return time.perf_counter() - began, found

    here, expected = asked(Threads(1))
    print(f"influence of {samples:,} samples, 784-128-10: {here:.1f} s here, by one thread")
    print("| processes | s | times as fast as here | difference | most memory of one, MB |")
    for count in counts:
        with processes(count, 16 * STORE):  # Gram matrices of 315 MB are handed on
            took, found = asked(Ray())
            gap = float((found - expected).abs().max() / expected.abs().max())
            print(
                f"| {count} | {took:.1f} | {here / took:.2f} | {gap:.0e} | {peak_memory():,.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--influence", type=int, default=0, metavar="SAMPLES")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = Path(tempfile.mkdtemp())
    try:
        runs = {size: folder / f"{size}" for size in sorted(options.megabytes)}
        for size, path in runs.items():
            steps = max(2, size * 1_000_000 // STEP_BYTES)
            blocks = make_blocks(steps * PER_STEP, PER_STEP)
            for block in blocks:
                block.arrays["fc/keys"] = [torch.randn(PER_STEP, WIDTH)]
            write_ledger(path, blocks, STEPS_PER_SHARD)
        write_ledger(folder / "tiny", make_blocks(4 * PARTS, 4), 1)
        against_local(runs, folder / "tiny", options.turns)
        by_processes(runs[max(runs)], options.processes, options.turns)
        if options.influence:
            influence_by_processes(folder / "net", options.influence, options.processes)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
