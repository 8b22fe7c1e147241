"""Every kind with its plain reference, on numbers from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dualform import attention
from dualform.attention import reference
from dualform.memory import EluPlusOne, Relu

WINDOW = 2
SPARSE = {"alpha": 2.0, "scale": 0.7}
FACTORS = (1, 2, 3, 5)


@dataclass(frozen=True)
class Case:
    """A layer, its options, and one head of it by its definition, given which keys are seen."""

    name: str
    plain: Callable[[Tensor, Tensor, Tensor, Tensor, bool, int], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    masks: bool = True

    @property
    def digits(self) -> float:
        """How near to the definition; statistics lose some where a coordinate hardly varies."""
        return 1e-8 if "batch_norm" in self.name else 1e-12

    @property
    def layer(self) -> Callable[..., Tensor]:
        return attention.kind(self.name, **self.options)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])

    def reference(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor, causal: bool) -> Tensor:
        """(…, heads, L, M) by loops."""
        lead = q.shape[:-2]
        flat = (
            x.reshape(-1, *x.shape[-2:]) for x in (q, k, v, sees.expand(*lead, *sees.shape[-2:]))
        )
        heads = zip(*flat, strict=True)
        rows = [self.plain(*given, causal, n % q.shape[-3]) for n, given in enumerate(heads)]
        return torch.stack(rows).reshape(*lead, q.shape[-2], v.shape[-1])


def _by(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, sees, causal, head: inner(q, k, v, sees)


def _windowed(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, causal: bool, head: int) -> Tensor:
    i, j = torch.arange(len(q))[:, None], torch.arange(len(k))
    return reference.softmax(q, k, v, sees & ((i - j).abs() <= WINDOW))


def _shortened(inner: Callable[..., Tensor], lead: int) -> Callable[..., Tensor]:
    def read(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, causal: bool, head: int) -> Tensor:
        return reference.shortened(q, k, v, FACTORS[head], lead, causal, inner)

    return read


def _linear(features: Any, normalized: bool = True) -> Callable[..., Tensor]:
    plain = partial(reference.linear, features=features.features, normalized=normalized)
    return _by(plain)


CASES = [
    Case("softmax", _by(reference.softmax)),
    Case("softmax", _by(partial(reference.softmax, scale=0.3)), {"scale": 0.3}),
    Case("linear", _linear(EluPlusOne())),
    Case("linear", _linear(Relu()), {"features": Relu()}),
    Case("linear", _linear(Relu(), False), {"features": Relu(), "normalized": False}),
    Case("local", _windowed, {"window": WINDOW}),
    Case("batch_norm", _by(reference.batch_norm)),
    Case(
        "batch_norm",
        _by(partial(reference.batch_norm, beta=0.5, eps=0.1, scale=0.7)),
        {"beta": 0.5, "eps": 0.1, "scale": 0.7},
    ),
    Case(
        "batch_norm",
        _by(partial(reference.batch_norm, beta=0.5, variance=False)),
        {"beta": 0.5, "variance": False},
    ),
    Case("entmax", _by(partial(reference.entmax, alpha=1.3)), {"alpha": 1.3}),
    Case("entmax", _by(partial(reference.entmax, alpha=2.0, scale=0.7)), SPARSE),
    Case("scaled_heads", _shortened(reference.softmax, 0), {"factors": FACTORS}, masks=False),
    Case(
        "scaled_heads",
        _shortened(reference.softmax, 1),
        {"factors": FACTORS, "lead": 1},
        masks=False,
    ),
    Case(
        "batch_norm_scaled_heads",
        _shortened(partial(reference.batch_norm, eps=0.1), 0),
        {"factors": FACTORS, "eps": 0.1},
        masks=False,
    ),
]
"""Every kind but ridge, which has no causal form and tests of its own."""


def draw(
    seed: int, L: int, S: int, batch: tuple[int, ...] = (2, 4), D: int = 3, M: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in float64; the keys' mean is not 0."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (L, D), (S, D), (S, M)
    q, k, v = (torch.randn(*batch, *s, generator=generator).double() for s in shapes)
    return q, k + 1, v


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
