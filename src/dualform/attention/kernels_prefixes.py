"""Attention-BN's causal queries in one launch forward and two backward, in Triton.

q'_i = (q_i − βμ_i) r_i with the statistics of the keys up to i. A program owns consecutive blocks
of one head: it sums the keys before them once, then goes on block by block with running sums.

Backward, with n_i = i + 1: dq_i = r_i dq'_i, dμ_i = −β r_i dq'_i, dσ²_i = −r_i dq'_i ∘ q'_i, and

    dk_j += Σ_{i ≥ j} a_i + k_j ∘ Σ_{i ≥ j} b_i,   b_i = 2 dσ²_i/n_i,   a_i = dμ_i/n_i − b_i ∘ μ_i.

The first launch leaves each block's sums of a and b and the statistics it starts from; the second
adds up those of later blocks. Keys are measured from the first one, which changes nothing but the
rounding.
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

PROGRAMS = 264
"""Enough to fill the largest devices twice; heads are divided among several programs up to this."""


def rewrite_causal(q: Tensor, k: Tensor, beta: float, eps: float) -> tuple[Tensor, Tensor]:
    """(q', k) with q'_i = (q_i − βμ_i)/(σ²_i + ε) over the keys up to i; as many queries as keys.

    ```python
    q, k = rewrite_causal(q, k, beta=1.0, eps=1e-5)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    ```
    """
    result: tuple[Tensor, Tensor] = _Rewrite.apply(q, k, beta, eps)
    return result


class _Rewrite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, beta: float, eps: float) -> tuple[Tensor, Tensor]:
        q, kept = rows_of(q), rows_of(k)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        grid, sizes, options = _launch(q)
        _forward_kernel[grid](
            q, kept, out, *q.stride()[:3], *kept.stride()[:3], *out.stride()[:3], *sizes,
            beta, eps, **options
        )  # fmt: skip
        ctx.save_for_backward(out, kept)
        ctx.beta, ctx.eps = beta, eps
        return out, k.view_as(k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, k = ctx.saved_tensors
        dq, dk = rows_of(dq), rows_of(dk)
        new_q, new_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (dq, dk))
        grid, sizes, options = _launch(q)
        blocks = triton.cdiv(q.shape[2], options["BLOCK"])
        parts = torch.empty(4, grid[0], blocks, q.shape[-1], dtype=torch.float32, device=q.device)
        strides = [*q.stride()[:3], *k.stride()[:3], *dq.stride()[:3]]
        _sums_kernel[grid](
            q, k, dq, new_q, parts, *strides, *new_q.stride()[:3], *sizes, blocks, ctx.beta,
            ctx.eps, **options
        )  # fmt: skip
        _keys_kernel[(grid[0], blocks)](
            q, k, dq, dk, new_k, parts, *strides, *dk.stride()[:3], *new_k.stride()[:3],
            sizes[0], sizes[1], blocks, ctx.beta, ctx.eps, **options
        )  # fmt: skip
        return new_q, new_k, None, None


def _launch(q: Tensor) -> tuple[tuple[int, int], tuple[int, int, int], dict[str, int]]:
    """The grid, (heads, length, rows of a program), and the shapes of tiles."""
    heads, N = q.shape[0] * q.shape[1], q.shape[2]
    padded = triton.next_power_of_2(q.shape[-1])
    block = max(16, 4096 // padded)
    splits = max(1, min(-(-PROGRAMS // heads), -(-N // 256)))
    chunk = triton.cdiv(triton.cdiv(N, splits), block) * block
    options = {"D": q.shape[-1], "DP": padded, "BLOCK": block, "num_warps": 8}
    return (heads, triton.cdiv(N, chunk)), (q.shape[1], N, chunk), options


@triton.jit
def _first(k, D: tl.constexpr, DP: tl.constexpr):
    columns = tl.arange(0, DP)
    return tl.load(k + columns, mask=columns < D, other=0.0).to(tl.float32)


@triton.jit
def _apart(
    k, first, start, N, stride, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Keys from `start` on, measured from the first; 0 after the end."""
    x, inside = tile(k, start, N, stride, D, DP, BLOCK)
    return tl.where(inside, x - first[None, :], 0.0), inside


@triton.jit
def _before(k, first, end, stride, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr):
    """Sum and sum of squares of the keys before `end`."""
    total = tl.zeros((BLOCK, DP), tl.float32)
    squares = tl.zeros((BLOCK, DP), tl.float32)
    for start in tl.range(0, end, BLOCK):
        x, _ = _apart(k, first, start, end, stride, D, DP, BLOCK)
        total += x
        squares += x * x
    return tl.sum(total, 0), tl.sum(squares, 0)


@triton.jit
def _moments(x, total, squares, start, eps, BLOCK: tl.constexpr):
    """Means, 1/(σ² + ε) and numbers of the keys up to each row of a block."""
    n = (start + tl.arange(0, BLOCK) + 1).to(tl.float32)[:, None]
    mean = (total[None, :] + tl.cumsum(x, 0)) / n
    variance = (squares[None, :] + tl.cumsum(x * x, 0)) / n - mean * mean
    r = tl.where(n > 1, 1.0 / (tl.maximum(variance, 0.0) + eps), 0.0)
    return mean, r, n


@triton.jit
def _shares(mean, r, n, dq, q, beta):
    """a and b: what a row's statistics give to the gradient of every key before it."""
    b = -2.0 * r * dq * q / n
    return -beta * r * dq / n - b * mean, b


@triton.jit
def _forward_kernel(
    q, k, out,
    q_b, q_h, q_s, k_b, k_h, k_s, o_b, o_h, o_s,
    H, N, chunk, beta, eps,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    out += b * o_b + h * o_h
    first = _first(k, D, DP)
    begin = tl.program_id(1) * chunk
    total, squares = _before(k, first, begin, k_s, D, DP, BLOCK)
    for start in tl.range(begin, tl.minimum(begin + chunk, N), BLOCK):
        x, inside = _apart(k, first, start, N, k_s, D, DP, BLOCK)
        mean, r, _ = _moments(x, total, squares, start, eps, BLOCK)
        value, inside = tile(q, start, N, q_s, D, DP, BLOCK)
        value = (value - beta * (first[None, :] + mean)) * r
        put(value, out, start, o_s, inside, DP, BLOCK)
        total += tl.sum(x, 0)
        squares += tl.sum(x * x, 0)


@triton.jit
def _sums_kernel(
    q, k, dq, new_q, parts,
    q_b, q_h, q_s, k_b, k_h, k_s, d_b, d_h, d_s, n_b, n_h, n_s,
    H, N, chunk, blocks, beta, eps,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    dq += b * d_b + h * d_h
    new_q += b * n_b + h * n_h
    columns = tl.arange(0, DP)
    each = tl.num_programs(0).to(tl.int64) * blocks * D
    first = _first(k, D, DP)
    begin = tl.program_id(1) * chunk
    total, squares = _before(k, first, begin, k_s, D, DP, BLOCK)
    for start in tl.range(begin, tl.minimum(begin + chunk, N), BLOCK):
        x, inside = _apart(k, first, start, N, k_s, D, DP, BLOCK)
        mean, r, n = _moments(x, total, squares, start, eps, BLOCK)
        rewritten, inside = tile(q, start, N, q_s, D, DP, BLOCK)
        e, inside = tile(dq, start, N, d_s, D, DP, BLOCK)
        put(e * r, new_q, start, n_s, inside, DP, BLOCK)
        share_a, share_b = _shares(mean, r, n, e, rewritten, beta)
        place = parts + (head.to(tl.int64) * blocks + start // BLOCK) * D + columns
        tl.store(place, total, mask=columns < D)
        tl.store(place + each, squares, mask=columns < D)
        tl.store(place + 2 * each, tl.sum(share_a, 0), mask=columns < D)
        tl.store(place + 3 * each, tl.sum(share_b, 0), mask=columns < D)
        total += tl.sum(x, 0)
        squares += tl.sum(x * x, 0)


@triton.jit
def _keys_kernel(
    q, k, dq, dk, new_k, parts,
    q_b, q_h, q_s, k_b, k_h, k_s, d_b, d_h, d_s, e_b, e_h, e_s, n_b, n_h, n_s,
    H, N, blocks, beta, eps,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    dq += b * d_b + h * d_h
    dk += b * e_b + h * e_h
    new_k += b * n_b + h * n_h
    columns = tl.arange(0, DP)
    each = tl.num_programs(0).to(tl.int64) * blocks * D
    parts += head.to(tl.int64) * blocks * D
    start = block * BLOCK
    first = _first(k, D, DP)
    x, inside = _apart(k, first, start, N, k_s, D, DP, BLOCK)
    here = parts + block * D + columns
    total = tl.load(here, mask=columns < D, other=0.0)
    squares = tl.load(here + each, mask=columns < D, other=0.0)
    mean, r, n = _moments(x, total, squares, start, eps, BLOCK)
    rewritten, inside = tile(q, start, N, q_s, D, DP, BLOCK)
    e, inside = tile(dq, start, N, d_s, D, DP, BLOCK)
    share_a, share_b = _shares(mean, r, n, e, rewritten, beta)
    from_a = tl.sum(share_a, 0)[None, :] - tl.cumsum(share_a, 0) + share_a
    from_b = tl.sum(share_b, 0)[None, :] - tl.cumsum(share_b, 0) + share_b
    later_a = tl.zeros((BLOCK, DP), tl.float32)
    later_b = tl.zeros((BLOCK, DP), tl.float32)
    for other in tl.range(block + 1, blocks, BLOCK):
        part, _ = tile(parts + 2 * each, other, blocks, D, D, DP, BLOCK)
        later_a += part
        part, _ = tile(parts + 3 * each, other, blocks, D, D, DP, BLOCK)
        later_b += part
    from_a += tl.sum(later_a, 0)[None, :]
    from_b += tl.sum(later_b, 0)[None, :]
    value, inside = tile(dk, start, N, e_s, D, DP, BLOCK)
    value += from_a + x * from_b
    put(value, new_k, start, n_s, inside, DP, BLOCK)
