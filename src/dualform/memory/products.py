"""Products of many rows, some at a time, so that what is between them stays small."""

from __future__ import annotations

import torch
from torch import Tensor

WIDENED = 1024
"""How many rows are put into float64 at a time."""
BETWEEN = 1 << 22
"""How many numbers may stand between two products at a time."""


def summed_products(a: Tensor, b: Tensor) -> Tensor:
    """`aᵀ b` in float64; by a processor some rows at a time, so that they stay in its cache."""
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64, device=a.device)
    count = WIDENED if a.device.type == "cpu" else max(1, len(a))
    for some, others in zip(torch.split(a, count), torch.split(b, count), strict=True):
        total.addmm_(some.T, others.double())
    return total


def bilinear_answers(a: Tensor, D: Tensor, b: Tensor) -> Tensor:
    """(rows, questions): `aᵀ D b`, some questions at a time.

    The longer side is multiplied first: what is between the products is then as small as can be.
    """
    if a.shape[1] > b.shape[1]:
        a, D, b = b, D.mT, a
    each = max(1, BETWEEN // max(1, a.numel()))
    found = a.new_empty(len(a), len(D))
    for at in range(0, len(D), each):
        some = D[at : at + each]
        between = torch.matmul(b, some.flatten(0, 1).T).view(len(a), len(some), a.shape[1])
        torch.sum(between.mul_(a[:, None]), 2, out=found[:, at : at + each])
    return found


def by_group(rows: Tensor, groups: int) -> Tensor:
    """The second dimension split into groups.

    >>> by_group(torch.zeros(5, 6), 2).shape
    torch.Size([5, 2, 3])
    """
    return rows.reshape(len(rows), groups, rows.shape[1] // groups, *rows.shape[2:])
