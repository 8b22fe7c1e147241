"""How often a walk through dualform changes file: `python -m benchmarks.switches`.

A switch is a call of a function of dualform by a function that stands in another of its files.
Whoever follows a call while reading turns a page at each of them, so few is what we want. Counted
are one recorded step of training, one spotlight, one influence and one request of the page.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

import dualform
from dualform.explore.exhibit import Exhibit
from dualform.explore.views import Explorer

SOURCE = str(Path(dualform.__file__).parent)
Pairs: TypeAlias = Counter[tuple[str, str]]
"""How often one function calls another, by the names of both."""
WIDTHS, BATCH, STEPS = (64, 128, 10), 32, 20


@contextmanager
def counted() -> Iterator[Pairs]:
    """Counts switches, in all threads that start within, by who calls whom."""
    pairs: Pairs = Counter()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        back = frame.f_back
        if event != "call" or back is None:
            return
        files = [f.f_code.co_filename for f in (back, frame)]
        if files[0] != files[1] and all(file.startswith(SOURCE) for file in files):
            pairs[_name(back), _name(frame)] += 1

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield pairs
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{Path(code.co_filename).relative_to(SOURCE)}:{code.co_name}"


def recorded(folder: Path) -> tuple[nn.Module, torch.Tensor, Pairs]:
    """Records a small run: its model and its inputs, and the switches of its last step."""
    torch.manual_seed(0)
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(WIDTHS)]
    model = nn.Sequential(*list(itertools.chain(*layers))[:-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(BATCH, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (BATCH,))
    with dualform.record(model, optimizer, folder / "run") as recorder:
        for _ in range(STEPS):
            with counted() as pairs:
                recorder.samples(torch.arange(BATCH))
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    return model, x, pairs


def walks(folder: Path) -> Iterator[tuple[str, Pairs]]:
    """Each walk's name and its switches; every read is the first one of its run."""
    model, x, pairs = recorded(folder)
    yield "step", pairs
    reads: dict[str, Callable[[dualform.Run], Any]] = {
        "spotlight": lambda run: run.spotlight(model, x[:1])["2"].top(3),
        "influence": lambda run: run.influence(model, x[:1], target=0),
        "request": lambda run: Explorer(Exhibit(run, model, x[:1])).view("answer", {"query": "0"}),
    }
    for name, read in reads.items():
        run = dualform.open(folder / "run")
        with counted() as pairs:
            read(run)
        yield name, pairs


def main() -> None:
    """Prints how many switches each walk makes, and the pairs that make most of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=0, help="how many pairs to print of each walk")
    parser.add_argument("--walk", default="", help="only this one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, pairs in walks(Path(folder)):
            if given.walk not in ("", name):
                continue
            print(f"{name:10} {pairs.total():5} switches, {len(pairs)} different")
            for (caller, callee), count in pairs.most_common(given.pairs):
                print(f"{count:8}  {caller} → {callee}")


if __name__ == "__main__":
    main()
