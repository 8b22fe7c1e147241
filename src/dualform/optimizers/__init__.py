"""One file per family of optimizers: hyper-parameters of a step in, coefficients out."""

from torch.optim import Optimizer

from dualform.errors import FormatVersionError
from dualform.optimizers.adadelta import AdadeltaRule
from dualform.optimizers.adafactor import AdafactorRule
from dualform.optimizers.adagrad import AdagradRule
from dualform.optimizers.adam import AdamRule, AdamWRule
from dualform.optimizers.adamax import AdamaxRule
from dualform.optimizers.asgd import ASGDRule
from dualform.optimizers.lion import LionRule
from dualform.optimizers.muon import MuonRule
from dualform.optimizers.nadam import NAdamRule
from dualform.optimizers.observed import ObservedRule
from dualform.optimizers.operators import (
    Blend,
    Coefficient,
    Diagonal,
    Elementwise,
    Memo,
    Modewise,
    Number,
    Operator,
    Question,
    Sided,
    Turned,
    along,
    apply,
)
from dualform.optimizers.radam import RAdamRule
from dualform.optimizers.rmsprop import RMSpropRule
from dualform.optimizers.rprop import RpropRule
from dualform.optimizers.rule import (
    BY_ROW,
    OBSERVED,
    UNTOUCHED,
    Coefficients,
    History,
    Rule,
    ScalarRule,
    State,
    StateRule,
)
from dualform.optimizers.sgd import SGDRule
from dualform.optimizers.shampoo import ShampooRule
from dualform.optimizers.soap import SOAPRule
from dualform.optimizers.steps import (
    STILL,
    Hyper,
    Pair,
    Step,
    Transition,
    Value,
    added,
    as_operator,
    as_tensor,
    plus,
    times,
    walk_back,
)

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


def why_observed(optimizer: Optimizer) -> str:
    """Why no rule describes an optimizer: what it is, and what is described.

    >>> import torch
    >>> why_observed(torch.optim.LBFGS([torch.zeros(1)]))
    'LBFGS has no rule yet'
    """
    kind = type(optimizer)
    known = [rule for rule in RULES[:-1] if rule.describes(optimizer)]
    if known:
        return known[0].refusal(optimizer)
    names = {rule.optimizer for rule in RULES if rule.optimizer}
    above = [base.__name__ for base in kind.__mro__[1:] if base.__name__ in names]
    if above:
        own = f"{kind.__name__} is a subclass of {above[0]} and may do anything"
        return f"{own}; by row is {above[0]} itself"
    return f"{kind.__name__} has no rule yet"


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
    "Blend",
    "Coefficient",
    "Coefficients",
    "Diagonal",
    "Elementwise",
    "History",
    "Hyper",
    "Memo",
    "Modewise",
    "Number",
    "Operator",
    "Pair",
    "Question",
    "Rule",
    "ScalarRule",
    "Sided",
    "State",
    "StateRule",
    "Step",
    "Transition",
    "Turned",
    "Value",
    "added",
    "along",
    "apply",
    "as_operator",
    "as_tensor",
    "plus",
    "rule_for",
    "rule_named",
    "times",
    "walk_back",
    "why_observed",
]
