"""The contract of a layer kind: its books balance, and recording changes nothing."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dualform.read import Run, open_run
from dualform.testing.training import Loop, train

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


class LayerContract(ABC):
    """Inherit, write `make` and `inputs`, and the whole suite runs on your layer.

    ```python
    class TestLinear(LayerContract):
        def make(self): return nn.Linear(5, 3)
        def inputs(self, count): return torch.randn(count, 5)
    ```
    """

    @abstractmethod
    def make(self) -> nn.Module:
        """A model that has the layer; called under a fixed seed."""

    @abstractmethod
    def inputs(self, count: int) -> Tensor:
        """Inputs for `count` samples, along the first dimension."""

    def problem(self, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
        """The model, eight samples, and random targets."""
        torch.manual_seed(0)
        model, inputs = self.make().to(dtype), self.inputs(8)
        if inputs.is_floating_point():
            inputs = inputs.to(dtype)
        with torch.no_grad():
            return model, inputs, torch.randn_like(model(inputs))

    def trained(
        self, path: Path, dtype: torch.dtype, loop: Loop | None = None
    ) -> tuple[nn.Module, Tensor, Run]:
        """A recorded training of the model."""
        model, inputs, targets = self.problem(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        train(model, optimizer, inputs, targets, loop or Loop(), path)
        return model, inputs, open_run(path)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_books_balance(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """Every parameter is booked by row, and the rows add up to it."""
        _, _, run = self.trained(tmp_path / "run", dtype)
        audit = run.audit()
        assert audit.coverage == 1.0, audit
        assert audit.remainder <= TOLERANCE[dtype], audit

    def test_recording_changes_nothing(self, tmp_path: Path) -> None:
        """Training is bit-identical with and without recording."""
        model, inputs, targets = self.problem(torch.float32)
        twin = copy.deepcopy(model)
        for path, trained in ((None, twin), (tmp_path / "run", model)):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.9)
            train(trained, optimizer, inputs, targets, Loop(accumulate=2), path)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_parts_sum_to_the_output(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """initial + evidence + by step + remainder is what the layer actually gives."""
        model, inputs, run = self.trained(tmp_path / "run", dtype)
        for reading in run.spotlight(model, inputs[:3]).values():
            check, actual = reading.check, reading.queries.outputs.double()
            asked = (actual * reading.directions).sum(1).numpy()
            scale = actual.abs().max().item() + 1e-12
            summed = check.initial + check.evidence + check.steps + check.remainder
            assert abs(summed - asked).max() <= TOLERANCE[dtype] * 10 * scale
            assert abs(check.remainder).max() <= TOLERANCE[dtype] * 10 * scale

    def test_micro_batches_do_not_matter(self, tmp_path: Path) -> None:
        """However a batch is split, each sample's contribution is the same."""
        scores = []
        for accumulate in (1, 2, 4):
            path = tmp_path / f"run{accumulate}"
            model, inputs, run = self.trained(path, torch.float64, Loop(accumulate=accumulate))
            spotlight = run.spotlight(model, inputs[:2], output=0)
            scores.append({name: reading.samples() for name, reading in spotlight.items()})
        for name, whole in scores[0].items():
            for split in scores[1:]:
                assert split[name].ids == whole.ids
                gap = abs(split[name].values - whole.values).max()
                assert gap <= 1e-12 * (abs(whole.values).max() + 1)
