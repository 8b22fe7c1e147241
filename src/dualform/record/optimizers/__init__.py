"""One file per family of optimizers: hyper-parameters of a step in, coefficients out."""

from torch.optim import Optimizer

from dualform.errors import FormatVersionError
from dualform.record.optimizers.observed import ObservedRule
from dualform.record.optimizers.rule import (
    BY_ROW,
    OBSERVED,
    UNTOUCHED,
    Coefficients,
    History,
    Rule,
    Transition,
)
from dualform.record.optimizers.sgd import SGDRule

RULES: tuple[Rule, ...] = (SGDRule(), ObservedRule())


def rule_for(optimizer: Optimizer) -> Rule:
    """The first rule that describes the optimizer; observing it is the last resort.

    >>> import torch
    >>> rule_for(torch.optim.SGD([torch.zeros(1)])).name
    'sgd'
    """
    return next(rule for rule in RULES if rule.accepts(optimizer))


def rule_named(name: str) -> Rule:
    """The rule a run says it was recorded with."""
    known = {rule.name: rule for rule in RULES}
    if name not in known:
        raise FormatVersionError(
            f"the run was recorded with the rule '{name}', and this dualform knows "
            f"{', '.join(known)}; update with `pip install -U dualform`."
        )
    return known[name]


__all__ = [
    "BY_ROW",
    "OBSERVED",
    "RULES",
    "UNTOUCHED",
    "Coefficients",
    "History",
    "Rule",
    "Transition",
    "rule_for",
    "rule_named",
]
