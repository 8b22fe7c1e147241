"""How long people wait for the explorer: MNIST, 60,000 samples, 784-128-64-10; then 50 clients.

`DUALFORM_DATA=… python -m benchmarks.explorer [--samples 60000] [--epochs 5] [--seconds 60]`:
a real server in a process of its own. 1.5 GB of temporary disk.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch
from torch import nn
from torch.nn import functional as F

import dualform
from benchmarks.attribution.data import idx

BATCH, QUERIES = 64, 1000


def model() -> nn.Module:
    """What `dualform view` builds."""
    widths = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*widths)


def record(folder: Path, samples: int, epochs: int) -> None:
    """A run with labels and pictures, and the queries."""
    images = idx("mnist/train-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)[:samples]
    labels = idx("mnist/train-labels-idx1-ubyte.gz", 8)[:samples].long()
    x, trained = images.flatten(1).float() / 255, model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    with dualform.record(trained, optimizer, folder / "run") as recorder:
        recorder.describe(range(samples), labels=labels, previews=images)
        for _ in range(epochs):
            for ids in torch.randperm(samples).split(BATCH):
                recorder.samples(ids)
                F.cross_entropy(trained(x[ids]), labels[ids]).backward()
                optimizer.step()
                optimizer.zero_grad()
    test = idx("mnist/t10k-images-idx3-ubyte.gz", 16).reshape(-1, 784)[:QUERIES]
    known = idx("mnist/t10k-labels-idx1-ubyte.gz", 8)[:QUERIES]
    np.savez(folder / "test.npz", x=(test.float() / 255).numpy(), labels=known.numpy())


class Client:
    """One connection that is kept open, as a browser's is."""

    def __init__(self, address: str) -> None:
        where = urlsplit(address)
        self._connection = HTTPConnection(where.hostname or "", where.port, timeout=600)

    def get(self, path: str) -> tuple[int, float, int]:
        """Status, seconds and bytes."""
        began = time.perf_counter()
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        size = len(answer.read())
        return answer.status, time.perf_counter() - began, size


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """The server, and its address."""
    command = [
        sys.executable,
        "-c",
        "from dualform.cli import main; main()",
        "view",
        "--no-browser",
    ]
    asked = ["--model", "benchmarks.explorer:model", "--input", str(folder / "test.npz")]
    process = subprocess.Popen(
        [*command, str(folder / "run"), *asked], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()[4]


def first_looks(address: str) -> None:
    """Each view as the first person meets it, and again."""
    client = Client(address)
    for name, path in {
        "page": "/",
        "run": "/api/0/run",
        "queries": "/api/0/queries?limit=50",
        "answer: last layer": "/api/0/answer?query=0",
        "answer: the same, a span of training": "/api/0/answer?query=0&span=0-1",
        "answer: first layer": "/api/0/answer?query=0&layer=0",
        "answer: whole network": "/api/0/answer?query=0&ask=network",
        "evidence 30,000 to 30,050": "/api/0/evidence?query=0&side=for&offset=30000",
        "a sample's page": "/api/0/sample?id=7",
        "suspects": "/api/0/suspects",
        "books": "/api/0/books",
    }.items():
        (status, cold, size), (_, warm, _) = client.get(path), client.get(path)
        print(f"{name:40} {status} {cold:8.3f} s, again {warm:7.4f} s {size / 1e3:9.1f} kB")


def mixed(chance: random.Random, samples: int) -> tuple[str, str]:
    """What a person may click next."""
    query, sample = chance.randrange(64), chance.randrange(samples)
    return chance.choice(
        [
            ("answer", f"/api/0/answer?query={query}"),
            ("span", f"/api/0/answer?query={query}&span=1-{chance.randrange(1, 4)}"),
            (
                "evidence",
                f"/api/0/evidence?query={query}&side=for&offset={50 * chance.randrange(99)}",
            ),
            ("queries", f"/api/0/queries?offset={chance.randrange(900)}"),
            ("sample", f"/api/0/sample?id={sample}"),
            ("acts", f"/api/0/acts?query={query}&id={sample}"),
            ("suspects", f"/api/0/suspects?offset={chance.randrange(samples)}"),
        ]
    )


def load(
    address: str, process: subprocess.Popen[str], seconds: float, clients: int, samples: int
) -> None:
    """Many clients at once, each asking as soon as it has been answered."""
    times: dict[str, list[float]] = defaultdict(list)
    wrong: list[int] = []
    server, until = psutil.Process(process.pid), time.monotonic() + seconds
    memory = [server.memory_info().rss]

    def ask(seed: int) -> None:
        client, chance = Client(address), random.Random(seed)
        while time.monotonic() < until:
            kind, path = mixed(chance, samples)
            status, took, _ = client.get(path)
            times[kind].append(took)
            if status != 200:
                wrong.append(status)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(1)
        memory.append(server.memory_info().rss)
    total = sorted(took for listed in times.values() for took in listed)
    print(f"{clients} clients, {seconds:.0f} s: {len(total):,} answers, {len(wrong)} errors")
    for kind, listed in [*times.items(), ("all", total)]:
        p95 = statistics.quantiles(listed, n=20)[-1]
        print(
            f"{kind:10} {len(listed):6,} median {statistics.median(listed):.3f} s, p95 {p95:.3f} s"
        )
    thirds = [round(max(part) / 1e6) for part in np.array_split(memory, 3)]
    print(f"memory {memory[0] / 1e6:.0f} MB before; largest in thirds of the time: {thirds} MB")


def main() -> None:
    """Prints what a person waits for, then what 50 do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=50)
    given = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder, given.samples, given.epochs)
        process, address = start(folder)
        try:
            first_looks(address)
            load(address, process, given.seconds, given.clients, given.samples)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
