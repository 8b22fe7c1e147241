"""torch's MultiheadAttention with a choice of layer: same arguments, parameters and outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as project

from dualform.attention.cache import Cache
from dualform.attention.kinds import (
    Layer,
    described,
    learned_parts,
    options_of,
    record_of,
    with_weights,
)
from dualform.attention.primal import Primal
from dualform.attention.shapes import causal_mask
from dualform.errors import AttentionError


class MultiheadAttention(nn.MultiheadAttention):
    """out_proj(heads of a layer of this kind over projected q, k, v): torch's module, and more.

    Weights load both ways: `state_dict` is torch's. What the kind takes beyond q, k, v goes into
    `options`.

    >>> _ = torch.manual_seed(0)
    >>> module = MultiheadAttention(16, 4, batch_first=True, kind="batch_norm", beta=1.0)
    >>> x = torch.randn(2, 10, 16)
    >>> y, weights = module(x, x, x)
    >>> y.shape, weights.shape
    (torch.Size([2, 10, 16]), torch.Size([2, 10, 10]))
    >>> torch.nn.MultiheadAttention(16, 4).load_state_dict(module.state_dict())
    <All keys matched successfully>

    Args:
        num_kv_heads: heads of keys and values, where several heads of queries share one; the
            projections are then three parameters, as torch's are where kdim or vdim is given.
        kind: a name of `dualform.attention.kind`, a `Primal`, or a function of your own.
        options: of that kind, such as window, factors, beta. A parameter or a module among them,
            or in the problem, is learned with the module: beta=nn.Parameter(torch.ones(4, 1, 1)).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        kind: str | Primal | Layer = "softmax",
        **options: Any,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self.kind, self.options = kind, options
        self.num_kv_heads = num_kv_heads or num_heads
        options_of(kind, options)
        self._check()
        self._learned = frozenset(learned_parts(kind, options))
        for name, part in learned_parts(kind, options).items():
            setattr(self, name, part)
        if self.num_kv_heads != num_heads:
            self._share_keys()
        # torch's encoder layers have a shortcut in eval mode that computes softmax attention from
        # the parameters, whatever this module would do; modules that say this are spared it.
        self._qkv_same_embed_dim = False

    def extra_repr(self) -> str:
        """What torch's module does not say of itself."""
        shown = {name: x for name, x in self.options.items() if name not in self._learned}
        return f"{self.embed_dim}, {self.num_heads}, kind={described(self.kind)}, {shown}"

    @property
    def layer(self) -> partial[Tensor]:
        """The layer between the projections, with its options as they are now.

        >>> MultiheadAttention(16, 4, kind="local", window=3).layer.keywords
        {'window': 3}
        """
        return partial(record_of(self.kind).layer, **self._options())

    def _options(self) -> dict[str, Any]:
        """Options as given; what is learned as the module holds it, parametrized or not."""
        learned = {name: getattr(self, name) for name in self.options if name in self._learned}
        return {**self.options, **learned}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The output and, where asked for, the weights; masks are True where nothing is seen.

        With a `Cache` the tokens are the next ones of a sequence, read causally after all before.
        """
        rows, padding = [query, key, value], key_padding_mask
        if query.dim() == 2:
            rows = [x[None] for x in rows]
            padding = None if padding is None else padding[None]
        elif not self.batch_first:
            rows = [x.transpose(0, 1) for x in rows]
        if cache is not None:
            self._require_plain(padding, attn_mask, need_weights)
            self._require_own(cache)
            y, weights = cache(*self.heads(*rows)), None
        else:
            y, weights = self._read(rows, padding, attn_mask, is_causal, need_weights)
        out = self.out_proj(y.transpose(1, 2).flatten(2))
        weights = weights.mean(-3) if weights is not None and average_attn_weights else weights
        if query.dim() == 2:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (batch, heads, L, D), k and v, projected from (batch, tokens, width).

        >>> x = torch.randn(2, 10, 16)
        >>> [h.shape for h in MultiheadAttention(16, 4).heads(x, x, x)][0]
        torch.Size([2, 4, 10, 4])
        """
        weights, biases = self._projections()
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        rows = zip((query, key, value), weights, biases, counts, strict=True)
        q, k, v = (_by_heads(project(x, W, b), n) for x, W, b, n in rows)
        return q, k, v

    def _read(
        self,
        rows: list[Tensor],
        padding: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.heads(*rows)
        mask = None if is_causal else _seen(attn_mask, q, self.num_heads)
        if self.bias_k is not None or self.add_zero_attn:
            mask = causal_mask(q.shape[-2], k.shape[-2], 0, q.device) if is_causal else mask
            k, v, mask, padding = self._with_extra(k, v, mask, padding)
            is_causal = False
        if padding is not None:
            mask = _joined(mask, _seen(padding[:, None, None], q, self.num_heads))
        options: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": is_causal,
            "dropout_p": self.dropout if self.training else 0.0,
        }
        if need_weights:
            return with_weights(self.layer, q, k, v, **options)
        return self.layer(q, k, v, **options), None

    def _projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_bias is None:
            return weights, (None, None, None)
        return weights, torch.split(self.in_proj_bias, [len(W) for W in weights])

    def _with_extra(
        self, k: Tensor, v: Tensor, mask: Tensor | None, padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """One more key and value for everyone: learned, or zeros, or both."""
        extra = []
        if self.bias_k is not None and self.bias_v is not None:
            extra.append([x.view(1, self.num_heads, 1, -1) for x in (self.bias_k, self.bias_v)])
        if self.add_zero_attn:
            extra.append([x.new_zeros(1, self.num_heads, 1, x.shape[-1]) for x in (k, v)])
        for more_k, more_v in extra:
            k = torch.cat([k, more_k.expand(len(k), -1, -1, -1)], -2)
            v = torch.cat([v, more_v.expand(len(v), -1, -1, -1)], -2)
            mask = None if mask is None else _padded(mask, mask.dtype == torch.bool)
            padding = None if padding is None else _padded(padding, False)
        return k, v, mask, padding

    def _share_keys(self) -> None:
        """Narrower projections of keys and values, as parameters of their own."""
        width = self.num_kv_heads * self.head_dim
        made: dict[str, Any] = {
            "device": self.out_proj.weight.device,
            "dtype": self.out_proj.weight.dtype,
        }
        sizes = {
            "q": (self.embed_dim, self.embed_dim),
            "k": (width, self.kdim),
            "v": (width, self.vdim),
        }
        for name, size in sizes.items():
            weight = nn.init.xavier_uniform_(torch.empty(size, **made))
            setattr(self, f"{name}_proj_weight", nn.Parameter(weight))
        self.register_parameter("in_proj_weight", None)
        if self.in_proj_bias is not None:
            self.in_proj_bias = nn.Parameter(torch.zeros(self.embed_dim + 2 * width, **made))

    def _check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise AttentionError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; "
                "every head of keys serves as many heads of queries."
            )
        known = record_of(self.kind)
        if (self.bias_k is not None or self.add_zero_attn) and (
            known.has_positions or known.pools or self.num_kv_heads != self.num_heads
        ):
            raise AttentionError(
                f"add_bias_kv and add_zero_attn add a key without a place in the sequence, which "
                f"kind={described(self.kind)} or shared heads cannot use; leave them out."
            )

    def _require_plain(
        self, padding: Tensor | None, attn_mask: Tensor | None, need_weights: bool
    ) -> None:
        if padding is not None or attn_mask is not None or need_weights:
            raise AttentionError(
                "with a cache every token sees all tokens before it; leave masks out and give "
                "need_weights=False."
            )

    def _require_own(self, cache: Cache) -> None:
        mine = options_of(self.kind, self._options())
        if self.kind != cache.kind or not all(_same(x, cache.options[n]) for n, x in mine.items()):
            raise AttentionError(
                f"the cache was made for kind={described(cache.kind)} with {cache.options}, but "
                f"this module reads kind={described(self.kind)} with {mine}; give "
                "Cache(kind, **options) the same."
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return bool(one == other)


def _seen(mask: Tensor | None, q: Tensor, heads: int) -> Tensor | None:
    """torch.nn's mask as that of the functions: True where a key is seen, or numbers."""
    if mask is None:
        return None
    mask = ~mask if mask.dtype == torch.bool else mask.to(q.dtype)
    return mask.view(-1, heads, *mask.shape[1:]) if mask.dim() == 3 else mask


def _by_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, heads, tokens, D) of (batch, tokens, heads · D)."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def _joined(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    if mask is None or other is None:
        return other if mask is None else mask
    if mask.dtype == other.dtype == torch.bool:
        return mask & other
    dtype = other.dtype if mask.dtype == torch.bool else mask.dtype
    return _numbers(mask, dtype) + _numbers(other, dtype)


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of either type as numbers to add to the logits."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def _padded(mask: Tensor, value: bool) -> Tensor:
    return torch.nn.functional.pad(mask, (0, 1), value=value)
