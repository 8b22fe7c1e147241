"""One file per family of optimizers: hyper-parameters of a step in, coefficients out."""

from torch.optim import Optimizer

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
    return next(rule for rule in RULES if rule.name == name)


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
