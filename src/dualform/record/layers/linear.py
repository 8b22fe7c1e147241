"""`y = W x + b`: the keys are the inputs, the values the errors at the output."""

from __future__ import annotations

from torch import nn

from dualform.record.layers.layer import LayerKind, Shape


class Linear(LayerKind):
    """`nn.Linear` with or without bias, and subclasses that keep its forward.

    >>> Linear().shape(nn.Linear(3, 2, bias=False))
    Shape(keys=3, values=2, forms={'weight': 'outer'})
    """

    def accepts(self, module: nn.Module) -> bool:
        """By its forward, so that a subclass that computes something else is not taken."""
        return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward

    def shape(self, module: nn.Module) -> Shape:
        """Keys as wide as the input, values as wide as the output."""
        assert isinstance(module, nn.Linear)
        forms = {"weight": "outer"} if module.bias is None else {"weight": "outer", "bias": "sum"}
        return Shape(module.in_features, module.out_features, forms)
