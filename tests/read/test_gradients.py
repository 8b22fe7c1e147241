"""Gradients of all queries from one backward pass, against plain autograd query by query."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.architectures.problems import problem
from tests.cases import architectures
from tests.cases.layers import CASES
from tests.laws.grid import problem as grid_problem
from torch import Tensor, nn

from dualform.errors import ReadingError
from dualform.read import gradients
from dualform.read.gradients import Gradients
from dualform.read.targets import Asked

EXACT = 1e-10
QUERIES = [2, 0, 1]
"""Not in order: an answer belongs to its query, not to its place."""

DIRECT = {
    "EmbeddingBag, max": {"weight"},
    "Checkpointing, reentrant": {
        "block.0.weight",
        "block.0.bias",
        "block.2.weight",
        "block.2.bias",
    },
}
"""What is differentiated query by query. A maximum is no sum of rows, and is booked by step too.
A reentrant checkpoint makes its calls in the backward pass, when nobody looks."""
REFUSED = "Embedding, max_norm"
"""It changes its weights when it is called; see the tests of bad input."""


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
    return found, found.integrals([(1.0, here)], queries)


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
    assert set().union(*found._direct.values()) == (direct or set())


@pytest.mark.parametrize("case", [name for name in CASES if name != REFUSED])
def test_every_kind_of_layer(case: str) -> None:
    given = grid_problem(case, torch.float64)
    assert_by_autograd(given.model, given.x[:3], direct=DIRECT.get(case))


@pytest.mark.parametrize("name", ["LSTM", "LSTM, time first", "LSTM, packed", "ViT", "ResNet"])
def test_whole_architectures_asked_by_keyword(name: str) -> None:
    """Among them: time first, sequences of unequal length, class tokens, ReLUs in place."""
    given = problem(name, torch.float64)
    axis = architectures.CASES[name].axis
    x = {n: t.narrow(axis if t.ndim > axis else 0, 0, 3) for n, t in given.batch.items()}
    assert_by_autograd(given.model, x, axis)


def test_rows_are_added_up_in_any_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Σ w ∇f(W)` is linear in its nodes, and does not depend on what is kept pending."""
    given = grid_problem("Functional", torch.float64)
    asked = Asked(given.model, given.x[:3], lambda out: out.sum())
    names = trained_names(given.model)
    here = {n: p.detach() for n, p in given.model.named_parameters()}
    there = {n: p + 1 for n, p in here.items()}
    together = Gradients(asked, names).integral([(0.5, here), (-2.0, there)], QUERIES)
    one, other = (Gradients(asked, names).integral([(1.0, w)], QUERIES) for w in (here, there))
    monkeypatch.setattr(gradients, "PENDING_BYTES", 0)
    at_once = Gradients(asked, names).integral([(0.5, here), (-2.0, there)], QUERIES)
    for name in names:
        torch.testing.assert_close(together[name], at_once[name], rtol=1e-12, atol=1e-12)
        combined = 0.5 * one[name] - 2 * other[name]
        torch.testing.assert_close(together[name], combined, rtol=1e-12, atol=1e-12)


# Targets

CLASSES = 3


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


class Dressed(nn.Module):
    """A model whose output is an object, with a loss over the batch if labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = self.inner(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).double()
LABELS = torch.tensor([2, 0, 1, 1])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (1, lambda out: out[:, 1]),
        ([2, 0, 1, 1], lambda out: out.gather(1, LABELS[:, None])[:, 0]),
        (LABELS, lambda out: out.gather(1, LABELS[:, None])[:, 0]),
        (tuple(LABELS.tolist()), lambda out: out.gather(1, LABELS[:, None])[:, 0]),
        (None, lambda out: out.max(1).values),
        (lambda out: out[0, 0] - out[0, 2], lambda out: out[:, 0] - out[:, 2]),
        (
            (nn.functional.cross_entropy, LABELS),
            lambda out: nn.functional.cross_entropy(out, LABELS, reduction="none"),
        ),
    ],
    ids=["class", "classes", "tensor", "tuple", "largest", "function", "loss"],
)
@pytest.mark.parametrize("dressed", [False, True], ids=["tensor", "object"])
def test_targets(target: Any, expected: Callable[[Tensor], Tensor], dressed: bool) -> None:
    model = Dressed() if dressed else classifier()
    inner: nn.Module = model.inner if isinstance(model, Dressed) else model
    if dressed and (callable(target) or (isinstance(target, tuple) and callable(target[0]))):
        target = undressed(target)
    found = Asked(model, X, target).values({})
    torch.testing.assert_close(found, expected(inner(X)).detach(), rtol=1e-12, atol=1e-12)


def undressed(target: Any) -> Any:
    if callable(target):
        return lambda out: target(out.logits)
    return (lambda out, label: target[0](out.logits, label), target[1])


@pytest.mark.parametrize(
    "x", [(X, LABELS), [X, LABELS], {"x": X, "labels": LABELS}], ids=["tuple", "list", "mapping"]
)
def test_a_mean_over_the_batch_is_asked_query_by_query(x: Any) -> None:
    """As transformers' models give their loss: no query may answer for another."""
    model = Dressed()
    given = tuple(x) if isinstance(x, list) else x
    asked = Asked(model, given, lambda out: out.loss)
    alone = nn.functional.cross_entropy(model.inner(X), LABELS, reduction="none")
    torch.testing.assert_close(asked.values({}), alone.detach(), rtol=1e-12, atol=1e-12)
    assert [list(batch) for batch in asked.batches(range(3))] == [[0], [1], [2]]


def test_lengths_beside_sequences_that_are_time_first() -> None:
    """Lengths have one dimension, the one that counts queries, wherever sequences have it."""
    lstm = nn.LSTM(4, 3).double()

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = lstm

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            return self.lstm(packed)[1][0][-1]

    x, lengths = torch.randn(5, 3, 4).double(), torch.tensor([2, 5, 3])
    asked = Asked(Read(), (x, lengths), target=1)
    expected = [lstm(x[: lengths[q], q : q + 1])[1][0][-1, 0, 1] for q in range(3)]
    torch.testing.assert_close(asked.values({}), torch.stack(expected).detach())


BAD: Mapping[str, tuple[Any, Any, str]] = {
    "too few": (X, [1, 2], r"got classes of shape \(2,\) for 4 queries; give one for each query"),
    "too few labels": (
        X,
        (nn.functional.mse_loss, [1]),
        r"got labels of shape \(1,\) for 4 queries",
    ),
    "out of range": (
        X,
        3,
        r"target=3: the model has outputs 0 to 2; give one for all queries, one",
    ),
    "negative": (X, -1, r"target=-1: the model has outputs 0 to 2"),
    "float": (X, 1.0, r"target=1.0: the model has outputs 0 to 2"),
    "words": (X, "cat", r"target='cat': give a class \(an integer\) for all queries, one for each"),
    "many": (X, lambda out: out, r"one number for each query; it gave \(1, 3\) for one query.*Sum"),
    "no tensor": (X, lambda out: 1.0, r"one number for each query; it gave float for one query"),
    "tokens": (
        X[:, None],
        1,
        r"the model gives \(1, 1, 3\) and not \(queries, classes\); give x as",
    ),
    "no queries": (X[:0], 1, r"at least one; it holds one of shape \(0, 4\)"),
    "nothing": ("words", 1, r"x must hold queries as a tensor, at least one; it holds no tensor"),
}


@pytest.mark.parametrize("bad", BAD)
def test_targets_that_cannot_be_asked(bad: str) -> None:
    x, target, message = BAD[bad]
    with pytest.raises(ReadingError, match=message):
        Asked(classifier(), x, target)


@pytest.mark.parametrize(
    "target", [lambda out: out.argmax().double(), lambda out: out.detach().sum()]
)
def test_targets_without_a_derivative(target: Any) -> None:
    with pytest.raises(ReadingError, match=r"cannot be differentiated: nothing connects.*a logit"):
        asked_here(Asked(classifier(), X, target), QUERIES)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1)), r"'1' \(Dropout\) makes.*model.eval\(\)"),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), r"'1' \(BatchNorm1d\) makes"),
        (nn.LSTM(4, 3, num_layers=2, dropout=0.1), r"'' \(LSTM\) makes.*random"),
    ],
)
def test_models_in_training_mode(model: nn.Module, message: str) -> None:
    with pytest.raises(ReadingError, match=f"the model is in training mode, and {message}"):
        Asked(model, X.float(), 1)
    if isinstance(model, nn.Sequential):
        assert Asked(model.eval(), X.float(), 1).count == 4


def test_embeddings_that_change_when_called() -> None:
    given = grid_problem(REFUSED, torch.float64)
    before = given.model.weight.detach().clone()
    with pytest.raises(ReadingError, match=r"max_norm=1.0: it changes its weights.*after optim"):
        Asked(given.model, given.x, lambda out: out.sum())
    assert torch.equal(before, given.model.weight)
