"""Contracts that a new layer kind, rule, operator or ledger inherits by writing two methods.

They need pytest, which the package itself does not.
"""

from dualform.testing.layers import LayerContract
from dualform.testing.ledgers import LedgerContract
from dualform.testing.operators import OperatorContract
from dualform.testing.optimizers import RuleContract
from dualform.testing.training import Loop, tiny_run, train

__all__ = [
    "LayerContract",
    "LedgerContract",
    "Loop",
    "OperatorContract",
    "RuleContract",
    "tiny_run",
    "train",
]
