"""What a coefficient can be: one file a type of operator; a new type is a new file."""

from dualform.optimizers.operators.blend import Blend, Diagonal
from dualform.optimizers.operators.elementwise import Elementwise
from dualform.optimizers.operators.modewise import Modewise, along
from dualform.optimizers.operators.number import Number
from dualform.optimizers.operators.operator import (
    Coefficient,
    Composed,
    Memo,
    Operator,
    Question,
    Restricted,
    Summed,
    apply,
)
from dualform.optimizers.operators.sided import Sided
from dualform.optimizers.operators.turned import Basis, Turned

__all__ = [
    "Basis",
    "Blend",
    "Coefficient",
    "Composed",
    "Diagonal",
    "Elementwise",
    "Memo",
    "Modewise",
    "Number",
    "Operator",
    "Question",
    "Restricted",
    "Sided",
    "Summed",
    "Turned",
    "along",
    "apply",
]
