"""What the Triton kernels share: rows of a head, read and written a tile at a time."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """x with the numbers of a row side by side, as the kernels read them.

    ```python
    rows_of(torch.ones(2, 3).T).stride()   # (2, 1)
    ```
    """
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def tile(pointer, start, end, stride, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK, DP) rows from start on in float32, and which are there; 0 from `end` on."""
    rows = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, DP)
    inside = (rows < end)[:, None] & (columns < D)[None, :]
    places = rows[:, None] * stride + columns[None, :]
    return tl.load(pointer + places, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def put(x, pointer, start, stride, inside, DP: tl.constexpr, BLOCK: tl.constexpr):
    """Stores a tile's rows from start on, rounded."""
    places = (start + tl.arange(0, BLOCK))[:, None] * stride + tl.arange(0, DP)[None, :]
    tl.store(pointer + places, x.to(pointer.dtype.element_ty), mask=inside)
