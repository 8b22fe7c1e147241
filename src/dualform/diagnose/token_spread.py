"""How different the tokens of a sample are: their distance, stable rank and cosines.

The stable rank needs the largest singular value. Lanczos' iteration finds it from a few products
with the tokens: `θ = vᵀXᵀXv` rises to `σ₁²`, and `‖XᵀXv − θv‖` says how near an eigenvalue is. As
the first vector is random, that eigenvalue is the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import reduce

import torch
from torch import Tensor

from dualform.errors import AttentionError

TOLERANCE, OF_FLOAT64 = 1e-3, 1e-9
"""`σ₁²` is known to this share of it; the second is of tokens in float64."""
ROUNDS = (4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256)
"""After so many products it is looked whether that is reached."""
PAIRED = 128
"""So many tokens of a sample are compared in pairs."""
HELD = {"cpu": 1 << 20, "cuda": 1 << 26}
"""About so many numbers of tokens wait to be measured together: what caches of a processor hold, or
what keeps a GPU busy."""


@dataclass(frozen=True)
class Spread:
    """How different the tokens of a sample are; means over the samples.

    >>> found = spread(torch.eye(4)[None])
    >>> round(found.distance, 4), round(found.relative, 4), found.stable_rank, found.cosine
    (1.7321, 0.866, 4.0, 0.0)
    """

    distance: float
    """`μ(X) = ‖X − 11ᵀX/N‖`, Frobenius."""
    relative: float
    """`μ(X) / ‖X‖`: 0 where all tokens are one."""
    stable_rank: float
    """`‖X‖² / σ₁²`, within a thousandth: 1 where all tokens lie on one line through the origin."""
    cosine: float
    """The mean |cos| of two tokens."""

    @property
    def is_finite(self) -> bool:
        """Whether all tokens were finite numbers.

        >>> spread(torch.full((1, 2, 3), torch.inf)).is_finite
        False
        """
        return all(map(math.isfinite, astuple(self)))


def spread(tokens: Tensor) -> Spread:
    """How different the tokens (batch, tokens, width) of each sample are, on average.

    >>> spread(torch.ones(2, 5, 3)).relative
    0.0
    """
    reader = SpreadReader()
    reader.add(tokens)
    return reader.result()[0]


class SpreadReader:
    """Measures tokens of one block after another, those of several blocks together.

    On a GPU launches take longer than measures, so that there should be few of them. Tokens are
    copied, since a model may change them in place.

    >>> reader = SpreadReader(samples=2)
    >>> for _ in range(3):
    ...     reader.add(torch.ones(5, 4, 8))
    >>> reader.measured, reader.given, len(reader.result())
    (2, 5, 3)
    """

    def __init__(self, samples: int | None = None) -> None:
        """Measures so many samples of a batch, evenly spaced, or all."""
        if samples is not None and samples < 1:
            raise AttentionError(f"samples={samples}: give 1 or more, or None for all of a batch.")
        self._samples = samples
        self._waiting: list[Tensor] = []
        self._numbers: list[Tensor] = []
        self.measured, self.given = 0, 0
        """How many samples of the last block are measured, and how many it has."""

    @torch.no_grad()
    def add(self, tokens: Tensor) -> None:
        """Takes (batch, tokens, width) of a block."""
        self.given = len(tokens)
        self.measured = min(self.given, self._samples or self.given)
        some = tokens[:: max(1, self.given // max(1, self.measured))][: self.measured]
        some = some.to(tokens.dtype if tokens.dtype == torch.float64 else torch.float32, copy=True)
        place = (some.shape, some.dtype, some.device)
        held = sum(x.numel() for x in self._waiting) + some.numel()
        if any((x.shape, x.dtype, x.device) != place for x in self._waiting[-1:]) or held > _most(
            some
        ):
            self._measure()
        self._waiting.append(some)

    def result(self) -> list[Spread]:
        """That of each block, in the order in which they came."""
        self._measure()
        return [Spread(*row) for numbers in self._numbers for row in numbers.tolist()]

    @torch.no_grad()
    def _measure(self) -> None:
        if self._waiting:
            shape = (len(self._waiting), self._waiting[0].shape[0])
            with torch.autocast(self._waiting[0].device.type, enabled=False):  # a caller's
                found = _measures(torch.cat(self._waiting))
            self._numbers.append(found.view(*shape, -1).mean(1).cpu())
            self._waiting = []


def _most(x: Tensor) -> int:
    return HELD.get(x.device.type, HELD["cuda"])


def _measures(x: Tensor) -> Tensor:
    """(samples, 4): the numbers of a `Spread`, for x (samples, tokens, width)."""
    mean = x.mean(1, keepdim=True)
    distance = (x - mean).flatten(1).norm(dim=1)
    total = torch.hypot(distance, mean.flatten(1).norm(dim=1) * math.sqrt(x.shape[1]))
    total = total.clamp_min(1e-30)
    few = x[:, :: -(-x.shape[1] // PAIRED)]
    gram = few @ few.mT
    factors = (gram,) if few.shape[1] == x.shape[1] else (x.mT, x)
    rank = total.square() / _largest_eigenvalue(factors, total).clamp_min(1e-30)
    return torch.stack([distance, distance / total, rank, _mean_cosine(gram)], 1)


def _largest_eigenvalue(factors: Sequence[Tensor], total: Tensor) -> Tensor:
    """(samples,) of positive matrices that are products of these factors, (samples, …, …) each.

    Vectors are not made orthogonal again: that keeps copies of an eigenvalue away, and not the
    largest one. They are rows, as torch multiplies a batch of columns slowly on a CPU.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, factors[0].shape[1], generator=generator, dtype=torch.float64)
    v = (start / start.norm()).to(total).expand(len(total), 1, -1)
    before, beta = torch.zeros_like(v), v.new_zeros(len(v), 1, 1)
    found: list[Tensor] = []
    largest = torch.zeros(len(total), dtype=torch.float64)
    searched = total.isfinite().cpu()
    tolerance = OF_FLOAT64 if total.dtype == torch.float64 else TOLERANCE
    for rounds in ROUNDS:
        while len(found) < 2 * rounds:
            w = reduce(torch.bmm, factors, v)
            alpha = torch.bmm(w, v.mT)
            w = torch.addcmul(w, alpha, v, value=-1).addcmul_(beta, before, value=-1)
            beta = w.norm(dim=2, keepdim=True)
            found += [alpha, beta]
            before, v = v, w / beta.clamp_min(1e-30)
        both = torch.cat(found, 2)[:, 0].cpu().double()[searched]
        largest[searched], left = _top(both[:, ::2], both[:, 1::2])
        searched[searched.clone()] = left > tolerance * largest[searched]
        if not bool(searched.any()):
            break
    return largest.to(total)


def _top(diagonal: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """(samples,): θ of a tridiagonal matrix, and `‖XᵀXv − θv‖`."""
    T = torch.diag_embed(diagonal) + torch.diag_embed(beside[:, :-1], -1)
    values, vectors = torch.linalg.eigh(T.nan_to_num(0.0, 0.0, 0.0))  # reads the lower triangle
    return values[:, -1], beside[:, -1] * vectors[:, -1, -1].abs()


def _mean_cosine(gram: Tensor) -> Tensor:
    """(samples,): the mean |cos| over pairs of tokens, from all their products."""
    count = gram.shape[1]
    if count < 2:
        return gram.new_ones(len(gram))
    diagonal = gram.diagonal(dim1=1, dim2=2)
    inverse = diagonal.clamp_min(1e-24).rsqrt()[:, None]
    sums = inverse @ gram.abs() @ inverse.mT - inverse.square() @ diagonal[..., None]
    apart: Tensor = sums[:, 0, 0]
    return apart / (count * (count - 1))
