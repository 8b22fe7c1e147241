"""Contracts that a new layer kind, optimizer rule or ledger inherits by writing two methods.

They need pytest, which the package itself does not.
"""

from dualform.testing.layers import LayerContract
from dualform.testing.ledgers import LedgerContract
from dualform.testing.optimizers import RuleContract
from dualform.testing.training import Loop, tiny_run, train

__all__ = ["LayerContract", "LedgerContract", "Loop", "RuleContract", "tiny_run", "train"]
