"""Reads give back what they took: no forward pass outlives the question it was made for."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases.layers import CASES
from tests.laws.grid import problem
from torch import Tensor, nn

from dualform.read.gradients import Gradients
from dualform.read.targets import Asked
from dualform.testing import tiny_run

CALLS = 25
REFUSED = "Embedding, max_norm"
"""It changes its weights when it is called, and cannot be asked."""


def live_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():  # old names of torch warn when they are looked at
        warnings.simplefilter("ignore")
        return sum(isinstance(found, Tensor) for found in gc.get_objects())


def left_by(call: Callable[[], Any], times: int) -> int:
    """How many tensors live on after so many calls; what the first one keeps for all is fair."""
    gc.freeze()  # so that only what is made from here on is looked through
    call()
    before = live_tensors()
    for _ in range(times):
        call()
    return live_tensors() - before


def test_what_lives_on_is_noticed() -> None:
    kept = []
    assert left_by(lambda: kept.append(torch.zeros(2)), times=3) == 3


def ask(model: nn.Module, x: Any) -> None:
    """One pass forward and back, at the model's own parameters."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    here = {n: p.detach().clone() for n, p in model.named_parameters() if n in names}
    asked = Asked(model, x, lambda out: out.square().sum())
    Gradients(asked, names).integral([(1.0, here)], range(3))


@pytest.mark.parametrize("case", [name for name in CASES if name != REFUSED])
def test_no_pass_outlives_its_question(case: str) -> None:
    given = problem(case, torch.float64)
    model, x = nn.Sequential(given.model, nn.Flatten(), nn.LazyLinear(2).double()), given.x[:3]
    model(x)
    assert left_by(lambda: ask(model.eval(), x), times=3) == 0


class Breaks(torch.autograd.Function):
    """What cannot be differentiated, and says so only when that is tried."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise NotImplementedError("there is no derivative of this")


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Breaks.apply(x)


def test_no_pass_outlives_a_question_that_failed() -> None:
    model = nn.Sequential(nn.Linear(4, 3), Breaking(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    def fail() -> None:
        with pytest.raises(NotImplementedError, match="no derivative"):
            ask(model, torch.randn(3, 4))

    assert left_by(fail, times=3) == 0


@pytest.mark.parametrize("read", ["explain", "influence", "spotlight", "without"])
def test_memory_is_flat_over_many_calls(read: str) -> None:
    run, model, x = tiny_run()
    reads: dict[str, Callable[[], Any]] = {
        "explain": lambda: run.explain(model, x[:2]),
        "influence": lambda: run.influence(model, x[:2]),
        "spotlight": lambda: run.spotlight(model, x[:2])["2"].samples(),
        "without": lambda: run.without([0, 1], model, x[:2]),
    }
    assert left_by(reads[read], CALLS) <= 0
