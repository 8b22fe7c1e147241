"""The layer that a primal problem derives: a function of q, k, v like every other kind.

Where the choices are those of a layer with kernels of its own, that layer runs. Transformations of
one's own that treat each row by itself come before it, and cost nothing else. Those that depend
on the keys are taken of the keys that a query sees, set by set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from dualform.attention.batch_norm import batch_norm
from dualform.attention.derivation import Problem
from dualform.attention.linear import linear
from dualform.attention.local import local
from dualform.attention.scaled_heads import batch_norm_scaled_heads, scaled_heads
from dualform.attention.sets import read_by_sets
from dualform.attention.shapes import (
    causal_mask,
    for_each_query_head,
    require_mask,
    require_shapes,
    visible,
    with_causal,
)
from dualform.attention.softmax import softmax
from dualform.attention.transforms import BatchNorm, Shorten
from dualform.errors import AttentionError
from dualform.memory import Exponential, FeatureMap
from dualform.memory.kernels import nonzero


@dataclass(frozen=True)
class Derived:
    """y of q, k, v by the choices of a primal problem; arguments are those of every kind.

    >>> from dualform.attention import Primal, RmsNorm
    >>> layer = Primal(keys=(RmsNorm(),)).attention()
    >>> q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 3)
    >>> layer(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 7, 3])
    """

    problem: Problem

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        *,
        offset: int = 0,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """y_i = Σ_j Φ(Tq_i)·Φ(Tk_j) v_j / h(q_i) over the keys that query i sees.

        `scale` is that of an `Exponential` kernel without one of its own.
        """
        require_shapes(q, k, v)
        if attn_mask is not None:
            require_mask(attn_mask, q, k)
        is_causal = is_causal or self.problem.sees == "causal"
        scale = scale if self.takes_scale else getattr(self.problem.kernel, "scale", None)
        given: dict[str, Any] = {"is_causal": is_causal, "offset": offset, "dropout_p": dropout_p}
        if self._fused is not None:
            return self._fused(q, k, v, attn_mask, scale=scale, **given)
        if self._by_row:
            q, k = (self._each_row(x) for x in (q, k))
            return self._plain(q, k, v, attn_mask, scale=scale, **given)
        k, v = for_each_query_head(k, q), for_each_query_head(v, q)
        read = partial(self._plain, scale=scale, dropout_p=dropout_p, in_window=True)
        whole = partial(self._seeing_all, read=read, is_causal=is_causal)
        sees, numbers = self._sees(q, k, attn_mask, is_causal, offset)
        if sees is None:
            return whole(q, k, v, numbers)
        return read_by_sets(whole, q, k, v, sees, numbers)

    @property
    def has_positions(self) -> bool:
        """Whether it matters where a key stands."""
        return isinstance(self.problem.sees, int) or self.pools

    @property
    def averages(self) -> bool:
        """Whether weights sum to 1."""
        return self.problem.normalizer == "sum"

    @property
    def takes_scale(self) -> bool:
        """Whether the scale of logits is left to the caller."""
        return isinstance(self.problem.kernel, Exponential) and self.problem.kernel.scale is None

    @property
    def pools(self) -> bool:
        """Whether keys are joined to blocks."""
        return any(isinstance(step, Shorten) for step in self.problem.keys)

    @property
    def _by_row(self) -> bool:
        """Whether every query and key is transformed by itself, and h adds up key by key."""
        own = callable(self.problem.normalizer)
        return not own and not any(step.depends_on_keys for step in self.problem.keys)

    @cached_property
    def _fused(self) -> Callable[..., Tensor] | None:
        """The layer with kernels of its own that has these transformations, if there is one."""
        problem = self.problem
        softmaxed = isinstance(problem.kernel, Exponential) and problem.normalizer == "sum"
        own = any(type(step) not in (BatchNorm, Shorten) for step in problem.keys)
        if isinstance(problem.sees, int) or not softmaxed or own:  # a subclass may do otherwise
            return None
        match problem.keys:
            case (BatchNorm() as norm,):
                return partial(batch_norm, **vars(norm))
            case (Shorten() as short,):
                return partial(scaled_heads, factors=(short.factor,), pool=short.pool)
            case (Shorten() as short, BatchNorm() as norm):
                read = partial(batch_norm_scaled_heads, **vars(norm))
                return partial(read, factors=(short.factor,), pool=short.pool)
        return None

    def _each_row(self, x: Tensor) -> Tensor:
        """T of rows by themselves: no keys are shown, so that none can be looked at by mistake."""
        for step in self.problem.keys:
            x = step.apply(x, x[..., :0, :])
        return x

    def _seeing_all(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        numbers: Tensor | None,
        *,
        read: Callable[..., Tensor],
        is_causal: bool,
    ) -> Tensor:
        """All queries see all keys: the data are shortened, then transformed by what is left."""
        for step in self.problem.keys:
            k, v = step.shorten(k, v, open_end=is_causal)
            q, k = step.apply(q, k), step.apply(k, k)
        return read(q, k, v, numbers)

    def _sees(
        self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, offset: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which keys each query sees, (…, L, S) or None for all, and numbers for the logits."""
        if mask is not None and self.pools:
            raise AttentionError(
                f"attn_mask cannot be used with {self.problem.keys}, since the keys of a block "
                "have one weight; leave the mask out, or use kind='scaled_heads'."
            )
        window = _window(q, k, self.problem.sees, offset)
        causal = causal_mask(q.shape[-2], k.shape[-2], offset, q.device) if is_causal else None
        given = None if mask is None else visible(mask if mask.ndim > 1 else mask[None])
        parts = [part for part in (window, causal, given) if part is not None]
        numbers = None if mask is None or mask.dtype == torch.bool else mask
        return (reduce(and_, parts) if parts else None), numbers

    def _plain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        is_causal: bool = False,
        offset: int = 0,
        in_window: bool = False,
        scale: float | None,
        dropout_p: float,
    ) -> Tensor:
        """The layer of the features alone."""
        problem = self.problem
        given: dict[str, Any] = {"is_causal": is_causal, "offset": offset, "dropout_p": dropout_p}
        sees = "all" if in_window else problem.sees
        if isinstance(problem.kernel, Exponential) and problem.normalizer == "sum":
            if isinstance(sees, int):
                return local(q, k, v, mask, window=sees, scale=scale, **given)
            return softmax(q, k, v, mask, scale=scale, **given)
        window = _window(q, k, sees, offset)
        if window is not None:
            mask = window if mask is None else with_causal(mask, window)
        if isinstance(problem.kernel, FeatureMap) and not callable(problem.normalizer):
            normalized = problem.normalizer == "sum"
            return linear(q, k, v, mask, features=problem.kernel, normalized=normalized, **given)
        return self._by_products(q, k, v, mask, scale=scale, **given)

    def _by_products(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        is_causal: bool,
        offset: int,
        scale: float | None,
        dropout_p: float,
    ) -> Tensor:
        """Σ_j Φ(q)·Φ(k_j) v_j / h(q), with a kernel or a normalizer of one's own."""
        k, v = for_each_query_head(k, q), for_each_query_head(v, q)
        weights = self.problem.products(q, k, scale)
        if is_causal:
            mask = with_causal(mask, causal_mask(q.shape[-2], k.shape[-2], offset, q.device))
        if mask is not None:
            weights = weights * (mask if mask.dtype == torch.bool else mask.exp())
        weights = weights / nonzero(self.problem.h(weights))
        if not torch.compiler.is_compiling() and not bool(weights.isfinite().all()):
            raise AttentionError(
                f"weights of {self.problem.kernel} left the range of {weights.dtype}; normalize "
                "queries and keys (keys=(RmsNorm(),)), or choose a smaller scale."
            )
        return dropout(weights, dropout_p, training=dropout_p > 0).to(v.dtype) @ v


def _window(q: Tensor, k: Tensor, sees: str | int, offset: int) -> Tensor | None:
    """(L, S): True where a key is at most so far away; None where there is no window."""
    if not isinstance(sees, int):
        return None
    i, j = (torch.arange(x.shape[-2], device=x.device) for x in (q, k))
    return (i[:, None] + offset - j).abs() <= sees
