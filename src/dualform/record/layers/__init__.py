"""One file per kind of layer that can be booked by row."""

from torch import nn

from dualform.record.layers.layer import LayerKind, Shape
from dualform.record.layers.linear import Linear

KINDS: tuple[LayerKind, ...] = (Linear(),)


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind that books this module by row, if there is one.

    >>> kind_of(nn.Linear(2, 2)) is not None, kind_of(nn.ReLU()) is None
    (True, True)
    """
    return next((kind for kind in KINDS if kind.accepts(module)), None)


__all__ = ["KINDS", "LayerKind", "Shape", "kind_of"]
