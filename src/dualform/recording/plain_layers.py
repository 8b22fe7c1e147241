"""Layers whose calls can be told from outside: what they are given says which torch call they make.

`nn.Linear`, convolutions and batch normalizations are. A subclass may do something else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from dualform.layers import Finder, Seen, kinds, matrix_use
from dualform.private import own_parameters

CONVOLUTIONS: dict[type[nn.Module], Any] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}
KINDS = kinds()
NORMALIZATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def is_plain(layer: nn.Module) -> bool:
    """Whether `use_of` knows what calls of a layer are.

    >>> is_plain(nn.Linear(2, 2)), is_plain(nn.Conv2d(1, 1, 3, padding_mode="circular"))
    (True, False)
    """
    if "weight" not in own_parameters(layer):
        return False
    if isinstance(layer, tuple(CONVOLUTIONS)):
        return type(layer) in CONVOLUTIONS and layer.padding_mode == "zeros"
    return type(layer).forward is nn.Linear.forward or type(layer) in NORMALIZATIONS


def depends_on_shape(layer: nn.Module) -> bool:
    """Whether inputs of another size are another site: those of a convolution are.

    >>> depends_on_shape(nn.Linear(2, 2)), depends_on_shape(nn.Conv1d(1, 1, 1))
    (False, True)
    """
    return type(layer) in CONVOLUTIONS


def use_of(
    find: Finder, layer: nn.Module, weight: Tensor | None, bias: Tensor | None, x: Any, out: Tensor
) -> Seen | None:
    """The call of a plain layer that has just been made.

    >>> import torch
    >>> layer, x = nn.Conv1d(1, 1, 2), torch.zeros(3, 1, 4)
    >>> find = Finder(dict(layer.named_parameters()))
    >>> sorted(use_of(find, layer, layer.weight, layer.bias, x, layer(x)).site.terms)
    ['bias', 'weight']
    """
    if isinstance(layer, nn.Linear):
        return matrix_use(find, out, False, x, weight, bias)
    args: tuple[Any, ...]
    if isinstance(layer, NORMALIZATIONS):
        func, mean, variance = F.batch_norm, layer.running_mean, layer.running_var
        by_batch = layer.training or mean is None
        args = (x, mean, variance, weight, bias, by_batch, 0.0, layer.eps)
    else:
        func = CONVOLUTIONS[type(layer)]
        args = (x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    return KINDS[func].use(find, func, args, {}, out)
