"""Σ_j h_j δ(x − x_j): points. The family is softmax attention over them."""

import math

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.checks import holds, require_finite, visible
from dualform.families.measures.measure import Measure
from dualform.families.measures.points import (
    require_offset,
    require_queries,
    require_support,
    require_values,
)
from dualform.families.tilting import log_average
from dualform.memory import Exponential, Kernel, Memory
from dualform.memory.fused import fused_attention
from dualform.private import in_function_transform, version_of


class Empirical(Memory, Measure):
    """h = Σ_j h_j δ(x − x_j), so p_j ∝ h_j exp(η·x_j + b_j): softmax attention is ∇G.

    Points of shape (…, n, d) are a batch of measures. `weights` h_j (…, n) count 1 each unless
    given; `bias` b_j and `mask` may differ from query to query: they broadcast with the scores
    (…, q, n), and a point takes part where `mask` is True. A query without points reads 0.

    It is a `Memory` whose keys and values are the points.

    >>> points = torch.tensor([[0.0], [1.0], [3.0]])
    >>> empirical = Empirical(points)
    >>> empirical.scores(torch.zeros(1, 1))
    tensor([[0.3333, 0.3333, 0.3333]])
    >>> empirical.read(torch.tensor([[0.0], [50.0]]))
    tensor([[1.3333],
            [3.0000]])
    """

    points: Tensor
    mass: Tensor | None
    bias: Tensor | None
    mask: Tensor | None

    __setattr__ = Measure.__setattr__  # a memory is frozen, a module is not
    __delattr__ = Measure.__delattr__

    def __init__(
        self,
        points: Float[Tensor, "*batch n d"],
        weights: Float[Tensor, "*batch n"] | None = None,
        *,
        bias: Float[Tensor, "..."] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
    ) -> None:
        Measure.__init__(self)
        for name, value in (("points", points), ("mass", weights), ("bias", bias)):
            self.hold(name, value)
        self.hold("mask", mask)
        self.__post_init__()  # rows that pair up
        require_support(points)
        require_offset(points, weights, bias, mask)
        self._limit = (self._seen(), _limit(points))

    @property
    def keys(self) -> Tensor:
        """The points."""
        return self.points

    @property
    def values(self) -> Tensor:
        """The points."""
        return self.points

    @property
    def kernel(self) -> Kernel:
        """exp(η·x)."""
        return Exponential(scale=1.0)

    @property
    def offset(self) -> Tensor | None:
        """log h_j + b_j, −∞ where masked; None where there is nothing to add."""
        return _offset(self.points, self.mass, self.bias, self.mask)

    @property
    def limit(self) -> float:
        """The largest ‖η‖ under which no score can leave its type; negative where unseen."""
        if self._limit[0] != self._seen():  # points are learned, moved and loaded
            self._limit = (self._seen(), _limit(self.points))
        return self._limit[1]

    def _seen(self) -> tuple[int, int]:
        return id(self.points), version_of(self.points)

    def __repr__(self) -> str:
        return f"Empirical(points={tuple(self.keys.shape)})"

    def __add__(self, other: Memory) -> "Empirical":
        """The measure of both sets of points.

        >>> Empirical(torch.zeros(3, 2)) + Empirical(torch.ones(4, 2))
        Empirical(points=(7, 2))
        """
        if not isinstance(other, Empirical):
            raise FamilyError(
                f"an empirical measure cannot be added to {other!r}; give Empirical(points)."
            )
        self._require_addable(other)
        points = torch.cat([self.keys, other.keys], dim=-2)
        return Empirical(points, bias=_joined(self, other))

    @property
    def width(self) -> int:
        """d, the width of the points."""
        return self.keys.shape[-1]

    def logits(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape n"]:
        """η·x_j + log h_j + b_j; −∞ where a point takes no part."""
        require_queries(eta, self.keys)
        products = eta @ self.keys.mT
        return products if self.offset is None else products + self.offset

    def scores(self, queries: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape n"]:
        """p_j = exp(η·x_j) h_j / Z, one row for each η; all 0 where every point is masked."""
        logits = self.logits(queries)
        return logits.softmax(-1) if self.offset is None else _safe_softmax(logits)

    def log_normalizer(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape"]:
        """log Σ_j h_j exp(η·x_j); −∞ where every point is masked."""
        logits = self.logits(eta)
        if self.offset is None:
            return logits.logsumexp(-1)
        nothing = _nothing(logits)
        sums = logits.masked_fill(nothing, 0).logsumexp(-1)
        return sums.masked_fill(nothing.squeeze(-1), -torch.inf)

    def soft_maximum(
        self, eta: Float[Tensor, "*batch d"], beta: Float[Tensor, "*batch 1"]
    ) -> Float[Tensor, "*shape"]:
        """m + log Σ_j h_j exp(β(η·x_j − m)) / β: only what is left of the maximum m is scaled."""
        require_queries(eta, self.keys)
        products, offset = eta @ self.keys.mT, self.offset
        hidden = torch.zeros_like(products, dtype=torch.bool)
        hidden = hidden if offset is None else hidden | (offset == -torch.inf)
        most = products.detach().masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
        nothing = most == -torch.inf
        most = most.masked_fill(nothing, 0)
        left = beta * (products - most).masked_fill(hidden, 0)
        left = left if offset is None else left + offset
        sums = left.masked_fill(nothing, 0).logsumexp(-1) / beta.squeeze(-1)
        return (most.squeeze(-1) + sums).masked_fill(nothing.squeeze(-1), -torch.inf)

    def entropy(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape"]:
        """−Σ_j p_j log(p_j / h_j), at most the logarithm of the mass; −∞ where all is masked."""
        logits, offset = self.logits(eta), self.offset
        log_h = torch.zeros_like(logits) if offset is None else offset.expand_as(logits)
        nothing, hidden = _nothing(logits), logits == -torch.inf
        log_p = logits.masked_fill(nothing, 0).log_softmax(-1)
        entropy = -(log_p.exp() * (log_p - log_h).masked_fill(hidden, 0)).sum(-1)
        over = (entropy - log_h.logsumexp(-1)).detach().clamp(min=0)  # by rounding
        return (entropy - over).masked_fill(nothing.squeeze(-1), -torch.inf)

    def divergence(
        self, eta: Float[Tensor, "*#batch d"], other: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*shape"]:
        """log Σ_j p_j exp((other − η)·(x_j − E x)); 0 where every point is masked."""
        logits = self.logits(eta)
        nothing = _nothing(logits)
        p = self.scores(eta)
        along = (other - eta) @ self.keys.mT
        t = along - (p * along).sum(-1, keepdim=True)
        hidden = (p == 0) & (logits == -torch.inf)
        log_p = logits.masked_fill(nothing, 0).log_softmax(-1)
        apart = log_average(p, log_p, t.masked_fill(hidden, 0))
        return apart.masked_fill(nothing.squeeze(-1), 0)

    def mean(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape d"]:
        """Σ_j p_j x_j: attention."""
        return self.expectation(eta, self.keys)

    def read(self, queries: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape d"]:
        """∇G(q): the mean, as a memory says it."""
        return self.mean(queries)

    def expectation(
        self, eta: Float[Tensor, "*batch d"], values: Float[Tensor, "*n m"]
    ) -> Float[Tensor, "*shape m"]:
        """Σ_j p_j v_j: attention with values, by torch's fused kernel where no gradient is due."""
        read = self.fused(eta, values)
        if read is None:
            require_values(values, self.keys)
            read = self.scores(eta) @ values
        return read

    def fused(
        self, eta: Float[Tensor, "*batch d"], values: Float[Tensor, "*n m"], scale: float = 1.0
    ) -> Float[Tensor, "*shape m"] | None:
        """The expectation at scale · η by torch's fused kernel.

        None where that kernel has no rule, or where a score might leave the range of its type.
        """
        if self.limit < 0 or not _fusible(eta, self.keys, values, self.offset):
            return None
        size = max(scale, 1.0) * float(torch.linalg.vector_norm(eta))  # not finite if η is not
        return _fused(eta, self.keys, values, self.offset, scale) if size <= self.limit else None

    def cross_covariance(
        self, eta: Float[Tensor, "*batch d"], values: Float[Tensor, "*n m"]
    ) -> Float[Tensor, "*shape m d"]:
        """Σ_j p_j (v_j − E v)(x_j − E x)ᵀ."""
        require_values(values, self.keys)
        p = self.scores(eta)
        v, x = _centered(p, values), _centered(p, self.keys)
        return v.mT @ (p.unsqueeze(-1) * x)

    def covariance(self, eta: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape d d"]:
        """Σ_j p_j (x_j − E x)(x_j − E x)ᵀ."""
        return self.cross_covariance(eta, self.keys)

    def hvp(
        self, eta: Float[Tensor, "*#batch d"], t: Float[Tensor, "*#batch d"]
    ) -> Float[Tensor, "*shape d"]:
        """Σ_j p_j ((x_j − E x)·t) x_j, at the cost of two reads."""
        p = self.scores(eta)
        along = t @ self.keys.mT
        along = along - (p * along).sum(-1, keepdim=True)
        return (p * along) @ self.keys

    def log_base(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*shape"]:
        """log of the weight at x: of all points that equal it; −∞ where there is none."""
        same = (x.unsqueeze(-2) == _over_queries(self.keys)).all(-1)
        weight = x.new_zeros(()) if self.offset is None else self.offset
        return torch.where(same, weight, -torch.inf).logsumexp(-1)

    def sample(
        self,
        eta: Float[Tensor, "*batch d"],
        count: int = 1,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "count *shape d"]:
        """Points, drawn with probability p_j."""
        p = self.scores(eta)
        if not holds((p > 0).any(-1)):
            raise FamilyError("nothing can be drawn where every point is masked; leave such η out.")
        flat = torch.multinomial(p.reshape(-1, p.shape[-1]), count, True, generator=generator)
        drawn = flat.T.reshape(count, *p.shape[:-1], 1)
        points = self.keys[(None,) * (drawn.ndim - self.keys.ndim)]
        return torch.take_along_dim(points, drawn, dim=-2)


def _over_queries(points: Tensor) -> Tensor:
    """Points as (…, 1, n, d), to stand beside queries (…, q, 1, d); a single set as it is."""
    return points.unsqueeze(-3) if points.ndim > 2 else points


def _centered(p: Tensor, values: Tensor) -> Tensor:
    """v_j − Σ p v, for each query: (…, q, n, m)."""
    return _over_queries(values) - (p @ values).unsqueeze(-2)


def _nothing(logits: Tensor) -> Tensor:
    return (logits == -torch.inf).all(-1, keepdim=True)


def _safe_softmax(logits: Tensor) -> Tensor:
    """softmax, but 0 where every logit is −∞; so are its derivatives there."""
    nothing = _nothing(logits)
    return logits.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


def _fusible(eta: Tensor, keys: Tensor, values: Tensor, offset: Tensor | None) -> bool:
    """Whether the fused kernel would do: it has one type and derivative, and no transforms."""
    given = (eta, keys, values) if offset is None else (eta, keys, values, offset)
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    if in_function_transform() or torch.compiler.is_compiling():
        return False
    alike = eta.dtype == keys.dtype == values.dtype == given[-1].dtype
    return alike and eta.ndim > 1 < values.ndim and values.shape[-2] == keys.shape[-2]


def _limit(points: Tensor) -> float:
    """By Cauchy and Schwarz, with the norm of all points; raises where one is not finite."""
    if not visible(points):
        return -1.0
    wide = torch.promote_types(points.dtype, torch.float32)  # in which kernels add
    size = float(torch.linalg.vector_norm(points.detach(), dtype=wide))
    if not math.isfinite(size):
        require_finite("points", points)
    return float(torch.finfo(wide).max) / 2 / max(size, 1e-30)


def _fused(
    eta: Tensor, keys: Tensor, values: Tensor, offset: Tensor | None, scale: float
) -> Tensor:
    alike = eta.shape[:-2] == keys.shape[:-2] == values.shape[:-2]
    if offset is None and alike and eta.ndim == 4:  # nothing to bring into shape
        return fused_attention(eta, keys, values, scale=scale)
    batch = np.broadcast_shapes(eta.shape[:-2], keys.shape[:-2], values.shape[:-2])
    if offset is not None:
        batch = np.broadcast_shapes(batch, offset.shape[:-2])
        offset = _four(offset.expand(*batch, eta.shape[-2], keys.shape[-2]))
    q, k, v = (_four(x.expand(*batch, *x.shape[-2:])) for x in (eta, keys, values))
    read = fused_attention(q, k, v, offset, scale=scale)
    return read.reshape(*batch, *read.shape[-2:])


def _four(x: Tensor) -> Tensor:
    """(batch, 1, rows, columns), as the fused kernels want it."""
    return x.reshape(math.prod(x.shape[:-2]), 1, *x.shape[-2:])


def _offset(
    points: Tensor, weights: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    parts = []
    if weights is not None:
        parts.append(weights.log().unsqueeze(-2) if points.ndim > 2 else weights.log())
    if bias is not None:
        parts.append(bias)
    if mask is not None:
        parts.append(points.new_zeros(()).masked_fill(~mask, -torch.inf))
    return sum(parts[1:], parts[0]) if parts else None


def _joined(first: Empirical, second: Empirical) -> Tensor | None:
    offsets = [m.offset for m in (first, second)]
    if all(one is None for one in offsets):
        return None
    parts = [
        m.keys.new_zeros(m.keys.shape[-2]) if one is None else one
        for m, one in zip((first, second), offsets, strict=True)
    ]
    batch = np.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*batch, part.shape[-1]) for part in parts], dim=-1)
