"""What solving its regression gains a layer: `python -m benchmarks.ridge`.

Each task is a smooth random function of two variables, known at 64 noisy points; a layer reads it
at 64 others, keys being points and values what was seen there. Scale and penalty are chosen on 50
tasks, the error is that of 200 others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dualform import attention

SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
Tasks = tuple[Tensor, Tensor, Tensor, Tensor]


def tasks(count: int, noise: float, generator: torch.Generator) -> Tasks:
    """Queries, keys, what was seen at the keys, and the truth at the queries."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    frequencies, phases, sizes = (
        2 * normal(count, 2, 8),
        6 * normal(count, 1, 8),
        normal(count, 8, 1),
    )
    points = torch.rand(2, count, 64, 2, generator=generator, dtype=torch.float64) * 2 - 1
    at_q, at_k = (torch.cos(x @ frequencies + phases) @ sizes / 2 for x in points)
    q, k = (on_sphere(x) for x in points)
    return q, k, at_k + noise * normal(count, 64, 1), at_q


def on_sphere(x: Tensor) -> Tensor:
    """Points of radius 2, so that q·k falls with their distance."""
    return torch.cat([x, (4 - x.square().sum(-1, keepdim=True)).sqrt()], -1)


def error(layer: Layer, given: Tasks) -> float:
    """Root mean square error at the queries."""
    q, k, seen, truth = given
    return float((layer(q, k, seen) - truth).square().mean().sqrt())


def layers() -> dict[str, list[Layer]]:
    """Every layer with all its settings."""
    pairs = itertools.product(SCALES, PENALTIES)
    return {
        "softmax": [partial(attention.softmax, scale=s) for s in SCALES],
        "linear": [partial(attention.linear, scale=s) for s in SCALES],
        "batch_norm": [partial(attention.batch_norm, scale=s) for s in SCALES],
        "ridge": [partial(attention.ridge, scale=s, penalty=p) for s, p in pairs],
    }


def main() -> None:
    """Errors at three sizes of noise."""
    print("| noise | " + " | ".join(layers()) + " |\n" + "|---" * 5 + "|")
    for noise in (0.02, 0.1, 0.3):
        generator = torch.Generator().manual_seed(0)
        validation, test = (tasks(n, noise, generator) for n in (50, 200))
        chosen = [min(all_, key=partial(error, given=validation)) for all_ in layers().values()]
        errors = (f"{error(layer, test):.3f}" for layer in chosen)
        print(f"| {noise} | " + " | ".join(errors) + " |")


if __name__ == "__main__":
    main()
