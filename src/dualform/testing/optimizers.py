"""The contract of an optimizer rule: its coefficients turn gradients into the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.optimizers import Rule
from dualform.read import open_run
from dualform.testing.layers import TOLERANCE
from dualform.testing.training import Loop, train

LOOPS = {
    "plain": Loop(steps=12),
    "accumulated": Loop(steps=8, accumulate=2),
    "clipped": Loop(steps=12, clip=1.0),
    "scheduled": Loop(steps=12, schedule=True),
    "all at once": Loop(steps=12, accumulate=2, clip=1.0, schedule=True),
}


class RuleContract(ABC):
    """Inherit, write `rule` and `make`, and the whole suite runs on your optimizer.

    ```python
    class TestSGD(RuleContract):
        def rule(self): return SGDRule()
        def make(self, parameters): return torch.optim.SGD(parameters, lr=0.05)
    ```
    """

    @abstractmethod
    def rule(self) -> Rule:
        """The rule under test."""

    @abstractmethod
    def make(self, parameters: Iterable[Tensor]) -> Optimizer:
        """An optimizer the rule accepts."""

    def problem(self, dtype: torch.dtype) -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
        """A two-layer network and ten samples."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        inputs, targets = torch.randn(10, 6, dtype=dtype), torch.randn(10, 3, dtype=dtype)
        return model, self.make(model.parameters()), inputs, targets

    def test_accepts(self) -> None:
        """The rule takes the optimizer, and says which fields it reads."""
        optimizer = self.make([nn.Parameter(torch.zeros(1))])
        assert self.rule().accepts(optimizer)
        assert len(self.rule().hyper(optimizer.param_groups[0])) == len(self.rule().fields)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("loop", list(LOOPS.values()), ids=list(LOOPS))
    def test_books_balance(self, tmp_path: Path, loop: Loop, dtype: torch.dtype) -> None:
        """The rows, weighted by the rule's coefficients, are the change of the weights."""
        model, optimizer, inputs, targets = self.problem(dtype)
        train(model, optimizer, inputs, targets, loop, tmp_path / "run")
        audit = open_run(tmp_path / "run").audit()
        assert audit.remainder <= TOLERANCE[dtype], audit
        assert audit.coverage == 1.0

    def test_any_step_can_be_read(self, tmp_path: Path) -> None:
        """The books of a long run, read at step t, are those of a run of t steps."""
        model, optimizer, inputs, targets = self.problem(torch.float64)
        train(model, optimizer, inputs, targets, Loop(steps=12, schedule=True), tmp_path / "run")
        for step in (0, 1, 5, 11):
            model, optimizer, *_ = self.problem(torch.float64)
            train(model, optimizer, inputs, targets, Loop(steps=step, schedule=True))
            read = open_run(tmp_path / "run").at(step).state_dict()
            for name, weight in model.state_dict().items():
                assert (read[name] - weight).abs().max() <= 1e-12 * weight.abs().max().clamp_min(1)
