"""What is done to images: tokens replaced, noise added, and steps that raise the network's loss.

Images are (n, side, side) with pixels from 0 to 1, and so is what is made of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def corrupt_tokens(
    x: Tensor, share: float, patch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Replaces a share of each image's patches by noise; also says which, (n, tokens).

    >>> _, where = corrupt_tokens(torch.zeros(3, 4, 4), 0.25, 2, torch.Generator())
    >>> where.sum(1)
    tensor([1, 1, 1])
    """
    n, rows = len(x), x.shape[1] // patch
    places = torch.rand(n, rows * rows, generator=generator).argsort(1)
    where = (places < round(share * rows * rows)).to(x.device)
    noise = torch.rand(x.shape, generator=generator).to(x)
    mask = where.reshape(n, rows, 1, rows, 1).expand(-1, -1, patch, -1, patch).reshape(x.shape)
    return torch.where(mask, noise, x), where


def add_noise(x: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """Gaussian noise on every pixel, cut off at black and white.

    >>> add_noise(torch.ones(1, 2, 2), 0.0, torch.Generator())
    tensor([[[1., 1.],
             [1., 1.]]])
    """
    noise = torch.randn(x.shape, generator=generator).to(x)
    return (x + deviation * noise).clamp(0, 1)


def fast_gradient(model: nn.Module, x: Tensor, y: Tensor, step: float) -> Tensor:
    """FGSM: every pixel moves by `step` in the direction that raises the loss.

    >>> fast_gradient(nn.Flatten(), torch.full((1, 1, 2), 0.5), torch.tensor([0]), 0.25)
    tensor([[[0.2500, 0.7500]]])
    """
    return (x + step * _gradient(model, x, y).sign()).clamp(0, 1)


def projected_gradient(
    model: nn.Module, x: Tensor, y: Tensor, step: float, steps: int, generator: torch.Generator
) -> Tensor:
    """PGD: from a random start, so many steps that raise the loss, each pixel within `step` of x.

    >>> x, y, generator = torch.full((1, 1, 2), 0.5), torch.tensor([0]), torch.Generator()
    >>> projected_gradient(nn.Flatten(), x, y, 0.25, 10, generator)
    tensor([[[0.2500, 0.7500]]])
    """
    start = 2 * torch.rand(x.shape, generator=generator).to(x) - 1
    moved = (x + step * start).clamp(0, 1)
    for _ in range(steps):
        moved = moved + 2.5 * step / steps * _gradient(model, moved, y).sign()
        moved = moved.clamp(x - step, x + step).clamp(0, 1)
    return moved


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    loss = cross_entropy(model(x), y, reduction="sum")
    return torch.autograd.grad(loss, x)[0]
