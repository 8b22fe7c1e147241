"""Muon: exact in exact arithmetic, and measured where torch computes in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optimizers.replaying import errors, gradients, train
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform
from dualform.optimizers.muon import (
    MuonRule,
    orthogonalizer,
    rounded_orthogonalizer,
    rounded_step,
)
from dualform.optimizers.operators import Sided, apply

Muon = getattr(torch.optim, "Muon", None)
pytestmark = pytest.mark.skipif(Muon is None, reason="torch has Muon from 2.9 on")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.5},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"adjust_lr_fn": "original", "ns_steps": 3, "ns_coefficients": (1.5, -0.5, 0.0), "eps": 10.0},
    {"momentum": 0.0, "ns_steps": 0},
]
SHAPES = [(4, 7), (7, 4), (5, 5)]


def make(options: dict[str, Any], parameters: Sequence[Tensor]) -> Optimizer:
    assert Muon is not None
    found: Optimizer = Muon(parameters, lr=0.02, **options)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "gaps", "any size"])
def test_replay_is_what_exact_arithmetic_does(
    options: dict[str, Any], shape: tuple[int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's own step held in float64: the one thing changed is its rounding."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    torch.manual_seed(0)
    given = gradients(kind, 12, shape)
    training = train(MuonRule(), lambda p: make(options, p), given)
    for start in (0, 3):
        assert max(errors(MuonRule(), training, start)) <= 1e-11


@pytest.mark.parametrize("shape", [(20, 35), (35, 20), (25, 25)], ids=str)
def test_rounding_of_torch_is_left_over(shape: tuple[int, int]) -> None:
    """The momentum is replayed, the weights up to what bfloat16 added outside the span of it."""
    torch.manual_seed(0)
    training = train(
        MuonRule(), lambda p: make({}, p), gradients("plain", 12, shape), torch.float32
    )
    _, error = errors(MuonRule(), training, 0)
    change = (training.W[-1] - training.W[0]).abs().max() / training.W[-1].abs().max()
    assert 1e-5 < error / change < 3e-3


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5)], ids=str)
def test_the_step_is_torch_s_own_in_the_span(shape: tuple[int, int]) -> None:
    """To the bit the same rounds; on the smaller side, the matrix gives their whole step."""
    torch.manual_seed(0)
    hyper = dict(zip(MuonRule.fields, MuonRule().hyper(group_of({})), strict=True))
    weight, u = torch.zeros(shape), torch.randn(shape)
    optimizer = make({"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}, [weight])
    weight.grad = u.clone()
    optimizer.step()
    far = 0.02 * max(1.0, shape[0] / shape[1]) ** 0.5
    step, exact = (
        rounded_step(hyper, u.double()),
        apply(orthogonalizer(hyper, u.double()), u.double()),
    )
    assert torch.allclose(weight.double(), -far * step, rtol=1e-6)
    found = apply(rounded_orthogonalizer(hyper, u.double()), u.double())
    inside = u.double() @ torch.linalg.pinv(u.double()) @ step
    if shape[0] <= shape[1]:
        inside = step @ torch.linalg.pinv(u.double()) @ u.double()
    assert torch.allclose(found, inside, atol=1e-6 if shape[0] == shape[1] else 1e-1)
    assert (found - step).norm() < 0.9 * (exact - step).norm()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_smaller_side_is_taken(shape: tuple[int, int]) -> None:
    hyper = dict(zip(MuonRule.fields, MuonRule().hyper(group_of({})), strict=True))
    u = torch.randn(shape, dtype=torch.float64)
    A = orthogonalizer({**hyper, "ns_1": 1.5, "ns_3": -0.5, "ns_5": 0.0, "ns_steps": 40.0}, u)
    assert isinstance(A, Sided)
    assert A.matrix.shape == (min(shape), min(shape))
    sizes = torch.linalg.svdvals(apply(A, u))
    assert torch.allclose(sizes, torch.ones_like(sizes))


def test_options_become_numbers() -> None:
    def adjustment(given: str | None) -> float:
        return MuonRule().hyper({**group_of({}), "adjust_lr_fn": given})[-1]

    assert [adjustment(n) for n in (None, "original", "match_rms_adamw", "none")] == [0, 0, 1, 2]


def group_of(options: dict[str, Any]) -> dict[str, Any]:
    """The one group of a Muon with these options."""
    return make(options, [torch.zeros(2, 2)]).param_groups[0]


class Placed(nn.Module):
    """A matrix that is added, not multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 4)."""
        return torch.tanh(x + self.at).sum(1)


def test_a_matrix_that_is_seen_as_a_column(tmp_path: Path) -> None:
    """A score is what is missing once the sample is subtracted."""
    torch.manual_seed(0)
    model, x = Placed(), torch.randn(8, 3, 4, dtype=torch.float64)
    muon = torch.optim.Muon(model.parameters(), lr=0.02)
    with dualform.record(model, muon, tmp_path / "run") as recorder:
        for step in range(5):
            ids = torch.arange(8)[step % 2 :: 2]
            recorder.samples(ids)
            model(x[ids]).square().sum().backward()
            muon.step()
            muon.zero_grad()
    run = dualform.open(tmp_path / "run")
    added = [run.state_dict()["at"] - run.subtract([i])["at"] for i in range(8)]
    explained = run.explain(model, x[:2], 1)
    (questions,) = explained.questions
    expected = torch.einsum("iab,qab->iq", torch.stack(added), questions.directions["at"].double())
    close = {"rtol": 0, "atol": 1e-6 * float(expected.abs().max())}
    torch.testing.assert_close(torch.from_numpy(explained.values), expected, **close)
    found = torch.from_numpy(run.influence(model, x[:2], 1, method="accounting").values)
    slope = 1 - torch.tanh(x[:2] + run.state_dict()["at"]).square()
    expected = torch.einsum("ia,qa->iq", torch.stack(added)[:, :, 1], slope[:, :, 1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
