"""Which quantity of a recorded run finds wrong labels? MNIST, 10 % flipped, 784-128-64-10.

`DUALFORM_DATA=… python -m benchmarks.labels`: the AUC of each candidate; all come from the same
rows. Several minutes and 3 GB of temporary disk with `--samples 60000 --epochs 5`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from benchmarks.attribution.data import idx
from dualform.evaluate import mislabeled
from dualform.read import Run
from dualform.read.engine import ShardRange
from dualform.read.scan import chunks
from dualform.read.scores import Array

BATCH, SHARE = 64, 0.1


def load(samples: int) -> tuple[Tensor, Tensor]:
    """The first training digits."""
    x = idx("mnist/train-images-idx3-ubyte.gz", 16).reshape(-1, 784)[:samples]
    y = idx("mnist/train-labels-idx1-ubyte.gz", 8)[:samples]
    return x.float() / 255, y.long()


def flip(y: Tensor, seed: int) -> tuple[Tensor, np.ndarray]:
    """A share of the labels moved to another class, and which."""
    chance, labels = np.random.default_rng(seed), y.numpy().copy()
    wrong = chance.choice(len(y), int(SHARE * len(y)), replace=False)
    labels[wrong] = (labels[wrong] + chance.integers(1, 10, len(wrong))) % 10
    return torch.from_numpy(labels), np.isin(np.arange(len(y)), wrong)


def train(x: Tensor, y: Tensor, optimizer: str, epochs: int, seed: int, path: Path) -> Run:
    """One recorded run."""
    torch.manual_seed(seed)
    widths = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = nn.Sequential(*widths)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rule = sgd if optimizer == "sgd" else torch.optim.AdamW(model.parameters(), lr=1e-3)
    with dualform.record(model, rule, path) as recorder:
        for _ in range(epochs):
            for ids in torch.randperm(len(y)).split(BATCH):
                recorder.samples(ids)
                F.cross_entropy(model(x[ids]), y[ids]).backward()
                rule.step()
                rule.zero_grad()
    return dualform.open(path)


def rows(run: Run, layer: str) -> tuple[Array, Array, Array, Array]:
    """Errors, the sizes of inputs, samples and steps of a layer's rows."""
    source = run.revisit(run.ids[:1])[layer].source
    stream = next(s for s in run.info.streams if s.name == layer)
    found = [
        (c.values.double(), c.keys.double().square().sum(1) + 1, c.samples, c.steps)
        for shard in ShardRange.of(source.ledger, 1, source.until)
        for c in chunks(shard, stream)
    ]
    errors, keys, samples, steps = (torch.cat(p).numpy() for p in zip(*found, strict=True))
    return errors, keys, samples, steps


def candidates(run: Run, y: Tensor) -> dict[str, Array]:
    """Suspicions by name."""
    errors, _, samples, steps = rows(run, run.layers[-1])
    p = errors * np.bincount(steps)[steps][:, None]  # softmax − label, as the loss is a mean
    at = (np.arange(len(p)), y.numpy()[samples])
    own = np.clip(1 + p[at], 1e-12, 1)
    p[at] = -1
    margin = np.log(own) - np.log(np.clip(p.max(1), 1e-12, 1))
    visits = np.bincount(samples)
    last = np.zeros(len(y))
    last[samples] = np.linalg.norm(errors, axis=1) * np.bincount(steps)[steps]
    found = {f"mean ‖e‖, layer {name}": run.suspicion(name).values[:, 0] for name in run.layers}
    found["mean margin (AUM)"] = -np.bincount(samples, margin) / visits
    found["mean loss"] = -np.bincount(samples, np.log(own)) / visits
    found["‖e‖ of the last visit"] = last
    squares = np.zeros(len(y))
    for layer in run.layers:
        errors, keys, samples, _ = rows(run, layer)
        squares += np.bincount(samples, (errors**2).sum(1) * keys)
    return found | {"Σ ‖gradient‖², all layers": squares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    x, y = load(options.samples)
    given, flipped = flip(y, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        run = train(x, given, options.optimizer, options.epochs, options.seed, path)
        for name, values in candidates(run, given).items():
            print(f"{name:32} {mislabeled(values, flipped).auc:.4f}")


if __name__ == "__main__":
    main()
