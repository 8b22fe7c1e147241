"""What a run takes when keys are stored once: `python -m benchmarks.keys`.

The same training is recorded twice, the second time with all keys of every stream: 784-128-64-10
over epochs of MNIST, and a small transformer with separate queries, keys and values over epochs of
Tiny Shakespeare. Data as for `benchmarks.attribution`. Seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from benchmarks.attribution.data import VOCABULARY, idx, verses
from benchmarks.timing import compare
from dualform.ledger.shared_keys import SharedKeys
from dualform.read import Run

WIDTH, HEADS = 64, 4


class Block(nn.Module):
    """Attention with separate projections, and two layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        heads = (p(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        read = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return found


class Words(nn.Module):
    """Two blocks over a table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.table(x)))
        return found


def digits(count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The layers 784-128-64-10, and MNIST."""
    widths = (nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    images = idx("mnist/train-images-idx3-ubyte.gz", 16).reshape(-1, 784)[:count]
    labels = idx("mnist/train-labels-idx1-ubyte.gz", 8)[:count].long()
    return nn.Sequential(*widths), (images.float() / 255 - 0.1307) / 0.3081, labels


def words(count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The transformer, and windows of 16 words."""
    x, y, *_ = verses()
    return Words(), x[:count], y[:count]


def record(path: Path, make: Callable[[], tuple[nn.Module, Tensor, Tensor]], **given: Any) -> float:
    """Trains over some epochs; returns the seconds of the processor."""
    epochs, batch = given.pop("epochs"), given.pop("batch")
    torch.manual_seed(0)
    model, x, y = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    began = time.process_time()
    with dualform.record(model, optimizer, path, **given) as recorder:
        for _ in range(epochs):
            for ids in torch.randperm(len(x)).split(batch):
                recorder.samples(ids)
                F.cross_entropy(model(x[ids]).flatten(0, -2), y[ids].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
    return time.process_time() - began


def spotlight(run: Run, model: nn.Module, x: Tensor, layer: str) -> object:
    """What samples added to some outputs of a layer."""
    return run.spotlight(model, x)[layer].samples()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=60000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    cases = {
        "784-128-64-10": (lambda: digits(options.samples), 64, "0"),
        "transformer": (lambda: words(2000), 16, "blocks.0.k"),
    }
    for name, (make, batch, layer) in cases.items():
        for keep in ("rows", "half", "summaries"):
            folder = Path(tempfile.mkdtemp())
            given: dict[str, Any] = {"epochs": options.epochs, "batch": batch, "keep": keep}
            try:
                with patch.object(SharedKeys, "leave_out", lambda *_: {}):
                    apart = record(folder / "apart", make, **given)
                once = record(folder / "once", make, **given)
                runs = [dualform.open(folder / which) for which in ("once", "apart")]
                sizes = [run.nbytes / 1e6 for run in runs]
                print(
                    f"{name}, {keep}: {sizes[0]:,.1f} MB, {sizes[1]:,.1f} with all keys, ", end=""
                )
                print(f"recorded in {once:.1f} s, {apart:.1f} with all keys, ", end="", flush=True)
                model, x, _ = make()
                model.load_state_dict(runs[0].state_dict(), strict=False)
                one, other = (partial(spotlight, run, model, x[:4], layer) for run in runs)
                print(f"spotlight × {compare(one, other, options.turns, time.process_time)}")
            finally:
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
