"""What Shampoo and SOAP of the package pytorch-optimizer have in common, which keeps neither
options nor counters where torch's optimizers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.optimizers.options import kept


def is_packaged(optimizer: Optimizer, name: str) -> bool:
    """Whether it is the package's own class of this name.

    The package is never imported here.

    >>> is_packaged(torch.optim.Adam([torch.zeros(1)]), "SOAP")
    False
    """
    kind = type(optimizer)
    own = kind.__module__ == f"pytorch_optimizer.optimizer.{name.lower()}"
    return own and kind.__qualname__ == name


def option(optimizer: Optimizer, name: str) -> Tensor:
    """An option that the optimizer has as a whole, as a rule's state keeps it."""
    value: Any = getattr(optimizer, name)
    return kept(float(value))


def packed(matrices: Sequence[Any]) -> Tensor:
    """Square matrices end to end; empty ones take no place.

    >>> packed([torch.eye(2), [], torch.ones(1, 1)])
    tensor([1., 0., 0., 1., 1.])
    """
    return torch.cat([matrix.flatten() for matrix in matrices if len(matrix)])


def unpacked(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The matrices of these sizes.

    >>> [m.tolist() for m in unpacked(torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0]), [2, 1])]
    [[[1.0, 0.0], [0.0, 1.0]], [[5.0]]]
    """
    parts = torch.split(flat, [size * size for size in sizes])
    return [part.view(size, size) for part, size in zip(parts, sizes, strict=True)]


def second_moment(gradient: Tensor, at: int) -> Tensor:
    """`G Gᵀ` of the gradient unfolded along a dimension.

    >>> second_moment(torch.tensor([[1.0, 2.0]]), 0), second_moment(torch.tensor([1.0, 2.0]), 0)
    (tensor([[5.]]), tensor([[1., 2.],
            [2., 4.]]))
    """
    G = gradient.movedim(at, 0).reshape(gradient.shape[at], -1)
    return G @ G.T
