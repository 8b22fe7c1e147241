"""Cases that are trained once for all laws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import pytest
import torch
from tests.cases import CASES
from tests.cases.case import Case
from tests.laws.training import fit
from torch import nn
from torch.optim import Optimizer

import dualform


@dataclass(frozen=True)
class Fitted:
    """A case after its training, and the run, if it was recorded."""

    case: Case
    model: nn.Module
    after: list[Any]
    """The state of the model, of the optimizer and of the random numbers."""
    path: Any = None

    @classmethod
    def of(cls, case: Case, model: nn.Module, optimizer: Optimizer, path: Any = None) -> Fitted:
        after = [model.state_dict(), optimizer.state_dict()["state"], torch.get_rng_state()]
        return cls(case, model, after, path)

    @cached_property
    def run(self) -> dualform.Run:
        return dualform.open(self.path)

    @cached_property
    def audit(self) -> dualform.Audit:
        return self.run.audit()

    @cached_property
    def by_row(self) -> set[str]:
        return {book.name for book in self.audit.books if book.granularity == "row"}


Fit: TypeAlias = Callable[[str, str, torch.dtype], Fitted]


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Trains a case with an optimizer and in a precision, and records it."""
    folder = tmp_path_factory.mktemp("fitted")

    @cache
    def make(name: str, optimizer: str, dtype: torch.dtype) -> Fitted:
        path = folder / f"{name}, {optimizer}, {dtype}"
        return Fitted.of(CASES[name], *fit(name, optimizer, dtype, path), path)

    return make
