"""Contracts that a new layer kind, form, rule, operator, codec or ledger inherits.

They need pytest, which the package itself does not.
"""

from dualform.testing.codecs import CodecContract
from dualform.testing.forms import FormContract
from dualform.testing.layers import LayerContract
from dualform.testing.ledgers import LedgerContract
from dualform.testing.operators import OperatorContract
from dualform.testing.optimizers import RuleContract
from dualform.testing.training import Loop, tiny_attention_run, tiny_run, train

__all__ = [
    "CodecContract",
    "FormContract",
    "LayerContract",
    "LedgerContract",
    "Loop",
    "OperatorContract",
    "RuleContract",
    "tiny_attention_run",
    "tiny_run",
    "train",
]
