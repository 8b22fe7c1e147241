"""Attention-SH in few launches: keys and values of all heads are pooled at once, in Triton.

Two routes lead from there to the fused kernels. "packed": every head of every sample is a sequence
of its own length for one call of flash attention. "grouped": one call for all heads of a factor.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention


class Layout(NamedTuple):
    """Where the blocks of each head lie among all rows, and the lengths flash attention asks
    for."""

    factors: Tensor
    """(B·H,) keys in a block."""
    places: Tensor
    """(B·H,) the first row of a head's blocks."""
    lengths: tuple[int, ...]
    """(factors,) blocks of a head."""
    rows: int
    queries: Tensor
    """(B·H + 1,) cumulative lengths."""
    keys: Tensor


def scaled_heads_attention(
    q: Tensor, k: Tensor, v: Tensor, factors: tuple[int, ...], scale: float | None, route: str = ""
) -> Tensor:
    """Attention of each head to the means of its factor's blocks.

    ```python
    y = scaled_heads_attention(q, k, v, factors=(1, 2, 4, 8), scale=None)
    ```
    """
    route = route or ("packed" if q.shape[-2] < 2048 else "grouped")
    layout = layout_of(route, tuple(q.shape[:3]), k.shape[2], factors, q.device)
    pooled: tuple[Tensor, Tensor] = _Pool.apply(k, v, layout)
    if route == "packed":
        return _packed(q, *pooled, layout, scale)
    return _grouped(q, *pooled, layout, scale)


def _packed(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None) -> Tensor:
    rows = (x.unsqueeze(1) for x in (q.contiguous().flatten(0, 2), k, v))
    y: Tensor = torch.ops.aten._flash_attention_forward(
        *rows, layout.queries, layout.keys, q.shape[-2], max(layout.lengths), 0.0, False, False,
        scale=scale,
    )[0]  # fmt: skip
    return y.view(*q.shape[:-1], v.shape[-1])


def _grouped(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None) -> Tensor:
    parts = len(layout.lengths)
    shape = (q.shape[0], q.shape[1] // parts)
    sizes = [shape[0] * shape[1] * length for length in layout.lengths]
    groups = zip(q.chunk(parts, 1), k.split(sizes), v.split(sizes), layout.lengths, strict=True)
    outputs = [
        scaled_dot_product_attention(
            q, k.view(*shape, length, -1), v.view(*shape, length, -1), scale=scale
        )
        for q, k, v, length in groups
    ]
    return torch.cat(outputs, 1)


@lru_cache(maxsize=64)
def layout_of(
    route: str, shape: tuple[int, ...], S: int, factors: tuple[int, ...], device: torch.device
) -> Layout:
    """The layout for queries of shape (B, H, L); made once, since it is copied to the device.

    ```python
    layout_of("packed", (2, 8, 100), 100, (1, 2, 4, 8), torch.device("cuda"))
    ```
    """
    B, H, L = shape
    lengths = tuple(-(-S // s) for s in factors)
    share = H // len(factors)
    of_heads = torch.tensor(lengths).repeat_interleave(share).repeat(B)
    if route == "packed":
        places = of_heads.cumsum(0) - of_heads
    else:  # all heads of a factor together, sample by sample
        starts = (torch.tensor(lengths) * B * share).cumsum(0) - torch.tensor(lengths) * B * share
        inner = torch.arange(B)[:, None, None] * share + torch.arange(share)
        places = (starts[:, None] + inner * torch.tensor(lengths)[:, None]).flatten()
    each = torch.tensor(factors).repeat_interleave(share).repeat(B)
    ends = torch.cat([torch.zeros(1, dtype=torch.long), of_heads.cumsum(0)])
    ints = (each, places, torch.arange(B * H + 1) * L, ends)
    each, places, queries, keys = (x.to(device, torch.int32) for x in ints)
    return Layout(each, places, lengths, int(of_heads.sum()), queries, keys)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        B, H, S, D = k.shape
        out_k, out_v = (x.new_empty(layout.rows, D) for x in (k, v))
        grid = (B * H, triton.cdiv(max(layout.lengths), 16))
        _pool_kernel[grid](
            k, v, out_k, out_v, layout.factors, layout.places, *k.stride()[:3], *v.stride()[:3],
            H, S, D=D, DP=triton.next_power_of_2(D), BLOCK=16, num_warps=2
        )  # fmt: skip
        ctx.layout, ctx.shape = layout, k.shape
        return out_k, out_v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        B, H, S, D = ctx.shape
        dk, dv = dk.contiguous(), dv.contiguous()
        out_k, out_v = dk.new_empty(ctx.shape), dv.new_empty(ctx.shape)
        layout, padded = ctx.layout, triton.next_power_of_2(D)
        block = max(16, 4096 // padded)
        _spread_kernel[(B * H, triton.cdiv(S, block))](
            dk, dv, out_k, out_v, layout.factors, layout.places, S, D=D, DP=padded, BLOCK=block,
            num_warps=4
        )  # fmt: skip
        return out_k, out_v, None


@triton.jit
def _pool_kernel(
    k, v, out_k, out_v, factors, places,
    k_b, k_h, k_s, v_b, v_h, v_s, H, S,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    factor, place = tl.load(factors + head), tl.load(places + head).to(tl.int64)
    blocks = (S + factor - 1) // factor
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * BLOCK < blocks:
        b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
        columns = tl.arange(0, DP)
        k += b * k_b + h * k_h
        v += b * v_b + h * v_h
        sum_k = tl.zeros((BLOCK, DP), tl.float32)
        sum_v = tl.zeros((BLOCK, DP), tl.float32)
        for i in range(factor):
            row = block * factor + i
            inside = (row < S)[:, None] & (columns < D)[None, :]
            from_k = k + row[:, None] * k_s + columns[None, :]
            from_v = v + row[:, None] * v_s + columns[None, :]
            sum_k += tl.load(from_k, mask=inside, other=0.0).to(tl.float32)
            sum_v += tl.load(from_v, mask=inside, other=0.0).to(tl.float32)
        count = tl.maximum(tl.minimum(factor, S - block * factor), 1).to(tl.float32)[:, None]
        inside = (block < blocks)[:, None] & (columns < D)[None, :]
        to = (place + block)[:, None] * D + columns[None, :]
        tl.store(out_k + to, (sum_k / count).to(out_k.dtype.element_ty), mask=inside)
        tl.store(out_v + to, (sum_v / count).to(out_v.dtype.element_ty), mask=inside)


@triton.jit
def _spread_kernel(
    dk, dv, out_k, out_v, factors, places, S,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    factor, place = tl.load(factors + head), tl.load(places + head).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, DP)
    block = row // factor
    count = tl.maximum(tl.minimum(factor, S - block * factor), 1).to(tl.float32)[:, None]
    inside = (row < S)[:, None] & (columns < D)[None, :]
    at = (place + block)[:, None] * D + columns[None, :]
    to = (head * S + row)[:, None] * D + columns[None, :]
    e_k = tl.load(dk + at, mask=inside, other=0.0).to(tl.float32) / count
    e_v = tl.load(dv + at, mask=inside, other=0.0).to(tl.float32) / count
    tl.store(out_k + to, e_k.to(out_k.dtype.element_ty), mask=inside)
    tl.store(out_v + to, e_v.to(out_v.dtype.element_ty), mask=inside)
