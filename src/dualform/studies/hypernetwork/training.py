"""A network is trained on a task; on a GPU by what one step does, captured and replayed.

Networks are so small that a GPU waits for launches. A CUDA graph launches all of a step's forward
and backward pass at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dualform.studies.hypernetwork.problems import Problems, Task, training_batches
from dualform.studies.hypernetwork.setting import TrainingSetting

CLIP = 1.0
"""The largest norm of a gradient."""
WARM_UP = 0.1
"""The share of steps in which the learning rate rises; it falls to nothing in the others."""
BEFORE_CAPTURE = 3
"""So many passes are made before one is captured: in the first ones libraries choose kernels."""


def train(
    model: nn.Module, task: Task, training: TrainingSetting[Any], seed: int, device: str
) -> float:
    """Trains in place, by AdamW with a rate that rises and falls; the mean loss of the last tenth.

    >>> from dualform.studies.hypernetwork.network import RuleReader
    >>> from dualform.studies.hypernetwork.raven import Raven
    >>> training = TrainingSetting(Raven(features=1), 8, 2, 1, steps=20, batch=8)
    >>> model = RuleReader(training.task.shape, "HYLA", 8, 2, 1)
    >>> train(model, training.task, training, 0, "cpu") < 2.5
    True
    """
    on_gpu = torch.device(device).type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.rate, weight_decay=training.decay, fused=on_gpu or None
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, training.rate, total_steps=training.steps, pct_start=WARM_UP
    )
    last = torch.zeros((), device=device)
    counted = max(1, training.steps // 10)
    replayed: ReplayedGradients | None = None
    model.train()
    batches = training_batches(task, seed, training.batch, training.steps, device)
    for step, given in enumerate(batches):
        if on_gpu:
            replayed = replayed or ReplayedGradients(model, task, given)
            loss = replayed.set(given)
        else:
            loss = set_gradients(model, task, given)
        optimizer.step()
        schedule.step()
        if step >= training.steps - counted:
            last += loss / counted
    return float(last)


def set_gradients(model: nn.Module, task: Task, given: Problems) -> Tensor:
    """Gives all parameters the gradient of the loss on some problems, clipped; and the loss."""
    model.zero_grad()
    loss = task.loss(model(given.x), given.y)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return loss.detach()


class ReplayedGradients:
    """What `set_gradients` does on batches of one size, as a CUDA graph."""

    def __init__(self, model: nn.Module, task: Task, given: Problems) -> None:
        self._x, self._y = given.x.clone(), given.y.clone()
        static = Problems(self._x, self._y, given.rules)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(BEFORE_CAPTURE):
                set_gradients(model, task, static)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):  # gradients get places of their own, which stay
            self._loss = set_gradients(model, task, static)

    def set(self, given: Problems) -> Tensor:
        """The loss on these problems; the next call overwrites it."""
        self._x.copy_(given.x)
        self._y.copy_(given.y)
        self._graph.replay()
        return self._loss
