"""Which calls of a model can be tapped: how each torch function is given its parameter.

It is asked of every call, while the model runs as it was written and while torch compiles it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.layers.use import named

READ = "_dualform_read"
"""An attribute of what a table gave, if it is read once for all samples: its tap and the places."""


class Call(NamedTuple):
    """A call that may be tapped."""

    kind: str
    parameter: Any
    """The one that a tap is found by: of a weight and a bias, the weight."""
    x: Any
    dims: int
    """How many trailing dimensions of the output make up one row."""
    extra: Any = ()


def _linear(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    given = named(args, kwargs, "input weight bias")
    return Call("product", given["weight"], given["input"], 1)


def _product(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    if kwargs or len(args) != 2 or not isinstance(args[1], Tensor) or args[1].ndim != 2:
        return None
    return Call("product", args[1], args[0], 1)


def _addmm(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    return None if kwargs or len(args) != 3 else Call("product", args[2], args[1], 1)


def _embedding(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq"
    given = named(args, kwargs, names)
    if given["max_norm"] is not None or given["scale_grad_by_freq"]:
        return None
    padding = given["padding_idx"]
    if padding is not None:
        padding %= given["weight"].shape[0]
    return Call("lookup", given["weight"], given["input"], 1, padding)


def _layer_norm(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    given = named(args, kwargs, "input normalized_shape weight bias eps", eps=1e-5)
    shape = tuple(given["normalized_shape"])
    holder = given["bias"] if given["weight"] is None else given["weight"]
    return Call("layer_norm", holder, given["input"], len(shape), (shape, given["eps"]))


def _rms_norm(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    given = named(args, kwargs, "input normalized_shape weight eps")
    shape = tuple(given["normalized_shape"])
    return Call("rms_norm", given["weight"], given["input"], len(shape), (shape, given["eps"]))


def _batch_norm(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    names = "input running_mean running_var weight bias training momentum eps"
    given = named(args, kwargs, names, eps=1e-5)
    if not given["training"]:
        return None
    return Call("batch_norm", given["weight"], given["input"], 1, given["eps"])


def _group_norm(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    given = named(args, kwargs, "input num_groups weight bias eps", eps=1e-5)
    extra = (given["num_groups"], given["eps"])
    return Call("group_norm", given["weight"], given["input"], 1, extra)


def _conv(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    given = named(args, kwargs, "input weight")
    x, weight = given["input"], given["weight"]
    return None if x.ndim != weight.ndim else Call("conv", weight, x, out.ndim - 1)


def _add(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    """A parameter that is added, or a table that was read once for all samples."""
    if kwargs or len(args) != 2:
        return None
    minus = func in SUBTRACTIONS
    for at, operand in enumerate(args):
        read = getattr(operand, READ, None)
        if read is not None and operand.shape != out.shape:
            return None if minus else Call(READ, operand, None, 1, read)
        if isinstance(operand, nn.Parameter):
            dims = sum(1 for size in operand.shape if size != 1)
            factor = -1.0 if minus and at == 1 else 1.0
            return Call("offset", operand, None, dims, (tuple(operand.shape), factor))
    return None


def _multiply(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    if kwargs or len(args) != 2:
        return None
    for operand, x in (args, (args[1], args[0])):
        if isinstance(operand, nn.Parameter) and isinstance(x, Tensor) and operand.numel() > 1:
            dims = sum(1 for size in operand.shape if size != 1)
            return Call("scale", operand, x, dims, (tuple(operand.shape), 1.0))
    return None


def _expand(func: Any, args: Any, kwargs: Any, out: Any) -> Call | None:
    if not isinstance(args[0], nn.Parameter):
        return None
    dims = sum(1 for size in args[0].shape if size != 1)
    return Call("offset", args[0], None, dims, (tuple(args[0].shape), 1.0))


_T = torch.Tensor
ADDITIONS = (torch.add, _T.add, _T.add_, _T.__add__, _T.__radd__, _T.__iadd__)
SUBTRACTIONS = (torch.sub, _T.sub, _T.sub_, _T.__sub__, _T.__isub__)
READERS: dict[Any, Callable[..., Call | None]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, _T.matmul, _T.mm, _T.__matmul__), _product),
    **dict.fromkeys((torch.addmm, _T.addmm), _addmm),
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _conv),
    **dict.fromkeys((*ADDITIONS, *SUBTRACTIONS), _add),
    **dict.fromkeys((torch.mul, _T.mul, _T.__mul__, _T.__rmul__), _multiply),
    **dict.fromkeys((_T.expand, _T.expand_as), _expand),
}
"""What is known of each torch function that can be tapped."""
