"""Attention-BN's queries in one launch forward and one backward, in Triton.

Forward, q' = (q − βμ) r with r = 1/(σ² + ε). A program owns some rows of one head and takes the
statistics of all of its keys: heads are many, and what few programs read twice lies in the cache.

Backward, with sums over the head's rows: dq = r dq', and as Σ_i dq'_i ∘ q'_i = Σ_j dk_j ∘ k_j
(both are scale Σ_ij dS_ij q'_i ∘ k_j, dS the gradient of the logits), neither q nor q' is read
again:
    dμ = −β r Σ_i dq'_i,   dσ² = −r Σ_j dk_j ∘ (k_j − μ),   dk_j += dμ/S + 2 dσ² (k_j − μ)/S,
where μ could be taken off since Σ_j dS_ij = 0. It holds for keys that go nowhere but into
attention.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PROGRAMS = 264
"""Enough to fill the largest devices twice; heads are divided among several programs up to this."""


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
        q, kept = rows_of(q), rows_of(k)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        heads = q.shape[0] * q.shape[1]
        moments = torch.empty(2, heads, q.shape[-1], dtype=torch.float32, device=q.device)
        launch = _launch(q, kept)
        _forward_kernel[launch["grid"]](
            q, kept, out, moments, *q.stride()[:3], *kept.stride()[:3], *out.stride()[:3],
            q.shape[1], q.shape[2], k.shape[2], beta, eps, heads, D=q.shape[-1], **launch["options"]
        )  # fmt: skip
        ctx.save_for_backward(kept, moments)
        ctx.beta = beta
        return out, k.view_as(k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        k, moments = ctx.saved_tensors
        dq, dk = rows_of(dq), rows_of(dk)
        new_q, new_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (dq, dk))
        launch = _launch(dq, k)
        _backward_kernel[launch["grid"]](
            dq, k, dk, new_q, new_k, moments, *dq.stride()[:3], *k.stride()[:3], *dk.stride()[:3],
            *new_q.stride()[:3], *new_k.stride()[:3],
            dq.shape[1], dq.shape[2], k.shape[2], ctx.beta, moments.shape[1], D=dq.shape[-1],
            **launch["options"]
        )  # fmt: skip
        return new_q, new_k, None, None


def rows_of(x: Tensor) -> Tensor:
    """x with the numbers of a row side by side, as the kernels read them.

    >>> rows_of(torch.ones(2, 3).T).stride()
    (2, 1)
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(q: Tensor, k: Tensor) -> dict[str, Any]:
    heads, longest = q.shape[0] * q.shape[1], max(q.shape[2], k.shape[2])
    splits = max(1, min(-(-PROGRAMS // heads), -(-longest // 256)))
    padded = triton.next_power_of_2(q.shape[-1])
    options = {"DP": padded, "BLOCK": max(16, 8192 // padded), "num_warps": 8}
    return {"grid": (heads, splits), "options": options}


@triton.jit
def tile(pointer, start, end, stride, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK, DP) rows from start on in float32, and which are there; 0 from `end` on."""
    rows = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, DP)
    inside = (rows < end)[:, None] & (columns < D)[None, :]
    places = rows[:, None] * stride + columns[None, :]
    return tl.load(pointer + places, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def _forward_kernel(
    q, k, out, moments,
    q_b, q_h, q_s, k_b, k_h, k_s, o_b, o_h, o_s,
    H, L, S, beta, eps, heads,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    columns = tl.arange(0, DP)
    k += b * k_b + h * k_h
    first = tl.load(k + columns, mask=columns < D, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK, DP), tl.float32)
    squares = tl.zeros((BLOCK, DP), tl.float32)
    for start in tl.range(0, S, BLOCK):
        x, inside = tile(k, start, S, k_s, D, DP, BLOCK)
        x = tl.where(inside, x - first[None, :], 0.0)
        total += x
        squares += x * x
    apart = tl.sum(total, 0) / S
    variance = tl.maximum(tl.sum(squares, 0) / S - apart * apart, 0.0)
    mean = first + apart
    r = 1.0 / (variance + eps)
    if tl.program_id(1) == 0:
        tl.store(moments + head * D + columns, mean, mask=columns < D)
        tl.store(moments + (heads + head) * D + columns, r, mask=columns < D)
    q += b * q_b + h * q_h
    out += b * o_b + h * o_h
    for start in tl.range(tl.program_id(1) * BLOCK, L, tl.num_programs(1) * BLOCK):
        x, inside = tile(q, start, L, q_s, D, DP, BLOCK)
        places = (start + tl.arange(0, BLOCK))[:, None] * o_s + columns[None, :]
        value = (x - beta * mean[None, :]) * r[None, :]
        tl.store(out + places, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dq, k, dk, new_q, new_k, moments,
    q_b, q_h, q_s, k_b, k_h, k_s, d_b, d_h, d_s, nq_b, nq_h, nq_s, nk_b, nk_h, nk_s,
    H, L, S, beta, heads,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    columns = tl.arange(0, DP)
    mean = tl.load(moments + head * D + columns, mask=columns < D, other=0.0)
    r = tl.load(moments + (heads + head) * D + columns, mask=columns < D, other=0.0)
    dq += b * q_b + h * q_h
    k += b * k_b + h * k_h
    dk += b * d_b + h * d_h
    new_q += b * nq_b + h * nq_h
    new_k += b * nk_b + h * nk_h

    total = tl.zeros((BLOCK, DP), tl.float32)
    for start in tl.range(0, L, BLOCK):
        x, inside = tile(dq, start, L, q_s, D, DP, BLOCK)
        total += x
        if (start // BLOCK) % tl.num_programs(1) == tl.program_id(1):
            places = (start + tl.arange(0, BLOCK))[:, None] * nq_s + columns[None, :]
            tl.store(new_q + places, (x * r[None, :]).to(new_q.dtype.element_ty), mask=inside)
    products = tl.zeros((BLOCK, DP), tl.float32)
    for start in tl.range(0, S, BLOCK):
        x, inside = tile(k, start, S, k_s, D, DP, BLOCK)
        e, inside = tile(dk, start, S, d_s, D, DP, BLOCK)
        products += tl.where(inside, e * (x - mean[None, :]), 0.0)
    d_mean = -beta * r * tl.sum(total, 0) / S
    d_variance = -2.0 * r * tl.sum(products, 0) / S

    for start in tl.range(tl.program_id(1) * BLOCK, S, tl.num_programs(1) * BLOCK):
        x, inside = tile(k, start, S, k_s, D, DP, BLOCK)
        e, inside = tile(dk, start, S, d_s, D, DP, BLOCK)
        places = (start + tl.arange(0, BLOCK))[:, None] * nk_s + columns[None, :]
        value = e + d_mean[None, :] + d_variance[None, :] * (x - mean[None, :])
        tl.store(new_k + places, value.to(new_k.dtype.element_ty), mask=inside)
