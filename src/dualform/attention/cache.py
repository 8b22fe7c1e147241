"""Decoding: the context of each kind, token by token, exactly as the whole causal pass reads it.

softmax and local attention keep keys and values; linear attention only its state W, z; Attention-BN
also the number, mean and variance of the keys; Attention-SH the blocks and the open block's
keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from dualform.attention.batch_norm import Statistics, from_sums, measured_from, origin_of
from dualform.attention.kinds import KINDS, Layer, described, options_of, record_of
from dualform.attention.kinds import kind as kind_of
from dualform.attention.linear import State, scan
from dualform.attention.primal import Primal
from dualform.attention.shapes import for_each_query_head, heads, wide
from dualform.attention.shorten import Pool, require_factors, shorten
from dualform.errors import AttentionError
from dualform.memory import FeatureMap


class Cache:
    """y of new tokens, read causally after all that were given before; it remembers them.

    >>> from dualform import attention
    >>> q, k, v = torch.randn(3, 1, 4, 10, 8).unbind()
    >>> cache = Cache("batch_norm")
    >>> steps = [cache(*(x[..., t : t + 1, :] for x in (q, k, v))) for t in range(10)]
    >>> whole = attention.batch_norm(q, k, v, is_causal=True)
    >>> torch.allclose(torch.cat(steps, -2), whole, atol=1e-4)
    True
    >>> len(cache)
    10
    """

    def __init__(self, kind: str | Primal | Layer = "softmax", **options: Any) -> None:
        self.kind, self.options = kind, options_of(kind, options)
        if not record_of(kind).is_causal:
            able = ", ".join(name for name, known in KINDS.items() if known.is_causal)
            raise AttentionError(
                f"kind={described(kind)} cannot be read token by token; these can: {able}."
            )
        own = CONTEXTS.get(kind) if isinstance(kind, str) else None
        self._context: Context = (
            own(**self.options) if own else _Pairs(kind_of(kind, **self.options))
        )
        self._count = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The reads of the new queries; their keys and values are kept."""
        y = self._context.step(q, k, v)
        self._count += k.shape[-2]
        return y

    def __len__(self) -> int:
        """The number of tokens so far."""
        return self._count

    @property
    def nbytes(self) -> int:
        """What the context takes, in bytes.

        >>> cache = Cache("linear")
        >>> _ = cache(*torch.ones(3, 1, 4, 100, 8).unbind())
        >>> cache.nbytes                                  # 4 heads of 8 × 8 and 8 floats
        1152
        """
        return sum(x.numel() * x.element_size() for x in self._context.tensors())


class CachedRows:
    """Rows that grow at the end, in room that doubles; where a graph is kept, in new room.

    >>> rows = CachedRows()
    >>> rows.append(torch.ones(2, 3)).append(torch.zeros(1, 3)).all.shape
    torch.Size([3, 3])
    """

    def __init__(self) -> None:
        self._room = torch.empty(0)
        self._used = 0

    @property
    def all(self) -> Tensor:
        """(…, rows, d): all rows so far."""
        return self._room[..., : self._used, :] if self._used else self._room

    def append(self, x: Tensor) -> CachedRows:
        """Adds rows (…, n, d) at the end."""
        need = self._used + x.shape[-2]
        if torch.is_grad_enabled():  # a graph may hold what was read: it must stay as it was
            self._room = torch.cat([self.all, x], -2) if self._used else x
            self._used = need
            return self
        if self._room.ndim < 2 or self._room.shape[-2] < need:
            room = x.new_empty(*x.shape[:-2], max(need, 2 * self._used), x.shape[-1])
            if self._used:
                room[..., : self._used, :] = self.all
            self._room = room
        self._room[..., self._used : need, :] = x
        self._used = need
        return self

    def keep_last(self, count: int) -> None:
        """Forgets all rows but the last."""
        if self._used > 2 * count:
            self._room = self.all[..., self._used - count :, :].clone()
            self._used = count

    def __len__(self) -> int:
        return self._used


class Context(ABC):
    """What is kept of the past, and how new tokens read it."""

    @abstractmethod
    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Takes new tokens in and reads them causally."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All that is kept."""


class _Pairs(Context):
    """Every key and value, read by the layer itself: so any layer with a causal form can decode."""

    def __init__(self, layer: Layer) -> None:
        self._k, self._v, self._layer = CachedRows(), CachedRows(), layer

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = len(self._k)
        keys, values = self._k.append(k).all, self._v.append(v).all
        return self._layer(q, keys, values, is_causal=True, offset=before)

    def tensors(self) -> list[Tensor]:
        return [self._k.all, self._v.all]


class _Window(_Pairs):
    """The keys and values of the last window."""

    def __init__(self, scale: float | None, window: int) -> None:
        super().__init__(kind_of("local", window=window, scale=scale))
        self._window = window

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = super().step(q, k, v)
        for rows in (self._k, self._v):
            rows.keep_last(self._window)
        return y


class _Linear(Context):
    """W = Σ φ(k) vᵀ and z = Σ φ(k)."""

    def __init__(self, scale: float | None, features: FeatureMap, normalized: bool) -> None:
        self._scale, self._features, self._normalized = scale, features, normalized
        self._state: State | None = None

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phi_q = self._features.features(q if self._scale is None else q * self._scale)
        phi_k = self._features.features(k)
        if self._state is None:
            self._state = _nothing(phi_k, v.shape[-1])
        shared = State(*(for_each_query_head(x, q) for x in self._state))
        k_, v_ = (for_each_query_head(x, q) for x in (phi_k, v))
        y, _ = scan(phi_q, k_, v_, shared, self._normalized)
        _, self._state = scan(phi_k, phi_k, v, self._state)
        return y

    def tensors(self) -> list[Tensor]:
        return [] if self._state is None else list(self._state)


def _nothing(phi_k: Tensor, width: int) -> State:
    shape, new = (*phi_k.shape[:-2], phi_k.shape[-1]), wide(phi_k).new_zeros
    return State(new(*shape, width), new(*shape, 1))


class _Statistics(_Pairs):
    """Every key and value, and the number, mean and variance of the keys.

    Keys are kept as measured from the first ones, which changes nothing but the rounding.
    """

    def __init__(
        self, scale: float | None, beta: float | Tensor, eps: float, variance: bool
    ) -> None:
        super().__init__(kind_of("softmax", scale=scale))
        self._beta, self._eps, self._variance = beta, eps, variance
        self._origin: Tensor | None = None
        self._past: Statistics | None = None

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._origin is None:
            self._origin = origin_of(k)
        apart = wide(k) - self._origin
        found = from_sums(
            *(x.cumsum(-2) for x in (torch.ones_like(apart[..., :1]), apart, apart.square()))
        )
        found = found if self._past is None else _joined(self._past, found)
        self._past = Statistics(*(x[..., -1:, :] for x in found))
        moved = wide(q) - self._beta * for_each_query_head(self._origin, q)
        rewritten = found.rewrite(moved, self._beta, self._eps, self._variance)
        return super().step(rewritten.to(q.dtype), measured_from(self._origin, k), v)

    def tensors(self) -> list[Tensor]:
        own = [] if self._past is None or self._origin is None else [self._origin, *self._past]
        return [*super().tensors(), *own]


def _joined(past: Statistics, new: Statistics) -> Statistics:
    """Statistics of keys of both, without sums of squares that could cancel."""
    number = past.number + new.number
    share, apart = new.number / number, new.mean - past.mean
    spread = past.variance * (1 - share) + new.variance * share
    variance = spread + apart.square() * share * (1 - share)
    return Statistics(past.mean + apart * share, variance, number)


class _Blocks(Context):
    """For each factor, complete blocks as one pair each and the pairs of the open block."""

    kind, inner = "scaled_heads", "softmax"

    def __init__(self, factors: tuple[int, ...], pool: Pool, lead: int, **options: Any) -> None:
        self._factors, self._pool, self._begun = factors, pool, False
        self._read = kind_of(self.inner, **options)
        self._whole = kind_of(self.kind, factors=factors, pool=pool, lead=lead, **options)
        self._groups = [_Group(factor, pool, lead) for factor in factors]

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        require_factors(self._factors, self._pool, heads(k))
        if not self._begun and q.shape[-2] > 1:
            return self._begin(q, k, v)
        self._begun = True
        tokens = (self._one(*(x[..., t : t + 1, :] for x in (q, k, v))) for t in range(q.shape[-2]))
        return torch.cat(list(tokens), -2)

    def _begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The first tokens all at once."""
        self._begun = True
        split = (x.chunk(len(self._factors), -3) for x in (k, v))
        for group, k_, v_ in zip(self._groups, *split, strict=True):
            group.begin(k_, v_)
        return self._whole(q, k, v, is_causal=True)

    def _one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = (x.chunk(len(self._factors), -3) for x in (q, k, v))
        groups = zip(self._groups, *split, strict=True)
        return torch.cat([self._read(q, *group.after(k, v)) for group, q, k, v in groups], -3)

    def tensors(self) -> list[Tensor]:
        return [x for group in self._groups for x in group.tensors()]


class _NormalizedBlocks(_Blocks):
    """The same, read with the statistics of what is kept."""

    kind, inner = "batch_norm_scaled_heads", "batch_norm"


class _Group:
    """The shortened past of the heads of one factor."""

    def __init__(self, factor: int, pool: Pool, lead: int) -> None:
        self._factor, self._pool, self._left = factor, pool, lead
        self._k, self._v = CachedRows(), CachedRows()
        self._open: list[tuple[Tensor, Tensor]] = []

    def begin(self, k: Tensor, v: Tensor) -> None:
        """Takes in the first pairs: leading ones, complete blocks, and the rest."""
        n = k.shape[-2]
        lead = min(self._left, n)
        end = lead + (n - lead) // self._factor * self._factor
        self._left -= lead
        self._keep(k[..., :lead, :], v[..., :lead, :])
        whole_k, whole_v = (x[..., lead:end, :] for x in (k, v))
        self._keep(*shorten(whole_k, whole_v, self._factor, self._pool)[:2])
        self._open = [(k[..., t : t + 1, :], v[..., t : t + 1, :]) for t in range(end, n)]

    def after(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that a query sees once this pair is in."""
        if self._left:
            self._left -= 1
            self._keep(k, v)
        else:
            self._open.append((k, v))
        if len(self._open) == self._factor:
            k, v = (torch.cat(x, -2) for x in zip(*self._open, strict=True))
            self._keep(*shorten(k, v, self._factor, self._pool)[:2])
            self._open = []
        kept = (rows.all for rows in (self._k, self._v))
        parts = (
            zip(kept, *self._open, strict=True) if len(self._k) else zip(*self._open, strict=True)
        )
        keys, values = (torch.cat(x, -2) for x in parts)
        return keys, values

    def _keep(self, k: Tensor, v: Tensor) -> None:
        self._k.append(k)
        self._v.append(v)

    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        return [self._k.all, self._v.all, *(x for pair in self._open for x in pair)]


CONTEXTS: dict[str, type[Any]] = {
    "linear": _Linear,
    "local": _Window,
    "batch_norm": _Statistics,
    "scaled_heads": _Blocks,
    "batch_norm_scaled_heads": _NormalizedBlocks,
}
"""The kinds whose past takes less than every key and value, or more."""
