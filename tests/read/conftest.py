"""Small recorded runs, each trained once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.cases.optimizers import OPTIMIZERS
from tests.laws.grid import problem
from tests.read.known_run import Known
from tests.told import told
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform
from dualform.read import Run
from dualform.read.explain import Explanation
from dualform.testing import Loop, train

LOOP = Loop(steps=9, batch=4, accumulate=2, clip=5.0, schedule=True)


class Unknown(Optimizer):
    """An optimizer without a rule."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.05 * parameter.grad.sign() * parameter.grad.abs().sqrt())


@dataclass(frozen=True)
class Recorded:
    """A trained model in evaluation mode, its samples, and the run."""

    model: nn.Module
    x: Tensor
    run: Run

    def added(self, sample: int) -> dict[str, Tensor]:
        """What a sample added to every parameter: what is missing once it is subtracted."""
        left, trained = self.run.subtract([sample]), self.run.state_dict()
        return {book.name: trained[book.name] - left[book.name] for book in self.run.info.books}

    def account(self, explanation: Explanation) -> Tensor:
        """(samples, queries): `⟨Ḡ, W_T − subtract([i])⟩`."""
        (questions,) = explanation.questions
        return torch.stack([self.along(questions.directions, self.added(i)) for i in self.run.ids])

    @staticmethod
    def along(directions: dict[str, Tensor], part: dict[str, Tensor]) -> Tensor:
        shares = [directions[n].flatten(1) @ p.flatten().to(directions[n]) for n, p in part.items()]
        return torch.stack(shares).sum(0)


def mlp(activation: type[nn.Module], bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias), activation(), nn.Linear(6, 3, bias)).double()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recorded]:
    """A two-layer network of ten samples, by optimizer; Muon takes no biases."""
    folder = tmp_path_factory.mktemp("recorded")

    @cache
    def train_one(optimizer: str, activation: type[nn.Module]) -> Recorded:
        torch.manual_seed(0)
        model = mlp(activation, bias=optimizer != "Muon")
        x, y = torch.randn(10, 4).double(), 3 * torch.randn(10, 3).double()
        known = {**OPTIMIZERS, "unknown": Unknown}
        made = known[optimizer](list(model.parameters()))
        path = folder / f"{optimizer}, {activation.__name__}"
        with told(path):
            train(model, made, x, y, LOOP, path)
        return Recorded(model.eval(), x, dualform.open(path))

    return lambda optimizer, activation=nn.Tanh: train_one(optimizer, activation)


@pytest.fixture(scope="session")
def recorded_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recorded]:
    """A case of the grid."""
    folder = tmp_path_factory.mktemp("cases")

    @cache
    def make(case: str, optimizer: str) -> Recorded:
        given, path = problem(case, torch.float64), Path(folder) / f"{case}, {optimizer}"
        given.train(optimizer, path)
        return Recorded(given.model.eval(), given.x, dualform.open(path))

    return make


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Known]:
    folder = tmp_path_factory.mktemp("known")
    return cache(lambda optimizer: Known(folder / optimizer, optimizer))
