"""The sums of errors, and of errors times inputs, over the rows of each sample: one pass on a GPU.

By torch's operations a product would be written and read again, and errors would be read three
times. `python -m benchmarks.device` compares both.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""So many rows are added up by one program."""


def sample_sums(errors: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """(samples, width) in float32: `Σ e` and `Σ e ∘ x`.

    Both are (samples, rows, width), and lie row by row in memory.

    ```python
    sample_sums(torch.ones(2, 3, 4, device="cuda"), torch.ones(2, 3, 4, device="cuda"))  # threes
    ```
    """
    samples, rows, width = errors.shape
    parts = triton.cdiv(rows, ROWS)
    found = torch.empty(2, samples, parts, width, dtype=torch.float32, device=errors.device)
    _sums[(samples, parts)](
        errors,
        inputs,
        found,
        rows,
        found.stride(0),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ROWS=ROWS,
        num_warps=8 if width > 1024 else 4,
    )
    sums, products = found.sum(2)
    return sums, products


@triton.jit
def _sums(
    errors,
    inputs,
    found,
    rows,
    second,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds up some rows of one sample."""
    sample, part = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, PADDED)
    inside = columns < WIDTH
    total = tl.zeros((PADDED,), tl.float32)
    products = tl.zeros((PADDED,), tl.float32)
    first = part * ROWS
    for row in range(first, tl.minimum(first + ROWS, rows)):
        place = (sample.to(tl.int64) * rows + row) * WIDTH + columns
        e = tl.load(errors + place, mask=inside, other=0.0).to(tl.float32)
        total += e
        products += e * tl.load(inputs + place, mask=inside, other=0.0).to(tl.float32)
    into = (sample * tl.num_programs(1) + part) * WIDTH + columns
    tl.store(found + into, total, mask=inside)
    tl.store(found + second + into, products, mask=inside)
