"""The least a recorder in Python can pay: `python -m benchmarks.least`.

It hangs hooks on two layers, copies their inputs and errors, probes the gradients, and writes
nothing. Each line adds one of these; times are the training thread's own.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.recording import MODELS, make_step

BATCH, SLOTS, STEPS, TURNS = 64, 376, 300, 40


class Slots:
    """Copies a layer's inputs and errors into memory that is used again."""

    def __init__(self, layer: nn.Linear) -> None:
        self._keys = list(torch.empty(SLOTS, BATCH, layer.in_features))
        self._values = list(torch.empty(SLOTS, BATCH, layer.out_features))
        self._next = 0

    def copy(self, x: Tensor, errors: tuple[Tensor, ...]) -> None:
        at, self._next = self._next, (self._next + 1) % SLOTS
        self._keys[at].copy_(x)
        self._values[at].copy_(errors[0])


def leave(x: Tensor, errors: tuple[Tensor, ...]) -> None:
    """What a hook does that does nothing."""


def hang(layer: nn.Linear, action: Callable[[Tensor, tuple[Tensor, ...]], None]) -> None:
    """An action for when the errors of a call come in."""

    def see(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(partial(action, args[0]))

    layer.register_forward_hook(see)


def probe(model: nn.Module, optimizer: Optimizer) -> None:
    """A product with each matrix's gradient, and all offsets' in one piece, before each step."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    offsets = [p for p in model.parameters() if p.ndim == 1]
    vectors = [torch.randn(p.shape[1], 1) for p in matrices]
    taken: deque[Any] = deque(maxlen=SLOTS)

    def before(*args: Any) -> None:
        products = [p.grad @ v for p, v in zip(matrices, vectors, strict=True)]
        taken.append((products, torch.cat([p.grad for p in offsets])))

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *args: None)


def recorder(what: str) -> Callable[[], None]:
    """A training step with some of what recording takes."""
    step, model, optimizer = make_step(MODELS["64-128-10"], BATCH, "cpu")
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    if what != "nothing":
        for layer in layers:
            hang(layer, leave if what == "hooks" else Slots(layer).copy)
    if what == "hooks, copies and probes":
        probe(model, optimizer)
    return step


def seconds(step: Callable[[], None]) -> float:
    start = time.thread_time()
    for _ in range(STEPS):
        step()
    return time.thread_time() - start


def main() -> None:
    torch.set_num_threads(1)
    kinds = ["nothing", "hooks", "hooks and copies", "hooks, copies and probes"]
    steps = {kind: recorder(kind) for kind in kinds}
    turns = [{kind: seconds(step) for kind, step in steps.items()} for _ in range(TURNS)][1:]
    for kind in kinds:
        ratio = statistics.median(turn[kind] / turn["nothing"] for turn in turns)
        took = statistics.median(turn[kind] for turn in turns) / STEPS
        print(f"{kind}: step × {ratio:.2f}, {took * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
