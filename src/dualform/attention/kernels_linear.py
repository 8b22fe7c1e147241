"""Linear attention with φ = elu + 1 in two launches forward and three backward, in Triton.

y_i = φ(q_i) W_i / d_i with the state W_i = Σ_j φ(k_j) v_jᵀ, z_i = Σ_j φ(k_j) and d_i = φ(q_i)·z_i,
over all keys or those up to i. A sequence is cut into parts: one launch leaves the states that the
parts add, the next adds up those a part sees. A causal part goes on tile by tile, by pairs within a
tile and by state from tile to tile.

Backward, with e_i = dy_i/d_i and c_i = −dy_i·y_i/d_i, the gradients of φ(q_i) W_i and of d_i:
    dφ(q_i) = W_i e_i + c_i z_i,   dφ(k_j) = U_j v_j + u_j,   dv_j = U_jᵀ φ(k_j),
where U_j = Σ_i φ(q_i) e_iᵀ and u_j = Σ_i c_i φ(q_i), over the queries that see j, is the same state
from the end; and φ' = min(φ, 1).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 64
"""Rows of a tile."""
PROGRAMS = 512
"""Enough to fill the largest devices; sequences are cut into parts up to this."""


def linear_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """y_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j); as many queries as keys.

    ```python
    y = linear_attention(q, k, v, is_causal=True)
    ```
    """
    y: Tensor = _Linear.apply(*(x.contiguous() for x in (q, k, v)), is_causal)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        grid, rows, options = _launch(q, v)
        y, d = torch.empty_like(v), q.new_empty(q.shape[:-1], dtype=torch.float32)
        states = _states(k, v, grid)
        _states_kernel[grid](k, v, v, d, states, *rows, GRADIENT=False, **options)
        _read_kernel[grid](q, k, v, y, d, states, *rows, CAUSAL=causal, **options)
        ctx.save_for_backward(q, k, v, y, d, states)
        ctx.causal = causal
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, d, states = ctx.saved_tensors
        dy, (grid, rows, options) = dy.contiguous(), _launch(q, v)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        later = _states(q, v, grid)
        _states_kernel[grid](q, dy, y, d, later, *rows, GRADIENT=True, **options)
        options["CAUSAL"] = ctx.causal
        _queries_kernel[grid](q, k, v, y, d, dy, dq, states, *rows, **options)
        _keys_kernel[grid](q, k, v, y, d, dy, dk, dv, later, *rows, **options)
        return dq, dk, dv, None


def _launch(q: Tensor, v: Tensor) -> tuple[tuple[int, int], tuple[int, int], dict[str, Any]]:
    """The grid (heads, parts), (length, rows of a part), and the shapes of tiles."""
    heads, N = q.shape[0] * q.shape[1], q.shape[2]
    parts = max(1, min(triton.cdiv(PROGRAMS, heads), triton.cdiv(N, 4 * BLOCK)))
    rows = triton.cdiv(triton.cdiv(N, parts), BLOCK) * BLOCK
    F, M = q.shape[-1], v.shape[-1]
    padded = {"FP": max(16, triton.next_power_of_2(F)), "MP": max(16, triton.next_power_of_2(M))}
    options = {"F": F, "M": M, **padded, "BLOCK": BLOCK, "num_warps": 4, "num_stages": 2}
    return (heads, triton.cdiv(N, rows)), (N, rows), options


def _states(k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
    """Room for what each part adds to W, and in the last column to z."""
    return torch.empty(*grid, k.shape[-1], v.shape[-1] + 1, dtype=torch.float32, device=k.device)


@triton.jit
def _tile(x, start, N, other, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK, DP) rows of this program's head from start on; `other` after the end."""
    rows = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, DP)
    inside = (rows < N)[:, None] & (columns < D)[None, :]
    x += tl.program_id(0).to(tl.int64) * N * D
    return tl.load(x + rows[:, None] * D + columns[None, :], mask=inside, other=other)


@triton.jit
def _values(v, start, N, M: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr):
    return _tile(v, start, N, 0.0, M, MP, BLOCK)


@triton.jit
def _features(x, start, N, F: tl.constexpr, FP: tl.constexpr, BLOCK: tl.constexpr):
    """φ of a tile, rounded; 0 after the end."""
    x = _tile(x, start, N, float("-inf"), F, FP, BLOCK)
    wide = x.to(tl.float32)
    return (tl.exp(tl.minimum(wide, 0.0)) + tl.maximum(wide, 0.0)).to(x.dtype)


@triton.jit
def _put(value, x, start, N, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr):
    rows = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, DP)
    inside = (rows < N)[:, None] & (columns < D)[None, :]
    x += tl.program_id(0).to(tl.int64) * N * D
    value = value.to(x.dtype.element_ty)
    tl.store(x + rows[:, None] * D + columns[None, :], value, mask=inside)


@triton.jit
def _divisors(d, start, N, BLOCK: tl.constexpr):
    rows = start + tl.arange(0, BLOCK)
    return tl.load(d + tl.program_id(0).to(tl.int64) * N + rows, mask=rows < N, other=1.0)


@triton.jit
def _errors(dy, y, d, start, N, M: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr):
    """e = dy/d, rounded, and c = −dy·y/d."""
    divisor = _divisors(d, start, N, BLOCK)
    given = _values(dy, start, N, M, MP, BLOCK)
    read = _values(y, start, N, M, MP, BLOCK).to(tl.float32)
    e = given.to(tl.float32) / divisor[:, None]
    return e.to(given.dtype), -tl.sum(e * read, 1)


@triton.jit
def _part(states, part, F: tl.constexpr, M: tl.constexpr, FP: tl.constexpr, MP: tl.constexpr):
    """Where W and z of a part lie, and which of their numbers are there."""
    states += (tl.program_id(0) * tl.num_programs(1) + part).to(tl.int64) * F * (M + 1)
    f, m = tl.arange(0, FP), tl.arange(0, MP)
    W = states + f[:, None] * (M + 1) + m[None, :]
    return W, (f < F)[:, None] & (m < M)[None, :], states + f * (M + 1) + M, f < F


@triton.jit
def _added(
    states, begin, end, F: tl.constexpr, M: tl.constexpr, FP: tl.constexpr, MP: tl.constexpr
):  # fmt: skip
    """The states that the parts from begin to end add up to."""
    W = tl.zeros((FP, MP), tl.float32)
    z = tl.zeros((FP,), tl.float32)
    for part in tl.range(begin, end):
        to_W, of_W, to_z, of_z = _part(states, part, F, M, FP, MP)
        W += tl.load(to_W, mask=of_W, other=0.0)
        z += tl.load(to_z, mask=of_z, other=0.0)
    return W, z


@triton.jit
def _until(BLOCK: tl.constexpr):
    """(i, j): whether j ≤ i."""
    return tl.arange(0, BLOCK)[:, None] >= tl.arange(0, BLOCK)[None, :]


@triton.jit
def _states_kernel(
    k, v, y, d, states, N, rows, GRADIENT: tl.constexpr,
    F: tl.constexpr, M: tl.constexpr, FP: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a part adds: Σ φ(k) vᵀ and Σ φ(k), or of the gradients, Σ φ(q) eᵀ and Σ c φ(q)."""
    part = tl.program_id(1)
    W = tl.zeros((FP, MP), tl.float32)
    z = tl.zeros((FP,), tl.float32)
    for start in tl.range(part * rows, tl.minimum((part + 1) * rows, N), BLOCK):
        keys = _features(k, start, N, F, FP, BLOCK)
        if GRADIENT:
            e, c = _errors(v, y, d, start, N, M, MP, BLOCK)
            W = tl.dot(tl.trans(keys), e, W)
            z += tl.sum(c[:, None] * keys.to(tl.float32), 0)
        else:
            W = tl.dot(tl.trans(keys), _values(v, start, N, M, MP, BLOCK), W)
            z += tl.sum(keys.to(tl.float32), 0)
    to_W, of_W, to_z, of_z = _part(states, part, F, M, FP, MP)
    tl.store(to_W, W, mask=of_W)
    tl.store(to_z, z, mask=of_z)


@triton.jit
def _read_kernel(
    q, k, v, y, d, states, N, rows, CAUSAL: tl.constexpr,
    F: tl.constexpr, M: tl.constexpr, FP: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    W, z = _added(states, 0, part if CAUSAL else tl.num_programs(1), F, M, FP, MP)
    for start in tl.range(part * rows, tl.minimum((part + 1) * rows, N), BLOCK):
        queries = _features(q, start, N, F, FP, BLOCK)
        sums = tl.dot(queries, W.to(queries.dtype))
        total = tl.sum(queries.to(tl.float32) * z[None, :], 1)
        if CAUSAL:
            keys = _features(k, start, N, F, FP, BLOCK)
            values = _values(v, start, N, M, MP, BLOCK)
            weights = tl.where(_until(BLOCK), tl.dot(queries, tl.trans(keys)), 0.0)
            sums = tl.dot(weights.to(values.dtype), values, sums)
            total += tl.sum(weights, 1)
            W = tl.dot(tl.trans(keys), values, W)
            z += tl.sum(keys.to(tl.float32), 0)
        total = tl.where(total == 0.0, 1.0, total)
        _put(sums / total[:, None], y, start, N, M, MP, BLOCK)
        at = start + tl.arange(0, BLOCK)
        tl.store(d + tl.program_id(0).to(tl.int64) * N + at, total, mask=at < N)


@triton.jit
def _queries_kernel(
    q, k, v, y, d, dy, dq, states, N, rows, CAUSAL: tl.constexpr,
    F: tl.constexpr, M: tl.constexpr, FP: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    W, z = _added(states, 0, part if CAUSAL else tl.num_programs(1), F, M, FP, MP)
    for start in tl.range(part * rows, tl.minimum((part + 1) * rows, N), BLOCK):
        e, c = _errors(dy, y, d, start, N, M, MP, BLOCK)
        gradient = tl.dot(e, tl.trans(W.to(e.dtype))) + c[:, None] * z[None, :]
        if CAUSAL:
            keys = _features(k, start, N, F, FP, BLOCK)
            values = _values(v, start, N, M, MP, BLOCK)
            pairs = tl.where(_until(BLOCK), tl.dot(e, tl.trans(values)) + c[:, None], 0.0)
            gradient = tl.dot(pairs.to(keys.dtype), keys, gradient)
            W = tl.dot(tl.trans(keys), values, W)
            z += tl.sum(keys.to(tl.float32), 0)
        slope = tl.minimum(_features(q, start, N, F, FP, BLOCK).to(tl.float32), 1.0)
        _put(gradient * slope, dq, start, N, F, FP, BLOCK)


@triton.jit
def _keys_kernel(
    q, k, v, y, d, dy, dk, dv, states, N, rows, CAUSAL: tl.constexpr,
    F: tl.constexpr, M: tl.constexpr, FP: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    U, u = _added(states, part + 1 if CAUSAL else 0, tl.num_programs(1), F, M, FP, MP)
    begin, end = part * rows, tl.minimum((part + 1) * rows, N)
    tiles = (end - begin + BLOCK - 1) // BLOCK
    for back in tl.range(0, tiles):
        start = begin + (tiles - 1 - back) * BLOCK
        keys = _features(k, start, N, F, FP, BLOCK)
        values = _values(v, start, N, M, MP, BLOCK)
        of_values = tl.dot(keys, U.to(keys.dtype))
        of_keys = tl.dot(values, tl.trans(U.to(values.dtype))) + u[None, :]
        if CAUSAL:
            queries = _features(q, start, N, F, FP, BLOCK)
            e, c = _errors(dy, y, d, start, N, M, MP, BLOCK)
            weights = tl.where(_until(BLOCK), tl.dot(queries, tl.trans(keys)), 0.0)
            of_values = tl.dot(tl.trans(weights.to(e.dtype)), e, of_values)
            pairs = tl.where(_until(BLOCK), tl.dot(e, tl.trans(values)) + c[:, None], 0.0)
            of_keys = tl.dot(tl.trans(pairs.to(queries.dtype)), queries, of_keys)
            U = tl.dot(tl.trans(queries), e, U)
            u += tl.sum(c[:, None] * queries.to(tl.float32), 0)
        _put(of_values, dv, start, N, M, MP, BLOCK)
        _put(of_keys * tl.minimum(keys.to(tl.float32), 1.0), dk, start, N, F, FP, BLOCK)
