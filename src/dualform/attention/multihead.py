"""torch's MultiheadAttention with a choice of layer: same arguments, parameters and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as project

from dualform.attention.cache import Cache
from dualform.attention.kinds import kind as kind_of
from dualform.attention.kinds import options_of, with_weights
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
        kind: a name of `dualform.attention.kind`.
        options: of that kind, such as window, factors, beta.
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
        kind: str = "softmax",
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
        self._layer = kind_of(kind, **options)
        self._check()
        if self.num_kv_heads != num_heads:
            self._share_keys()
        # torch's encoder layers have a shortcut in eval mode that computes softmax attention from
        # the parameters, whatever this module would do; modules that say this are spared it.
        self._qkv_same_embed_dim = False

    def extra_repr(self) -> str:
        """What torch's module does not say of itself."""
        return f"{self.embed_dim}, {self.num_heads}, kind={self.kind!r}, {self.options}"

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
            return with_weights(self._layer, q, k, v, **options)
        return self._layer(q, k, v, **options), None

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
        if (self.bias_k is not None or self.add_zero_attn) and (
            self.kind not in ("softmax", "linear", "batch_norm")
            or self.num_kv_heads != self.num_heads
        ):
            raise AttentionError(
                f"add_bias_kv and add_zero_attn add a key without a place in the sequence, which "
                f"kind='{self.kind}' or shared heads cannot use; leave them out."
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
        mine = (self.kind, options_of(self.kind, self.options))
        if mine != (cache.kind, cache.options):
            raise AttentionError(
                f"the cache was made for kind='{cache.kind}' with {cache.options}, but this module "
                f"reads kind='{self.kind}' with {mine[1]}; give Cache(kind, **options) the same."
            )


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
