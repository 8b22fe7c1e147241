"""Attention-BN's queries, forward and backward, in Triton.

A head is cut into parts of ROWS rows, one program each: the first launch leaves the sums of each
part, the second adds up those of the head and goes over its rows. Where a head is one part, one
launch does both.

Forward, q' = (q − βμ) r with r = 1/(σ² + ε). Backward, with sums over the head's rows: dq = r dq',
and as Σ_i dq'_i ∘ q'_i = Σ_j dk_j ∘ k_j (both are scale Σ_ij dS_ij q'_i ∘ k_j, dS the gradient of
the logits), neither q nor q' is read again:
    dμ = −β r Σ_i dq'_i,   dσ² = −r Σ_j dk_j ∘ (k_j − μ),   dk_j += dμ/S + 2 dσ² (k_j − μ)/S,
where μ could be taken off since Σ_j dS_ij = 0. It holds for keys that go nowhere but into
attention; so nobody else holds these gradients, and they are changed in place.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualform.attention.kernels_tiles import put, rows_of, tile

ROWS = 1024
"""Rows of a part, while a head has no more than PARTS."""
PARTS = 32
PROGRAMS = 128
"""How many keep a GPU busy: about one for each of its multiprocessors."""


def rewrite(q: Tensor, k: Tensor, beta: float, eps: float) -> tuple[Tensor, Tensor]:
    """(q', k) with q' = (q − βμ)/(σ² + ε); the keys pass through, so that their gradients meet.

    ```python
    q, k = rewrite(q, k, beta=1.0, eps=1e-5)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    ```
    """
    result: tuple[Tensor, Tensor] = _Rewrite.apply(q, k, beta, eps)
    return result


class _Rewrite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, beta: float, eps: float) -> tuple[Tensor, Tensor]:
        q, kept, out = rows_of(q), rows_of(k), torch.empty_like(q)
        launches, sizes, sums = _launches(q, kept)
        moments = torch.empty_like(sums[:, 0])
        for kernel_options in launches:
            _forward_kernel[sums.shape[:2]](
                q, kept, out, sums, moments, *q.stride()[:3], *kept.stride()[:3],
                *out.stride()[:3], *sizes, beta, eps, **kernel_options
            )  # fmt: skip
        ctx.save_for_backward(kept, moments)
        ctx.beta = beta
        return out, k.view_as(k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        k, moments = ctx.saved_tensors
        dq, dk = rows_of(dq), rows_of(dk)
        launches, sizes, sums = _launches(dq, k)
        for kernel_options in launches:
            _backward_kernel[sums.shape[:2]](
                dq, k, dk, sums, moments, *dq.stride()[:3], *k.stride()[:3], *dk.stride()[:3],
                *sizes, ctx.beta, **kernel_options
            )  # fmt: skip
        return dq, dk, None, None


def _launches(q: Tensor, k: Tensor) -> tuple[list[dict[str, Any]], tuple[int, ...], Tensor]:
    """Options of one or two launches; heads, lengths and rows of a part; room for the sums."""
    (B, H, L, D), S = q.shape, k.shape[2]
    padded = triton.next_power_of_2(D)
    block = max(16, 8192 // padded)
    rows = _rows(B * H, max(L, S), block)
    parts = triton.cdiv(max(L, S), rows)
    shapes = {"D": D, "DP": padded, "BLOCK": block, "num_warps": 8}
    shapes["PARTS"] = triton.next_power_of_2(parts)
    steps = [(True, True)] if parts == 1 else [(True, False), (False, True)]
    launches = [{"FIRST": first, "SECOND": second, **shapes} for first, second in steps]
    sums = torch.empty(B * H, parts, 2, D, dtype=torch.float32, device=q.device)
    return launches, (H, L, S, rows), sums


def _rows(heads: int, length: int, block: int) -> int:
    """Rows of a part; fewer than ROWS where long heads are too few to keep a GPU busy."""
    rows = ROWS * int(triton.cdiv(length, ROWS * PARTS))
    most = min(PARTS, PROGRAMS // heads) if length >= ROWS else 1
    while rows > block and triton.cdiv(length, rows // 2) <= most:
        rows //= 2
    return rows


@triton.jit
def _pair(pointer, D: tl.constexpr, DP: tl.constexpr):
    columns = tl.arange(0, DP)
    first = tl.load(pointer + columns, mask=columns < D, other=0.0)
    return first, tl.load(pointer + D + columns, mask=columns < D, other=0.0)


@triton.jit
def _put_pair(first, second, pointer, D: tl.constexpr, DP: tl.constexpr):
    columns = tl.arange(0, DP)
    tl.store(pointer + columns, first, mask=columns < D)
    tl.store(pointer + D + columns, second, mask=columns < D)


@triton.jit
def _added(sums, head, parts, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr):
    """Both sums over all parts of a head."""
    sums += head * parts * 2 * D
    first, _ = tile(sums, 0, parts, 2 * D, D, DP, PARTS)
    second, _ = tile(sums + D, 0, parts, 2 * D, D, DP, PARTS)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _forward_kernel(
    q, k, out, sums, moments,
    q_b, q_h, q_s, k_b, k_h, k_s, o_b, o_h, o_s,
    H, L, S, rows, beta, eps, FIRST: tl.constexpr, SECOND: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    head, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    out += b * o_b + h * o_h
    begin = part * rows
    last_q, last_k = tl.minimum(begin + rows, L), tl.minimum(begin + rows, S)
    columns = tl.arange(0, DP)
    # Measured from the first key, which changes nothing but the rounding.
    first = tl.load(k + columns, mask=columns < D, other=0.0).to(tl.float32)
    total = tl.zeros((DP,), tl.float32)
    squares = tl.zeros((DP,), tl.float32)
    if FIRST:
        x_sum = tl.zeros((BLOCK, DP), tl.float32)
        xx_sum = tl.zeros((BLOCK, DP), tl.float32)
        for start in tl.range(begin, last_k, BLOCK, loop_unroll_factor=2):
            x, inside = tile(k, start, last_k, k_s, D, DP, BLOCK)
            x = tl.where(inside, x - first[None, :], 0.0)
            x_sum += x
            xx_sum += x * x
        total, squares = tl.sum(x_sum, 0), tl.sum(xx_sum, 0)
        if not SECOND:
            _put_pair(total, squares, sums + (head * parts + part) * 2 * D, D, DP)
    if SECOND:
        if not FIRST:
            total, squares = _added(sums, head, parts, D, DP, PARTS)
        apart = total / S
        mean = first + apart
        r = 1.0 / (tl.maximum(squares / S - apart * apart, 0.0) + eps)
        if part == 0:
            _put_pair(mean, r, moments + head * 2 * D, D, DP)
        for start in tl.range(begin, last_q, BLOCK):
            x, inside = tile(q, start, last_q, q_s, D, DP, BLOCK)
            put((x - beta * mean[None, :]) * r[None, :], out, start, o_s, inside, DP, BLOCK)


@triton.jit
def _backward_kernel(
    dq, k, dk, sums, moments,
    q_b, q_h, q_s, k_b, k_h, k_s, d_b, d_h, d_s,
    H, L, S, rows, beta, FIRST: tl.constexpr, SECOND: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    head, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    dq += b * q_b + h * q_h
    k += b * k_b + h * k_h
    dk += b * d_b + h * d_h
    begin = part * rows
    last_q, last_k = tl.minimum(begin + rows, L), tl.minimum(begin + rows, S)
    mean, r = _pair(moments + head * 2 * D, D, DP)
    total = tl.zeros((DP,), tl.float32)
    products = tl.zeros((DP,), tl.float32)
    if FIRST:
        e_sum = tl.zeros((BLOCK, DP), tl.float32)
        for start in tl.range(begin, last_q, BLOCK):
            e, inside = tile(dq, start, last_q, q_s, D, DP, BLOCK)
            e_sum += e
            put(e * r[None, :], dq, start, q_s, inside, DP, BLOCK)
        total = tl.sum(e_sum, 0)
        ex_sum = tl.zeros((BLOCK, DP), tl.float32)
        for start in tl.range(begin, last_k, BLOCK, loop_unroll_factor=2):
            x, _ = tile(k, start, last_k, k_s, D, DP, BLOCK)
            e, _ = tile(dk, start, last_k, d_s, D, DP, BLOCK)
            ex_sum += e * (x - mean[None, :])
        products = tl.sum(ex_sum, 0)
        if not SECOND:
            _put_pair(total, products, sums + (head * parts + part) * 2 * D, D, DP)
    if SECOND:
        if not FIRST:
            total, products = _added(sums, head, parts, D, DP, PARTS)
        by_mean, by_variance = beta * r * total / S, 2.0 * r * products / S
        blocks = tl.cdiv(last_k - begin, BLOCK)
        for i in tl.range(0, blocks):
            start = begin + (blocks - 1 - i) * BLOCK  # what was read last the cache still holds
            x, inside = tile(k, start, last_k, k_s, D, DP, BLOCK)
            e, _ = tile(dk, start, last_k, d_s, D, DP, BLOCK)
            e -= by_mean[None, :] + by_variance[None, :] * (x - mean[None, :])
            put(e, dk, start, d_s, inside, DP, BLOCK)
