"""What scores lose by summaries: `DUALFORM_DATA=DIR python -m benchmarks.summaries`.

A small network is trained on MNIST (DIR/mnist) under each policy. Printed are the mean rank
correlation of its scores with those of all rows, and the bytes of the run.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform
from benchmarks.attribution.data import idx
from dualform.recording.keep import Keep

SAMPLES, QUERIES, EPOCHS, BATCH = 5000, 40, 10, 64
POLICIES: dict[str, Keep] = {
    "rows": "rows",
    "int8": "int8",
    "summaries": "summaries",
    "32 × 256": dualform.summaries(32, 256, offsets="sums"),
    "16 × 128": dualform.summaries(16, 128, offsets="sums"),
    "8 × 64": dualform.summaries(8, 64, offsets="sums"),
    "8 × 64, offsets by step": dualform.summaries(8, 64, offsets="steps"),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def digits() -> tuple[Tensor, Tensor]:
    """Images and labels, of samples and then of queries."""
    chosen = [*range(SAMPLES), *range(2 * SAMPLES, 2 * SAMPLES + QUERIES)]
    images = idx("mnist/train-images-idx3-ubyte.gz", 16).reshape(-1, 784)[chosen]
    return images.float() / 255, idx("mnist/train-labels-idx1-ubyte.gz", 8)[chosen].long()


def train(optimizer: str, keep: Keep, path: Path, x: Tensor, y: Tensor) -> nn.Module:
    """A training under a policy; the same each time."""
    torch.manual_seed(0)
    sizes = ((784, 128), (128, 64), (64, 10))
    layers = [part for size in sizes for part in (nn.Linear(*size), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    stepper, order = OPTIMIZERS[optimizer](model.parameters()), torch.Generator().manual_seed(0)
    with dualform.record(model, stepper, path, keep=keep, strict=True) as recorder:
        for _ in range(EPOCHS):
            for ids in torch.randperm(SAMPLES, generator=order).split(BATCH)[:-1]:
                recorder.samples(ids)
                nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
                stepper.step()
                stepper.zero_grad()
    return model.eval()


def main() -> None:
    """Prints a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    given = parser.parse_args()
    x, y = digits()
    exact: list[np.ndarray] = []
    for name, keep in POLICIES.items():
        path = Path(tempfile.mkdtemp()) / "run"
        model = train(given.optimizer, keep, path, x, y)
        run, queries = dualform.open(path), (x[SAMPLES:], y[SAMPLES:])
        scores = [read(model, *queries).values for read in (run.influence, run.explain)]
        exact = exact or scores
        pairs = zip(exact, scores, strict=True)
        means = [
            np.mean([spearmanr(a, b).statistic for a, b in zip(one.T, other.T, strict=True)])
            for one, other in pairs
        ]
        print(
            f"{name}: influence {means[0]:.3f}, explain {means[1]:.3f}, {run.nbytes / 1e6:.0f} MB"
        )
        shutil.rmtree(path.parent)


if __name__ == "__main__":
    main()
