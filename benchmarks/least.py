"""The least a recorder can pay: `python -m benchmarks.least [--device cuda | --compiled]`.

It hangs hooks on the layers of an MLP, copies their inputs and errors, probes the gradients, and
writes nothing. Each line adds one of these. On a CPU times are the training thread's own, on a GPU
the clock's. With --compiled, what hooks do is in C++ (needs ninja and a compiler).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.recording import MODELS, make_step

BATCH, SLOTS, STEPS, TURNS = 64, 376, 300, 30
KINDS = ("nothing", "hooks", "and copies", "and probes", "and names of samples, and options")


class Interpreted:
    """Hooks in Python."""

    def hang(self, layer: nn.Linear, copies: bool) -> None:
        """Acts when the errors of a call come in."""
        act = Slots(layer).copy if copies else leave

        def see(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if out.grad_fn is not None:
                out.grad_fn.register_prehook(partial(act, args[0]))

        layer.register_forward_hook(see)

    def probe(self, model: nn.Module) -> Callable[[], None]:
        """A product with each matrix's gradient, and all offsets' in one piece."""
        matrices = [p for p in model.parameters() if p.ndim == 2]
        offsets = [p for p in model.parameters() if p.ndim == 1]
        vectors = [torch.randn(p.shape[1], 1, device=p.device) for p in matrices]
        taken: deque[Any] = deque(maxlen=SLOTS)

        def take() -> None:
            products = [p.grad @ v for p, v in zip(matrices, vectors, strict=True)]
            taken.append((products, torch.cat([p.grad for p in offsets])))

        return take


class Slots:
    """Copies a layer's inputs and errors into memory that is used again."""

    def __init__(self, layer: nn.Linear) -> None:
        new = partial(torch.empty, device=layer.weight.device)
        self._keys = list(new(SLOTS, BATCH, layer.in_features))
        self._values = list(new(SLOTS, BATCH, layer.out_features))
        self._next = 0

    def copy(self, x: Tensor, errors: tuple[Tensor, ...]) -> None:
        at, self._next = self._next, (self._next + 1) % SLOTS
        self._keys[at].copy_(x)
        self._values[at].copy_(errors[0])


def leave(x: Tensor, errors: tuple[Tensor, ...]) -> None:
    """What a hook does that does nothing."""


class Compiled:
    """The same in C++: the interpreter sees the forward pass and the step, nothing in between."""

    def __init__(self) -> None:
        from torch.utils.cpp_extension import load

        source = str(Path(__file__).with_suffix(".cpp"))
        self._made = load("dualform_least", [source], extra_cflags=["-Ofast", "-march=native"])

    def hang(self, layer: nn.Linear, copies: bool) -> None:
        """Acts when the errors of a call come in."""
        slots, see = self._made.Slots() if copies else None, self._made.see

        def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            see(slots, args[0], out)

        layer.register_forward_hook(hook)

    def probe(self, model: nn.Module) -> Callable[[], None]:
        """Row sums of each matrix's gradient, and all offsets'."""
        probes, parameters = self._made.Probes(), list(model.parameters())
        return lambda: probes.take(parameters)


def recorder(
    hooks: Interpreted | Compiled, widths: tuple[int, ...], device: str, what: str
) -> Callable[[], None]:
    """A training step with some of what recording takes."""
    step, model, optimizer = make_step(widths, BATCH, device)
    level = KINDS.index(what)
    if level >= 1:
        for layer in [layer for layer in model if isinstance(layer, nn.Linear)]:
            hooks.hang(layer, copies=level >= 2)
    if level >= 3:
        take = hooks.probe(model)
        optimizer.register_step_pre_hook(lambda *_: take())
    return naming(step, optimizer) if level >= 4 else step


def naming(step: Callable[[], None], optimizer: Optimizer) -> Callable[[], None]:
    """Copies the ids before each step, and reads the optimizer's options after it."""
    ids = torch.arange(BATCH)
    names: deque[Tensor] = deque(maxlen=SLOTS)
    options: deque[Any] = deque(maxlen=SLOTS)

    def read(*_: Any) -> None:
        options.append([(g["lr"], g["momentum"], g["dampening"]) for g in optimizer.param_groups])

    def named() -> None:
        names.append(ids.clone())
        step()

    optimizer.register_step_post_hook(read)
    return named


def seconds(step: Callable[[], None], device: str) -> float:
    clock = time.thread_time if device == "cpu" else time.perf_counter
    start = clock()
    for _ in range(STEPS):
        step()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--model", default="64-128-10", choices=list(MODELS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    hooks = Compiled() if given.compiled else Interpreted()
    steps = {kind: recorder(hooks, MODELS[given.model], given.device, kind) for kind in KINDS}
    turns = [{k: seconds(step, given.device) for k, step in steps.items()} for _ in range(TURNS)]
    for kind in KINDS:
        ratio = statistics.median(turn[kind] / turn["nothing"] for turn in turns[1:])
        took = statistics.median(turn[kind] for turn in turns[1:]) / STEPS
        print(f"{kind}: step × {ratio:.2f}, {took * 1e6:.0f} µs", flush=True)


if __name__ == "__main__":
    main()
