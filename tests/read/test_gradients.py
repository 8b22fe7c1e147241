"""Gradients of all queries from one backward pass, against plain autograd query by query."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.architectures.problems import ARCHITECTURES, problem
from tests.grid.cases import CASES
from tests.grid.grid import problem as grid_problem
from torch import Tensor, nn

from dualform.read.gradients import Gradients
from dualform.read.targets import Asked

EXACT = 1e-10
QUERIES = [2, 0, 1]
"""Not in order: an answer belongs to its query, not to its place."""

DIRECT = {
    "EmbeddingBag, max": {"weight"},
    "Weight norm": {"parametrizations.weight.original0", "parametrizations.weight.original1"},
    "Orthogonal": {"parametrizations.weight.original"},
    "Checkpointing, reentrant": {
        "block.0.weight",
        "block.0.bias",
        "block.2.weight",
        "block.2.bias",
    },
}
"""What is differentiated query by query. A maximum is no sum of rows, and a parametrization's
parameters are no layer's weights: both are booked by step as well. A reentrant checkpoint makes its
calls in the backward pass, when nobody looks."""
REFUSED = "Embedding, max_norm"
"""It changes its weights when it is called; see the tests of bad input."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def by_autograd(
    model: nn.Module, x: Tensor | dict[str, Tensor], axis: int, query: int, target: Any
) -> dict[str, Tensor]:
    """One query's gradient: the model called with it alone."""
    alone = copy.deepcopy(model)
    if isinstance(alone, nn.Embedding):
        alone.scale_grad_by_freq = False  # which makes of the derivative something else
    at = torch.tensor([query])
    given = x if isinstance(x, dict) else {"": x}
    one = {n: t.index_select(min(axis, t.ndim - 1), at) for n, t in given.items()}
    target(alone(**one) if isinstance(x, dict) else alone(one[""])).backward()
    found = {n: p for n, p in alone.named_parameters() if p.requires_grad}
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in found.items()}


def weighted_sum(like: Tensor) -> Callable[[Any], Tensor]:
    """`Σ w_i out_i` with fixed random weights: no output's gradient can hide behind another's."""
    weights = torch.randn(like.shape, generator=torch.Generator().manual_seed(3)).to(like)
    return lambda out: (getattr(out, "logits", out) * weights).sum()


def asked_here(asked: Asked, queries: Sequence[int]) -> tuple[Gradients, dict[str, Tensor]]:
    names = trained_names(asked.model)
    here = {n: p.detach().clone() for n, p in asked.model.named_parameters() if n in names}
    found = Gradients(asked, names)
    return found, found.integral([(1.0, here)], queries)


def assert_by_autograd(
    model: nn.Module, x: Any, axis: int = 0, direct: set[str] | None = None
) -> None:
    """Every query's gradient of every parameter, and which were found without rows."""
    model.eval()
    given = x if isinstance(x, dict) else {"": x}
    first = {n: t.narrow(min(axis, t.ndim - 1), 0, 1) for n, t in given.items()}
    with torch.no_grad():
        out = model(**first) if isinstance(x, dict) else model(first[""])
    target = weighted_sum(getattr(out, "logits", out))
    found, got = asked_here(Asked(model, x, target), QUERIES)
    expected = [by_autograd(model, x, axis, query, target) for query in QUERIES]
    for name, gradient in got.items():
        stacked = torch.stack([one[name] for one in expected])
        torch.testing.assert_close(gradient, stacked, rtol=EXACT, atol=EXACT)
        assert stacked.any(), name
    assert found._direct == (direct or set())


@pytest.mark.parametrize("case", [name for name in CASES if name != REFUSED])
def test_every_kind_of_layer(case: str) -> None:
    given = grid_problem(case, torch.float64)
    assert_by_autograd(given.model, given.x[:3], direct=DIRECT.get(case))


@pytest.mark.parametrize("name", ["LSTM", "LSTM, time first", "LSTM, packed", "ViT", "ResNet"])
def test_whole_architectures_asked_by_keyword(name: str) -> None:
    """Among them: time first, sequences of unequal length, class tokens, ReLUs in place."""
    given = problem(name, torch.float64)
    axis = ARCHITECTURES[name].axis
    x = {n: t.narrow(axis if t.ndim > axis else 0, 0, 3) for n, t in given.batch.items()}
    assert_by_autograd(given.model, x, axis)
