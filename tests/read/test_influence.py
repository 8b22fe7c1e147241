"""The counterfactual read and its comparisons, against dense algebra in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.read.known import Known, flat
from torch import Tensor, nn

import dualform
from dualform.read import influence, ridge
from dualform.testing import Loop, train

ROUNDING = 1e-5
"""Columns are held in float32."""


def assert_close(found: Any, expected: Any, tolerance: float = ROUNDING) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


METHODS = ["ridge", "fisher", "ekfac", "tracin", "accounting"]
RULES = ["SGD", "SGD, groups", "SGD, Nesterov", "AdamW, amsgrad", "Adafactor"]


def solved(C: Tensor, b: Tensor, damping: float) -> Tensor:
    """`(1 + C Cᵀ/λ)⁻¹ b`, λ in units of the mean diagonal."""
    gram = C @ C.T
    scale = damping * gram.diagonal().mean()
    return torch.linalg.solve(torch.eye(len(C)).double() + gram / scale, b)


def natural(made: Known, C: Tensor, optimizer: str) -> Tensor:
    """`C h^(−½)`: h is the size of contributions over that of the gradients they were made of.

    SGD moves all parameters of a group alike: h is the rate, and a common factor does not matter.
    """
    if optimizer.startswith("SGD"):
        rates = {"0": 0.2, "2": 0.02} if optimizer == "SGD, groups" else {"0": 1.0, "2": 1.0}
        sizes = [torch.full(b.shape, rates[b.name[0]]) for b in made.run.info.books]
        h = flat(dict(zip([b.name for b in made.run.info.books], sizes, strict=True))).double()
    else:
        h = (C.square().mean(0) / made.summed().square().mean(0)).sqrt()
    return C / h.sqrt()


@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize("damping", [None, 0.1])
def test_ridge_is_dense_algebra(
    optimizer: str, damping: float | None, known: Callable[[str], Known]
) -> None:
    made = known(optimizer)
    C, g = made.contributions(), made.directions()
    expected = solved(natural(made, C, optimizer), C @ g.T, damping or 3.0)
    for rank in (None, 10, 1000):
        found = made.run.influence(made.model, made.x[:3], 1, damping=damping, rank=rank)
        assert_close(found.values, expected, 1e-4)
        assert (found.method, found.damping, found.kept) == ("ridge", damping or 3.0, 1.0)
        assert found.check is None
        assert found.queries == ["0: output 1", "1: output 1", "2: output 1"]


def test_leading_directions(known: Callable[[str], Known]) -> None:
    """The more directions, the more is kept; beyond the rank of C, everything."""
    made = known("SGD, Nesterov")
    exact = made.influence()
    found = [made.run.influence(made.model, made.x[:3], 1, rank=rank) for rank in range(1, 10)]
    kept = [one.kept for one in found]
    assert kept == sorted(kept)
    assert 0.2 < kept[0] < kept[-1] < 1
    errors = [np.abs(one.values - exact).max() / np.abs(exact).max() for one in found]
    assert errors[-1] < 1e-2
    assert errors[-1] == min(errors)


def test_leading_directions_of_a_matrix_of_low_rank_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    C = torch.randn(40, 6, generator=generator) @ torch.randn(6, 90, generator=generator)
    b = torch.randn(40, 3, generator=generator).double()
    found = ridge.make_ridge(Dense(C), rank=38)
    assert found.kept == pytest.approx(1.0, abs=1e-6)
    assert_close(found.solve(b, 3.0), solved(C.double(), b, 3.0), 1e-6)
    for rank in (6, 10):
        assert_close(
            ridge.make_ridge(Dense(C), rank).solve(b, 3.0), solved(C.double(), b, 3.0), 1e-6
        )


class Dense:
    """A matrix that is held whole, in two pieces."""

    def __init__(self, C: Tensor) -> None:
        self.groups, self._C = len(C), C

    def columns(self) -> Any:
        return [SimpleNamespace(values=part) for part in self._C.split(50, dim=1)]


def test_much_damping_is_accounting(known: Callable[[str], Known]) -> None:
    made = known("AdamW, amsgrad")
    C, g = made.contributions(), made.directions()
    assert_close(made.influence(damping=1e12), C @ g.T)
    assert_close(made.influence("accounting"), C @ made.gradients().T)


def test_the_order_of_ids_does_not_matter(tmp_path: Path) -> None:
    """Samples by other numbers: the same scores, under those numbers."""
    numbers = [7, 3, 11, 0, 5]
    values = {}
    for path, ids in (("plain", list(range(5))), ("renamed", numbers)):
        torch.manual_seed(0)
        model, x, y = nn.Linear(3, 2).double(), torch.randn(5, 3).double(), torch.randn(5, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with dualform.record(model, sgd, tmp_path / path) as recorder:
            for part in ([0, 1, 2], [3, 4, 0], [2, 1]):
                recorder.samples([ids[i] for i in part])
                (model(x[part]) - y[part]).square().sum().backward()
                sgd.step()
                sgd.zero_grad()
        run = dualform.open(tmp_path / path)
        for method in METHODS:
            found = run.influence(model, x[:2], 0, method=method)
            order = [list(found.ids).index(i) for i in ids]
            values[path, method] = found.values[order]
    for method in METHODS:
        assert_close(values["renamed", method], values["plain", method], 1e-6)


def test_what_does_not_depend_on_queries_is_kept(
    known: Callable[[str], Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = known("AdamW, amsgrad")
    run, found = dualform.open(made.run.path), []
    make = influence.make_ridge
    monkeypatch.setattr(influence, "make_ridge", lambda *a: found.append(1) or make(*a))
    first = run.influence(made.model, made.x[:3], 1, rank=4)
    again = run.influence(made.model, made.x[:3], 1, rank=4)
    run.influence(made.model, made.x[3:5], 0, damping=1.0, rank=4)
    assert len(found) == 1
    assert np.array_equal(first.values, again.values)
    assert first.kept == again.kept < 1
    run.influence(made.model, made.x[:3], 1)
    assert len(found) == 2


def test_columns_that_do_not_fit_are_scanned_again(
    known: Callable[[str], Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = known("AdamW, amsgrad")
    held = dualform.open(made.run.path).influence(made.model, made.x[:3], 1, rank=4)
    monkeypatch.setattr(influence, "free_memory", lambda: 0.0)
    scanned = dualform.open(made.run.path).influence(made.model, made.x[:3], 1, rank=4)
    assert np.array_equal(held.values, scanned.values)


# Comparisons from the same ledger


def test_tracin(known: Callable[[str], Known], tmp_path: Path) -> None:
    """Without momentum the last gradient's accounting; with kept steps, each span by its end."""
    made = known("SGD")
    assert_close(made.influence("tracin"), -0.1 * made.summed() @ made.gradients().T)
    assert_close(made.influence("tracin"), made.influence("accounting"))
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2))
    model, twin, x = model.double(), twin.double(), made.x
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    expected = torch.zeros(10, 3, dtype=torch.float64)
    with dualform.record(model, sgd, tmp_path / "run") as recorder:
        for parts in ([[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9, 0]]):
            taken: dict[int, Any] = {}
            for part in parts:
                twin.load_state_dict(model.state_dict())
                taken |= {i: taken.get(i, 0) + own_gradient(twin, x[[i]]) for i in part}
                recorder.samples(part)
                model(x[part]).square().sum().backward()
                sgd.step()
                sgd.zero_grad()
            recorder.checkpoint()
            twin.load_state_dict(model.state_dict())
            rows = torch.stack([own_gradient(twin, q[None], lambda out: out[0, 1]) for q in x[:3]])
            for i, gradient in taken.items():
                expected[i] -= 0.3 * rows @ gradient
    found = dualform.open(tmp_path / "run").influence(model, x[:3], 1, method="tracin")
    assert_close(found.values, expected)


def own_gradient(model: nn.Module, x: Tensor, of: Any = lambda out: out.square().sum()) -> Tensor:
    found = torch.autograd.grad(of(model(x)), list(model.parameters()))
    return flat({n: g for (n, _), g in zip(model.named_parameters(), found, strict=True)})


@pytest.mark.parametrize("optimizer", ["SGD, Nesterov", "AdamW, amsgrad"])
def test_fisher(optimizer: str, known: Callable[[str], Known]) -> None:
    """Samples' own gradients where training last saw them, solved against each other."""
    made = known(optimizer)
    G = -torch.stack([made.gradient(layers) for layers in made.last_seen()])
    for damping in (1.0, 0.2):
        expected = solved(G, G @ made.gradients().T, damping)
        assert_close(made.influence("fisher", damping=damping), expected, 1e-4)


@pytest.mark.parametrize("optimizer", ["SGD, Nesterov", "AdamW, amsgrad"])
def test_ekfac(optimizer: str, known: Callable[[str], Known]) -> None:
    """`−g_q (Λ + λ)⁻¹ g_i` in the eigenbases of errors and inputs, book by book."""
    made, damping = known(optimizer), 0.1
    layers, queries = made.last_seen(), made.gradients()
    names = sorted(book.name for book in made.run.info.books)
    sizes = [dict(made.model.named_parameters())[name].shape for name in names]
    parts = dict(zip(names, queries.split([s.numel() for s in sizes], 1), strict=True))
    expected = np.zeros((10, 3))
    for layer in ("0", "2"):
        keys, errors = (np.stack([s[layer][at].numpy() for s in layers]) for at in (0, 1))
        U, V = (np.linalg.eigh(rows.T @ rows)[1] for rows in (errors, keys))
        for name, own in ((f"{layer}.weight", keys @ V), (f"{layer}.bias", np.ones((10, 1)))):
            turned = np.einsum("ia,ib->iab", errors @ U, own).reshape(10, -1)
            asked = parts[name].numpy().reshape(3, U.shape[0], -1)
            asked = U.T @ asked @ (V if name.endswith("weight") else np.eye(1))
            size = np.square(turned).mean(0)
            expected -= turned @ (asked.reshape(3, -1) / (size + damping * size.mean())).T
    assert_close(made.influence("ekfac"), expected, 1e-4)


# What it is for


def test_leaving_samples_out(tmp_path: Path) -> None:
    """Least squares to convergence: influence foretells retraining better than accounting does."""
    torch.manual_seed(0)
    spread = torch.linspace(1, 0.2, 8).double()
    x, queries = torch.randn(30, 8).double() * spread, torch.randn(20, 8).double() * spread
    y = x @ torch.randn(8, 1).double() + 0.5 * torch.randn(30, 1).double()

    def fitted(left_out: int | None, path: Path | None = None) -> nn.Module:
        torch.manual_seed(1)
        model, kept = nn.Linear(8, 1).double(), [i for i in range(30) if i != left_out]
        sgd, loop = torch.optim.SGD(model.parameters(), lr=1 / 60), Loop(150, len(kept))
        train(model, sgd, x[kept], y[kept], loop, path, lambda out, y: (out - y).square().sum() / 2)
        return model

    model = fitted(None, tmp_path / "run")
    fallen = [(model(queries) - fitted(i)(queries)).detach() for i in range(30)]
    truth = torch.cat(fallen, 1).numpy()
    run, agreement = dualform.open(tmp_path / "run"), {}
    for method in METHODS:
        found = run.influence(model, queries, 0, method=method).values.T
        pairs = zip(found, truth, strict=True)
        agreement[method] = np.median([np.corrcoef(*pair)[0, 1] for pair in pairs])
    assert agreement["ridge"] > max(0.75, agreement["accounting"] + 0.1)
    assert agreement["fisher"] > max(0.8, agreement["accounting"] + 0.1)
    assert agreement["ekfac"] > 0.9
    assert agreement["tracin"] == pytest.approx(agreement["accounting"])
