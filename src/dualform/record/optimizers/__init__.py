"""One file per family of optimizers: hyper-parameters of a step in, coefficients out."""

from torch.optim import Optimizer

from dualform.errors import FormatVersionError
from dualform.record.optimizers.adadelta import AdadeltaRule
from dualform.record.optimizers.adafactor import AdafactorRule
from dualform.record.optimizers.adagrad import AdagradRule
from dualform.record.optimizers.adam import AdamRule, AdamWRule
from dualform.record.optimizers.adamax import AdamaxRule
from dualform.record.optimizers.asgd import ASGDRule
from dualform.record.optimizers.lion import LionRule
from dualform.record.optimizers.muon import MuonRule
from dualform.record.optimizers.nadam import NAdamRule
from dualform.record.optimizers.observed import ObservedRule
from dualform.record.optimizers.operators import (
    Modewise,
    Operator,
    Sided,
    Turned,
    along,
    apply,
    plus,
    times,
)
from dualform.record.optimizers.radam import RAdamRule
from dualform.record.optimizers.rmsprop import RMSpropRule
from dualform.record.optimizers.rprop import RpropRule
from dualform.record.optimizers.rule import (
    BY_ROW,
    OBSERVED,
    STILL,
    UNTOUCHED,
    Coefficients,
    History,
    Pair,
    Rule,
    ScalarRule,
    State,
    StateRule,
    Transition,
    walk_back,
)
from dualform.record.optimizers.sgd import SGDRule
from dualform.record.optimizers.shampoo import ShampooRule
from dualform.record.optimizers.soap import SOAPRule

RULES: tuple[Rule, ...] = (
    SGDRule(),
    AdamRule(),
    AdamWRule(),
    NAdamRule(),
    RAdamRule(),
    AdamaxRule(),
    RMSpropRule(),
    AdagradRule(),
    AdadeltaRule(),
    AdafactorRule(),
    MuonRule(),
    LionRule(),
    ShampooRule(),
    SOAPRule(),
    ASGDRule(),
    RpropRule(),
    ObservedRule(),
)


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
    "STILL",
    "UNTOUCHED",
    "Coefficients",
    "History",
    "Modewise",
    "Operator",
    "Pair",
    "Rule",
    "ScalarRule",
    "Sided",
    "State",
    "StateRule",
    "Transition",
    "Turned",
    "along",
    "apply",
    "plus",
    "rule_for",
    "rule_named",
    "times",
    "walk_back",
]
