"""Rows that share a matrix, against their blocks written out in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dualform.memory.blocks import BilinearFunctional, Functional, Sides
from dualform.memory.products import by_group
from dualform.memory.shared import SharedSides

ROWS, HEIGHT, WIDTH = 5, 6, 4


def made(kind: str) -> SharedSides:
    generator = torch.Generator().manual_seed(0)
    numbers = lambda *shape: torch.randn(*shape, generator=generator).double()  # noqa: E731
    lines = 1 if kind == "a line" else HEIGHT
    b = None if kind == "a column" else numbers(ROWS, WIDTH)
    if kind == "groups":
        b = by_group(numbers(ROWS, 2 * WIDTH), 2)
    plain = Sides(numbers(ROWS, HEIGHT), b)
    return SharedSides(plain, numbers(3, lines, WIDTH), torch.tensor([2, 0, 0, 1, 2]))


def in_full(rows: SharedSides) -> Tensor:
    """(rows, height, width): each row's block."""
    blocks = []
    for at in range(len(rows)):
        a, b = rows.a[at], torch.ones(1, 1) if rows.b is None else rows.b[at : at + 1]
        lines = b.repeat_interleave(HEIGHT // b.shape[1], 1)[0] if b.ndim == 3 else b
        blocks.append(rows.matrices[rows.which[at]] * (a[:, None] * lines))
    return torch.stack(blocks)


@pytest.mark.parametrize("kind", ["whole", "a column", "a line", "groups"])
def test_rows_are_their_blocks(kind: str) -> None:
    rows, generator = made(kind), torch.Generator().manual_seed(1)
    blocks, weights = in_full(rows), torch.rand(ROWS, generator=generator).double()
    D = torch.randn(2, HEIGHT, WIDTH, generator=generator).double()
    beta = torch.randn(2, WIDTH, generator=generator).double()
    asked = {"bilinear": (BilinearFunctional(D), D)}
    units = torch.tensor([4, 1])
    asked["units"] = (Functional(units, beta), torch.eye(HEIGHT)[units][:, :, None] * beta[:, None])
    if kind != "groups":  # where each group has keys of its own, other questions are bilinear
        asked["dense"] = (Functional(D[:, :, 0], beta), D[:, :, :1] * beta[:, None])
    torch.testing.assert_close(
        rows.total(weights, (HEIGHT, WIDTH)), (weights[:, None, None] * blocks).sum(0)
    )
    torch.testing.assert_close(rows.sizes(), blocks.flatten(1).norm(dim=1))
    for name, (question, matrix) in asked.items():
        expected = torch.einsum("rhw,qhw->rq", blocks, matrix.double())
        torch.testing.assert_close(rows.answers(question), expected, msg=name)
        torch.testing.assert_close(rows[1:4].answers(question), expected[1:4], msg=name)
