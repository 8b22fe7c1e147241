"""Attention-SH: keys and values of all heads are pooled at once, in Triton.

Blocks of all heads lie one after the other, sample by sample. Three routes lead from there to
torch's fused kernels. "packed": every head of every sample is a sequence of its own length for one
call of flash attention; the host has little to do. "in turn": a call for all heads of a factor,
then the next; the device has less to do, since its kernels for this are faster. "parallel": these
calls beside each other, each with all that goes before and after it, in a captured CUDA graph.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from dualform.attention.kernels_tiles import put, rows_of
from dualform.private import flash_attention

SHORT = 4096
"""Queries below which the host is slower than the device, unless a CUDA graph is captured."""
BLOCK = 64
"""Rows of a tile."""
MEANS = 16
"""The same where each is the mean of several."""


class Layout(NamedTuple):
    """Where the blocks of each head lie among all rows."""

    factors: tuple[int, ...]
    shape: tuple[int, int]
    """Samples, and heads of a factor."""
    blocks: tuple[int, ...]
    """(factors,) blocks of a head; 0 where its keys are read as they are."""
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
    route = route or _route(q)
    layout, short_layout = layouts_of(tuple(q.shape[:3]), k.shape[2], factors, q.device)
    q, k, v = (rows_of(x) for x in (q, k, v))
    if route == "parallel":
        return cast(Tensor, _Parallel.apply(q, k, v, short_layout, scale))
    if route == "packed":
        k, v = _Pool.apply(k, v, layout, True)
        return _packed(q, k, v, layout, scale)
    short, count = _Pool.apply(k, v, layout, False), len(factors)
    groups = zip(q.chunk(count, 1), short[:count], short[count:], strict=True)
    return torch.cat([scaled_dot_product_attention(*group, scale=scale) for group in groups], 1)


def _route(q: Tensor) -> str:
    if torch.cuda.current_stream(q.device) != torch.cuda.default_stream(q.device):
        return "parallel"  # where graphs are captured, and warmed up, which must go the same way
    return "packed" if q.shape[-2] < SHORT else "in turn"


def _packed(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None) -> Tensor:
    rows = (x.unsqueeze(1) for x in (q.contiguous().flatten(0, 2), k, v))
    y: Tensor = flash_attention(
        *rows, layout.queries, layout.keys, q.shape[-2], max(layout.blocks), 0.0, False, False,
        scale=scale,
    )[0]  # fmt: skip
    return y.view(*q.shape[:-1], v.shape[-1])


Streams: TypeAlias = tuple[torch.cuda.Stream | None, ...]
"""One for each factor; None is the stream that all else is on."""


def _streams(q: Tensor, factors: tuple[int, ...]) -> Streams:
    if not q.is_cuda:
        return (None,) * len(factors)
    return _streams_beside(torch.cuda.current_stream(q.device), factors)


@cache
def _streams_beside(here: torch.cuda.Stream, factors: tuple[int, ...]) -> Streams:
    """Streams for the work of `here` alone: what is freed on them is used again only after it.

    The longest calls give way, and fill what the others leave.
    """
    longest = min(factors)
    return tuple(torch.cuda.Stream(here.device, priority=-(s > longest)) for s in factors)


def _part(streams: Iterable[torch.cuda.Stream | None]) -> None:
    """Each stream goes on from here."""
    for stream in filter(None, streams):
        stream.wait_stream(torch.cuda.current_stream(stream.device))


def _meet(streams: Streams) -> None:
    """Here goes on from all streams."""
    for stream in filter(None, streams):
        torch.cuda.current_stream(stream.device).wait_stream(stream)


@lru_cache(maxsize=64)
def layouts_of(
    shape: tuple[int, ...], S: int, factors: tuple[int, ...], device: torch.device
) -> tuple[Layout, Layout]:
    """Layouts for queries of shape (B, H, L): of all heads, and of those that are pooled.

    Made once, and both, since they are copied to the device, which a graph being captured forbids.

    ```python
    layouts_of((2, 8, 100), 100, (1, 2, 4, 8), torch.device("cuda"))
    ```
    """
    blocks = tuple(-(-S // s) for s in factors)
    short = tuple(n if s > 1 else 0 for n, s in zip(blocks, factors, strict=True))
    return _layout(shape, factors, blocks, device), _layout(shape, factors, short, device)


def _layout(
    shape: tuple[int, ...], factors: tuple[int, ...], blocks: tuple[int, ...], device: torch.device
) -> Layout:
    B, H, L = shape
    heads = H // len(factors)
    each, lengths = ([x for x in xs for _ in range(heads)] * B for xs in (factors, blocks))
    tables = each, [L * n for n in range(B * H + 1)], [0, *accumulate(lengths)]
    ints = (torch.tensor(x, dtype=torch.int32, device=device) for x in tables)
    return Layout(factors, (B, heads), blocks, *ints)


class _Parallel(torch.autograd.Function):
    """All calls, each on its stream, where its parts of the whole tensors are written too.

    What torch keeps of a call for its backward pass hangs on its output, which is saved here.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None
    ) -> Tensor:
        y, streams = torch.empty_like(q), _streams(q, layout.factors)
        parts, leaves = [], _leaves(q, k, v, layout, streams)
        for stream, group, out in zip(streams, leaves, y.chunk(len(streams), 1), strict=True):
            with torch.cuda.stream(stream):
                with torch.enable_grad():
                    parts.append(scaled_dot_product_attention(*group, scale=scale))
                _copy(parts[-1], out)
        _meet(streams)
        ctx.save_for_backward(*parts, *chain(*leaves))
        ctx.layout, ctx.streams, ctx.shapes = layout, streams, (q.shape, k.shape, v.shape)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        count, saved = len(ctx.streams), ctx.saved_tensors
        wholes = [dy.new_empty(shape) for shape in ctx.shapes]
        split = [x.chunk(count, 1) for x in (dy, *wholes)]
        _part(ctx.streams)
        for i in reversed(range(count)):
            e, out_q, out_k, out_v = (x[i] for x in split)
            leaves = saved[count + 3 * i : count + 3 * i + 3]
            with torch.cuda.stream(ctx.streams[i]):
                dq, dk, dv = torch.autograd.grad(saved[i], leaves, e, retain_graph=True)
                _copy(dq, out_q)
                _spread(dk, dv, out_k, out_v, ctx.layout.factors[i])
        _meet(ctx.streams)
        return (*wholes, None, None)


def _leaves(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, streams: Streams
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of each factor's heads; calls without pooling do not wait for it."""
    pools = [factor > 1 for factor in layout.factors]
    _part(stream for stream, waits in zip(streams, pools, strict=True) if not waits)
    short = [layout.groups(x) for x in _pooled(k, v, layout)]
    _part(stream for stream, waits in zip(streams, pools, strict=True) if waits)
    groups = zip(pools, *(x.chunk(len(pools), 1) for x in (q, k, v)), *short, strict=True)
    return [
        (_leaf(q), *((_leaf(short_k), _leaf(short_v)) if pooled else (_leaf(k), _leaf(v))))
        for pooled, q, k, v, short_k, short_v in groups
    ]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _copy(x: Tensor, out: Tensor) -> None:
    """Eight bytes at a time, where torch would take two."""
    out.view(torch.int64).copy_(rows_of(x).view(torch.int64))


class _Pool(torch.autograd.Function):
    """Pooled keys and values: all rows if `packed`, else a view for each factor."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, layout: Layout, packed: bool) -> tuple[Tensor, ...]:
        ctx.layout, ctx.shape, ctx.packed = layout, k.shape, packed
        rows = _pooled(k, v, layout)
        return rows if packed else (*layout.groups(rows[0]), *layout.groups(rows[1]))

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


def _pooled(k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Means of blocks, where the layout has them."""
    B, H, S, D = k.shape
    count = B * layout.shape[1] * sum(layout.blocks)
    out_k, out_v = k.new_empty(count, D), v.new_empty(count, D)
    _pool_kernel[(B * H, triton.cdiv(max(layout.blocks), MEANS))](
        k, v, out_k, out_v, layout.each, layout.keys, *k.stride()[:3], *v.stride()[:3],
        H, S, **_options(D, MEANS)
    )  # fmt: skip
    return out_k, out_v


def _spread(dk: Tensor, dv: Tensor, out_k: Tensor, out_v: Tensor, factor: int) -> None:
    """The gradient of a block's mean, shared out among its keys."""
    dk, dv = rows_of(dk), rows_of(dv)
    B, H, S, D = out_k.shape
    _spread_kernel[(B * H, triton.cdiv(S, BLOCK))](
        dk, dv, out_k, out_v, *dk.stride()[:3], *dv.stride()[:3], *out_k.stride()[:3],
        H, S, factor, **_options(D, BLOCK)
    )  # fmt: skip


def _options(D: int, rows: int) -> dict[str, int]:
    return {"D": D, "DP": triton.next_power_of_2(D), "BLOCK": rows, "num_warps": 4}


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
    blocks = (tl.load(places + head + 1) - place).to(tl.int32)
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
