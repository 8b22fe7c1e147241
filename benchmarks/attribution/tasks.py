"""The tasks: what is trained, how, and which number about each query is to be explained.

For digits it is the margin, the true class's logit minus the log-sum-exp of the others; for text
the mean loss over a window. Every method explains that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import dualform
from benchmarks.attribution import data, models
from dualform.recording.keep import AUTO, Keep

Shown = Callable[[int, nn.Module], None]
"""What is called after every epoch."""


@dataclass(frozen=True)
class Task:
    """One training: data, model, optimizer, and the measured output.

    `output(out, y)` has one number a query; training minimizes the mean of `loss`.
    """

    name: str
    load: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    output: Callable[[Tensor, Tensor], Tensor]
    epochs: int
    batch: int = 64
    asked: int = data.QUERIES

    def samples(self) -> tuple[Tensor, Tensor]:
        """What the model is trained on; a sample's id is its place."""
        return self.load()[:2]

    def queries(self) -> tuple[Tensor, Tensor]:
        """What is asked about."""
        x, y = self.load()[2:]
        return x[: self.asked], y[: self.asked]

    def start(self, seed: int) -> nn.Module:
        """The model before training."""
        torch.manual_seed(seed)
        return self.build()

    def train(
        self,
        ids: Iterable[int],
        seed: int,
        path: Path | None = None,
        order_seed: int | None = None,
        show: Shown | None = None,
        keep: Keep = AUTO,
    ) -> nn.Module:
        """Trains on these samples; recorded at `path`, shown to `show` after every epoch.

        `seed` is that of the initial weights, and of the order unless that has its own.
        """
        model = self.start(seed)
        optimizer = self.optimizer(model.parameters())
        order = torch.Generator().manual_seed(seed if order_seed is None else order_seed)
        kept = torch.as_tensor(list(ids))
        recording = dualform.record(model, optimizer, path, keep=keep) if path else nullcontext()
        with recording as recorder:
            for epoch in range(1, self.epochs + 1):
                for batch in self._batches(kept, order):
                    if recorder is not None:
                        recorder.samples(batch.tolist())
                    self._step(model, optimizer, batch)
                if show is not None:
                    show(epoch, model)
        return model.eval()

    def measure(self, model: nn.Module) -> NDArray[np.float64]:
        """(queries,): the output of each query."""
        x, y = self.queries()
        with torch.no_grad():
            return self.output(model.eval()(x), y).double().numpy()

    def _batches(self, ids: Tensor, order: torch.Generator) -> Iterator[Tensor]:
        return iter(ids[torch.randperm(len(ids), generator=order)].split(self.batch))

    def _step(self, model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
        x, y = self.samples()
        optimizer.zero_grad()
        loss(model(x[batch]), y[batch]).mean().backward()
        optimizer.step()


def loss(out: Tensor, y: Tensor) -> Tensor:
    """(n,): the cross-entropy of each sample, its mean over words where a sample has many."""
    words = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="none")
    return words.reshape(len(y), -1).mean(1)


def margin(out: Tensor, y: Tensor) -> Tensor:
    """log p/(1 − p) of the true class: its logit minus the log-sum-exp of the others."""
    true = torch.arange(out.shape[-1], device=y.device) == y[..., None]
    return (out * true).sum(-1) - out.masked_fill(true, -torch.inf).logsumexp(-1)


def _momentum(parameters: Iterable[nn.Parameter], rate: float = 0.01) -> Optimizer:
    return SGD(parameters, lr=rate, momentum=0.9)


def _adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-3)


TASKS = {
    task.name: task
    for task in (
        Task("mlp", data.digits, models.mlp, _momentum, margin, epochs=15),
        Task("mlp-adamw", data.digits, models.mlp, _adamw, margin, epochs=15),
        Task("cnn", data.digits, models.cnn, partial(_momentum, rate=0.005), margin, epochs=8),
        Task("cnn-adamw", data.digits, models.cnn, _adamw, margin, epochs=8),
        Task("text", data.verses, models.Transformer, _adamw, loss, epochs=15, batch=32),
    )
}
