"""Which rule describes which optimizer, and what it is told of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer

from dualform.optimizers import RULES, Rule, rule_for, rule_named
from dualform.optimizers.adafactor import AdafactorRule
from dualform.optimizers.adagrad import AdagradRule
from dualform.optimizers.adam import AdamRule, AdamWRule
from dualform.optimizers.rule import StateRule
from dualform.optimizers.sgd import SGDRule

LEFT_TO_OBSERVATION = {"LBFGS", "SparseAdam"}
ALL = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}


@pytest.mark.parametrize("name", ALL)
def test_every_optimizer_of_torch_has_its_rule(name: str) -> None:
    rule = rule_for(ALL[name]([torch.zeros(2, 2)], lr=0.1))
    assert rule.name == ("observed" if name in LEFT_TO_OBSERVATION else name.lower())


@pytest.mark.parametrize("name", ALL)
def test_a_subclass_may_do_anything(name: str) -> None:
    changed = type(name, (ALL[name],), {})
    assert rule_for(changed([torch.zeros(2, 2)], lr=0.1)).name == "observed"


def test_a_namesake_is_another() -> None:
    class Lion(SGD):
        pass

    assert rule_for(Lion([torch.zeros(1)])).name == "observed"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_names_find_rules(rule: StateRule) -> None:
    assert rule_named(rule.name) is rule
    assert len({known.name for known in RULES}) == len(RULES)
    assert RULES[-1].name == "observed"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_has_numbers_or_is_replayed(rule: Rule) -> None:
    assert (rule.scalar if rule.by_numbers else rule.replayed) is rule
    with pytest.raises(TypeError, match=f"the coefficients of '{rule.name}' are"):
        _ = rule.replayed if rule.by_numbers else rule.scalar


@pytest.mark.parametrize("kind", [Adam, AdamW, Adagrad])
def test_complex_parameters_are_observed(kind: type[Optimizer]) -> None:
    assert rule_for(kind([torch.zeros(1, dtype=torch.complex64)])).name == "observed"


def named(rule: StateRule, group: dict[str, Any]) -> dict[str, float]:
    """The hyper-parameters of a group, by name."""
    return dict(zip(rule.fields, rule.hyper(group), strict=True))


def test_groups_have_their_own_options() -> None:
    own: dict[str, Any] = {"betas": (0.5, 0.7), "amsgrad": True, "lr": torch.tensor(0.25)}
    groups: list[dict[str, Any]] = [
        {"params": [torch.zeros(1)]},
        {"params": [torch.ones(1)], **own},
    ]
    first, second = (named(AdamRule(), group) for group in Adam(groups).param_groups)
    assert (first["beta1"], first["beta2"], first["amsgrad"], first["lr"]) == (0.9, 0.999, 0, 1e-3)
    assert (second["beta1"], second["beta2"], second["amsgrad"]) == (0.5, 0.7, 1)
    assert second["lr"] == 0.25


def test_a_group_says_whether_decay_is_decoupled() -> None:
    group = AdamW([torch.zeros(1)]).param_groups[0]
    assert named(AdamWRule(), group)["decoupled_weight_decay"] == 1
    group["decoupled_weight_decay"] = False
    assert named(AdamWRule(), group)["decoupled_weight_decay"] == 0
    del group["decoupled_weight_decay"]  # as before torch 2.7
    assert named(AdamWRule(), group)["decoupled_weight_decay"] == 1
    assert named(AdamRule(), group)["decoupled_weight_decay"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_dtype_has_its_own_resolution(dtype: torch.dtype) -> None:
    group = Adafactor([torch.zeros(2, dtype=dtype)]).param_groups[0]
    assert named(AdafactorRule(), group)["eps1"] == torch.finfo(dtype).eps
    assert named(AdafactorRule(), {**group, "eps": (0.5, 0.25)})["eps1"] == 0.5


def test_memory_is_what_the_state_holds() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Adam([weight])
    assert AdamRule().memory(optimizer, weight) == {}
    weight.grad = torch.ones(3)
    optimizer.step()
    assert set(AdamRule().memory(optimizer, weight)) == {"step", "exp_avg", "exp_avg_sq"}
    plain = SGD([weight])
    plain.step()
    assert SGDRule().memory(plain, weight) == {}


def test_adagrad_starts_from_its_own_value() -> None:
    """Of a parameter that joins late the optimizer knows nothing, and neither does its group."""
    early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Adagrad([early], initial_accumulator_value=0.5)
    optimizer.add_param_group({"params": [late], "initial_accumulator_value": 7.0})
    for parameter in (early, late):
        memory = AdagradRule().memory(optimizer, parameter)
        assert memory["sum"].tolist() == [0.5] * 3
    late.grad = torch.full((3,), 2.0)
    optimizer.step()
    assert AdagradRule().memory(optimizer, late)["sum"].tolist() == [4.5] * 3


def test_lion_remembers_its_first_learning_rate() -> None:
    Lion = pytest.importorskip("lion_pytorch").Lion
    weight = torch.ones(1)

    def first(lr: float | Tensor, decoupled: bool) -> float:
        optimizer = Lion([weight], lr=lr, decoupled_weight_decay=decoupled)
        optimizer.param_groups[0]["lr"] = 0.125
        return float(rule_for(optimizer).memory(optimizer, weight)["first_lr"])

    assert first(0.5, decoupled=True) == 0.5
    assert first(0.5, decoupled=False) == 1.0
    moving = Lion([weight], lr=torch.tensor(0.5), decoupled_weight_decay=True)
    assert rule_for(moving).name == "observed"
