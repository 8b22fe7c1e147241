"""Attention-SH: keys and values of all heads are pooled at once, in Triton.

Blocks of all heads lie one after the other, sample by sample. Two routes lead from there to torch's
fused kernels. "packed": every head of every sample is a sequence of its own length for one call of
flash attention; the host has little to do. "parallel": a call for all heads of a factor, beside
the others on a stream of its own; the device has less to do, since its kernels for this are faster.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from dualform.attention.kernels_tiles import put, rows_of

SHORT = 2048
"""Queries below which the host is slower than the device, unless a CUDA graph is captured."""
LONG = 8192
"""Queries from which on the device is busy enough for the host to spend time on streams."""
BLOCK = 64
"""Rows of a tile."""


class Layout(NamedTuple):
    """Where the blocks of each head lie among all rows."""

    factors: tuple[int, ...]
    shape: tuple[int, int]
    """Samples, and heads of a factor."""
    blocks: tuple[int, ...]
    """(factors,) blocks of a head."""
    each: Tensor
    """(B·H,) keys in a block."""
    queries: Tensor
    """(B·H + 1,) where the queries of each head begin, and the last end."""
    keys: Tensor
    """(B·H + 1,) the same of blocks."""

    def groups(self, rows: Tensor) -> list[Tensor]:
        """Views (B, heads, blocks, D) of all rows, one a factor."""
        samples, heads = self.shape
        parts = rows.unflatten(0, (samples, -1)).split([heads * n for n in self.blocks], 1)
        return [part.unflatten(1, (heads, -1)) for part in parts]


def scaled_heads_attention(
    q: Tensor, k: Tensor, v: Tensor, factors: tuple[int, ...], scale: float | None, route: str = ""
) -> Tensor:
    """Attention of each head to the means of its factor's blocks.

    ```python
    y = scaled_heads_attention(q, k, v, factors=(1, 2, 4, 8), scale=None)
    ```
    """
    layout = layout_of(tuple(q.shape[:3]), k.shape[2], factors, q.device)
    if (route or _route(q)) == "packed":
        k, v = _Pool.apply(k, v, layout, True)
        return _packed(q, k, v, layout, scale)
    short, count = _Pool.apply(k, v, layout, False), len(factors)
    groups = zip(q.chunk(count, 1), short[:count], short[count:], strict=True)
    calls = [partial(scaled_dot_product_attention, *group, scale=scale) for group in groups]
    pays = q.shape[-2] >= LONG or (q.is_cuda and torch.cuda.is_current_stream_capturing())
    return torch.cat(in_parallel(calls, q.device, pays), 1)


def _route(q: Tensor) -> str:
    short = q.shape[-2] < SHORT and not torch.cuda.is_current_stream_capturing()
    return "packed" if short else "parallel"


def _packed(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None) -> Tensor:
    rows = (x.unsqueeze(1) for x in (q.contiguous().flatten(0, 2), k, v))
    y: Tensor = torch.ops.aten._flash_attention_forward(
        *rows, layout.queries, layout.keys, q.shape[-2], max(layout.blocks), 0.0, False, False,
        scale=scale,
    )[0]  # fmt: skip
    return y.view(*q.shape[:-1], v.shape[-1])


def in_parallel(
    calls: Sequence[Callable[[], Tensor]], device: torch.device, pays: bool = True
) -> list[Tensor]:
    """What the calls return; each on a stream of its own, as its backward pass will be.

    Streams take the host's time, so that they pay where the device has much to do, or where the
    host has nothing to do since a CUDA graph is captured; elsewhere calls follow each other.

    ```python
    in_parallel([lambda: torch.ones(1), lambda: torch.zeros(1)], torch.device("cuda"))
    ```
    """
    if device.type != "cuda" or not pays:
        return [call() for call in calls]
    here, found = torch.cuda.current_stream(device), []
    streams = _streams(here, len(calls))
    for stream, call in zip(streams, calls, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found.append(call())
    for stream in streams:
        here.wait_stream(stream)
    return found


@cache
def _streams(here: torch.cuda.Stream, count: int) -> list[torch.cuda.Stream]:
    """Streams for the work of `here` alone: what is freed on them is used again only after it."""
    return [torch.cuda.Stream(here.device) for _ in range(count)]


@lru_cache(maxsize=64)
def layout_of(
    shape: tuple[int, ...], S: int, factors: tuple[int, ...], device: torch.device
) -> Layout:
    """The layout for queries of shape (B, H, L); made once, since it is copied to the device.

    ```python
    layout_of((2, 8, 100), 100, (1, 2, 4, 8), torch.device("cuda"))
    ```
    """
    B, H, L = shape
    heads, blocks = H // len(factors), tuple(-(-S // s) for s in factors)
    each, lengths = ([x for x in xs for _ in range(heads)] * B for xs in (factors, blocks))
    tables = each, [L * n for n in range(B * H + 1)], [0, *accumulate(lengths)]
    ints = (torch.tensor(x, dtype=torch.int32, device=device) for x in tables)
    return Layout(factors, (B, heads), blocks, *ints)


class _Pool(torch.autograd.Function):
    """Pooled keys and values: all rows if `packed`, else a view for each factor."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, layout: Layout, packed: bool) -> tuple[Tensor, ...]:
        k, v = rows_of(k), rows_of(v)
        B, H, S, D = k.shape
        count = B * layout.shape[1] * sum(layout.blocks)
        out_k, out_v = k.new_empty(count, D), v.new_empty(count, D)
        _pool_kernel[(B * H, triton.cdiv(max(layout.blocks), BLOCK))](
            k, v, out_k, out_v, layout.each, layout.keys, *k.stride()[:3], *v.stride()[:3],
            H, S, **_options(D)
        )  # fmt: skip
        ctx.layout, ctx.shape, ctx.packed = layout, k.shape, packed
        return (out_k, out_v) if packed else (*layout.groups(out_k), *layout.groups(out_v))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        layout, count = ctx.layout, len(ctx.layout.factors)
        short = [g for d in gradients for g in layout.groups(d)] if ctx.packed else gradients
        dk, dv = (gradients[0].new_empty(ctx.shape) for _ in range(2))
        outs = dk.chunk(count, 1), dv.chunk(count, 1)
        groups = zip(short[:count], short[count:], *outs, layout.factors, strict=True)
        for short_k, short_v, out_k, out_v, factor in groups:
            _spread(short_k, short_v, out_k, out_v, factor)
        return dk, dv, None, None


def _spread(dk: Tensor, dv: Tensor, out_k: Tensor, out_v: Tensor, factor: int) -> None:
    """The gradient of a block's mean, shared out among its keys."""
    dk, dv = rows_of(dk), rows_of(dv)
    B, H, S, D = out_k.shape
    _spread_kernel[(B * H, triton.cdiv(S, BLOCK))](
        dk, dv, out_k, out_v, *dk.stride()[:3], *dv.stride()[:3], *out_k.stride()[:3],
        H, S, factor, **_options(D)
    )  # fmt: skip


def _options(D: int) -> dict[str, int]:
    return {"D": D, "DP": triton.next_power_of_2(D), "BLOCK": BLOCK, "num_warps": 4}


@triton.jit
def _rows(x, rows, stride, inside, DP: tl.constexpr):
    places = rows[:, None] * stride + tl.arange(0, DP)[None, :]
    return tl.load(x + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _pool_kernel(
    k, v, out_k, out_v, factors, places, k_b, k_h, k_s, v_b, v_h, v_s, H, S,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, start = tl.program_id(0), tl.program_id(1) * BLOCK
    factor, place = tl.load(factors + head), tl.load(places + head).to(tl.int64)
    blocks = (S + factor - 1) // factor
    if start < blocks:
        b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
        block = start + tl.arange(0, BLOCK)
        there = (tl.arange(0, DP) < D)[None, :]
        sum_k = tl.zeros((BLOCK, DP), tl.float32)
        sum_v = tl.zeros((BLOCK, DP), tl.float32)
        for i in range(factor):
            inside = (block * factor + i < S)[:, None] & there
            sum_k += _rows(k + b * k_b + h * k_h, block * factor + i, k_s, inside, DP)
            sum_v += _rows(v + b * v_b + h * v_h, block * factor + i, v_s, inside, DP)
        count = tl.maximum(tl.minimum(factor, S - block * factor), 1).to(tl.float32)[:, None]
        inside = (block < blocks)[:, None] & there
        put(sum_k / count, out_k + place * D, start, D, inside, DP, BLOCK)
        put(sum_v / count, out_v + place * D, start, D, inside, DP, BLOCK)


@triton.jit
def _spread_kernel(
    dk, dv, out_k, out_v, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, H, S, factor,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, start = tl.program_id(0), tl.program_id(1) * BLOCK
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    row = start + tl.arange(0, BLOCK)
    block = row // factor
    inside = (row < S)[:, None] & (tl.arange(0, DP) < D)[None, :]
    count = tl.maximum(tl.minimum(factor, S - block * factor), 1).to(tl.float32)[:, None]
    e_k = _rows(dk + b * k_b + h * k_h, block, k_s, inside, DP) / count
    e_v = _rows(dv + b * v_b + h * v_h, block, v_s, inside, DP) / count
    put(e_k, out_k + b * o_b + h * o_h, start, o_s, inside, DP, BLOCK)
    put(e_v, out_v + b * o_b + h * o_h, start, o_s, inside, DP, BLOCK)
