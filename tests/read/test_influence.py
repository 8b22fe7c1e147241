"""The counterfactual read and its comparisons, against dense algebra in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.attribution.ekfac import ekfac
from tests.read.known_run import MAKE, Known, flat
from torch import Tensor, nn

import dualform
from dualform.ledger import Term
from dualform.memory.views import Region
from dualform.optimizers import walk_back
from dualform.read import ridge
from dualform.read.influence import OWN
from dualform.read.progress import watched
from dualform.read.replay import kept_moment
from dualform.read.samples_matrix.columns import Columns
from dualform.testing import Loop, train

ROUNDING = 1e-5
"""Columns are held in float32."""


def assert_close(found: Any, expected: Any, tolerance: float = ROUNDING) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


METHODS = ["ridge", "fisher", "tracin", "accounting"]
RULES = ["SGD", "SGD, groups", "SGD, Nesterov", "AdamW, amsgrad", "Adafactor"]


def solved(C: Tensor, g: Tensor, damping: float) -> Tensor:
    """`(1 + C Cᵀ/λ)⁻¹ C g`, λ in units of the mean diagonal; nothing where C is nothing."""
    gram = C @ C.T
    scale = damping * gram.diagonal().mean()
    return torch.linalg.solve(torch.eye(len(C)).double() + gram / scale, C @ g.T)


def lines(made: Known, C: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Contributions to what goes into a unit, or out of one, or to all biases; and directions.

    Weights are (6, 4) and (3, 6): the longer side of the first is that of its outputs.
    """
    at = 0
    for name, p in sorted(made.model.named_parameters()):
        parts = [M[:, at : at + p.numel()].reshape(len(M), *p.shape) for M in (C, g)]
        side = {"0.weight": 2, "2.weight": 1}.get(name)
        yield from zip(
            *([part] if side is None else part.unbind(side) for part in parts), strict=True
        )
        at += p.numel()


def by_lines(made: Known, C: Tensor, g: Tensor, damping: float) -> Tensor:
    """The sum of what each line gives."""
    return torch.stack([solved(*line, damping) for line in lines(made, C, g)]).sum(0)


def left(made: Known, C: Tensor, damping: float) -> float:
    """The share of `C Cᵀ` that solving leaves: of its trace, over all lines."""
    pairs = [(line @ line.T, line) for line, _ in lines(made, C, C)]
    rest = sum(solved(line, line, damping).trace() for _, line in pairs)
    return float(rest / sum(gram.trace() for gram, _ in pairs))


def stretched(made: Known) -> tuple[Tensor, Tensor]:
    """Contributions and directions in the optimizer's metric: `h^½ Σ g` and `h^½ ḡ`.

    `h` is what one more gradient would move in the end, by the memory that was kept last, had
    weights not decayed.
    """
    source, sizes = made.run.source, {}
    for book in made.run.info.books:
        moment = kept_moment(source.reader, source.accounting.rule, book, source.until)
        known = source.accounting.history(book).named(source.until - 1)
        args = (known, moment.state, moment.W, moment.b, torch.zeros_like(moment.W))
        step = source.accounting.rule.transition(*args)[0].written_out
        steps = [replace(step, M=((1.0, step.M[0][1]), (0.0, step.M[1][1])))] * 500  # no decay
        found, _ = walk_back(steps, (0.0, 0.0), [0.0] * 499 + [1.0])
        sizes[book.name] = found[0].abs().expand(book.shape)
    root = flat(sizes).sqrt()
    return -made.summed() * root, made.directions() * root


def measured(made: Known) -> tuple[Tensor, Tensor]:
    """The same with `h² = Σ (H g)² / Σ g²`, from each step's gradient and what became of it."""
    source, moved, plain = made.run.source, torch.zeros(51).double(), torch.zeros(51).double()
    for t, step in enumerate(made.steps, start=1):
        g, parts = sum(made.gradient(layers) for layers in step.values()), {}
        for book in made.run.info.books:
            spans = source.accounting.spans([book])
            H = {s: h for span in spans for s, h in span.coefficients[book.name].operators.items()}
            parts[book.name] = H[t].diagonal(book.shape)
        moved += (flat(parts) * g).square()
        plain += g.square()
    root = (moved / plain).sqrt().sqrt()
    return -made.summed() * root, made.directions() * root


def test_where_a_step_without_a_gradient_says_nothing(known: Callable[[str], Known]) -> None:
    """Rprop follows signs: how far it goes for a gradient is seen from the steps themselves."""
    made = known("Rprop")
    C, g = measured(made)
    expected = by_lines(made, C, g, 3.0) * OWN / left(made, C, 3.0)
    assert_close(made.influence(), expected, 1e-4)


def test_the_metric_by_hand(tmp_path: Path) -> None:
    """`h⁻² = mean (√v + ε)²` over the steps at which Adam's memory was kept."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1, bias=False), torch.randn(6, 4)
    adam, seen, kept = torch.optim.Adam(model.parameters(), lr=0.01), torch.zeros(6, 4), []
    with dualform.record(model, adam, tmp_path / "run") as recorder:
        for batch in ([0, 1, 2], [3, 4, 5], [0, 4, 2], [1, 3, 5]):
            recorder.samples(batch)
            out = model(x[batch])
            seen[batch] += 2 * out.detach() * x[batch]
            out.square().sum().backward()
            adam.step()
            adam.zero_grad()
            recorder.checkpoint()
            state = adam.state[model.weight]
            corrected = 0.999 * state["exp_avg_sq"][0] / (1 - 0.999 ** (int(state["step"]) + 1))
            kept.append(0.01 / (1 - 0.9 ** (int(state["step"]) + 1)) / (corrected.sqrt() + 1e-8))
    h = torch.stack(kept).double().square().reciprocal().mean(0).rsqrt()
    found = dualform.open(tmp_path / "run").influence(model, x[:2], 0, damping=1e12).values
    assert_close(found, -OWN * (seen.double() * h) @ x[:2].double().T)


@pytest.mark.parametrize("damping", [None, 0.1])
@pytest.mark.parametrize("optimizer", RULES)
def test_ridge_is_dense_algebra(
    optimizer: str, damping: float | None, known: Callable[[str], Known]
) -> None:
    made = known(optimizer)
    C, g = made.contributions(), made.directions()
    if not optimizer.startswith("SGD"):
        C, g = stretched(made)
    expected = by_lines(made, C, g, damping or 3.0) * OWN / left(made, C, damping or 3.0)
    for rank in (None, 10, 1000):
        found = made.run.influence(made.model, made.x[:3], 1, damping=damping, rank=rank)
        assert_close(found.values, expected, 1e-4)
        assert (found.method, found.damping) == ("ridge", damping or 3.0)
        assert found.kept == pytest.approx(1.0)
        assert found.check is None
        assert found.queries == ["0: output 1", "1: output 1", "2: output 1"]


@pytest.mark.skipif("Muon" not in MAKE, reason="torch.optim.Muon is new in torch 2.9")
def test_ridge_where_steps_turn_gradients(tmp_path: Path) -> None:
    """Contributions themselves, in units of how far each parameter moved for its gradients."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3, bias=False), torch.randn(6, 5)
    muon, seen = MAKE["Muon"](list(model.parameters())), torch.zeros(6, 3, 5)
    with dualform.record(model, muon, tmp_path / "run") as recorder:
        for batch in ([0, 1, 2], [3, 4, 5], [0, 4, 2], [1, 3, 5]):
            recorder.samples(batch)
            out = model(x[batch])
            for at, i in enumerate(batch):
                seen[i] += 2 * torch.outer(out[at].detach(), x[i])
            out.square().sum().backward()
            muon.step()
            muon.zero_grad()
    run = dualform.open(tmp_path / "run")
    left = [run.state_dict()["weight"] - run.subtract([i])["weight"] for i in range(6)]
    C, g = torch.stack(left).double(), torch.eye(3)[1][:, None] * x[:2][:, None]
    h = (C.square().mean(0) / (0.1 * seen).double().square().mean(0)).sqrt().sqrt()
    parts = [solved((C / h)[:, u], (g.double() * h)[:, u], 3.0) for u in range(3)]
    rest = sum(solved((C / h)[:, u], (C / h)[:, u], 3.0).trace() for u in range(3))
    expected = sum(parts) * OWN * (C / h).square().sum() / rest
    assert_close(run.influence(model, x[:2], 1).values, expected, 1e-4)


def test_leading_directions(known: Callable[[str], Known]) -> None:
    """The more directions of each line, the more is kept; with all of them, everything."""
    made = known("SGD, Nesterov")
    exact = made.influence()
    found = [made.run.influence(made.model, made.x[:3], 1, rank=rank) for rank in range(1, 7)]
    kept = [one.kept for one in found]
    assert kept == sorted(kept)
    assert 0.2 < kept[0] < kept[-2] < 1 == pytest.approx(kept[-1])
    errors = [np.abs(one.values - exact).max() / np.abs(exact).max() for one in found]
    assert errors[-1] == min(errors) == 0
    assert errors[-2] < 1e-2


@pytest.mark.parametrize("shape", [(40, 90), (90, 40)])
def test_leading_directions_of_a_matrix_of_low_rank_are_exact(shape: tuple[int, int]) -> None:
    """Through either of its sides."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(shape[0], 6, generator=generator)
    C = left @ torch.randn(6, shape[1], generator=generator)
    b = torch.randn(shape[0], 3, generator=generator).double()
    gram = (C @ C.T).double()
    λ = 3.0 * gram.diagonal().mean()
    expected = torch.linalg.solve(torch.eye(shape[0]).double() + gram / λ, b)
    for rank in (6, 10, 38):
        found = ridge.make_ridge(C, rank, samples=shape[0])
        assert found.inside == pytest.approx(found.trace, rel=1e-6)
        assert_close(found.damped(3.0).solve(b), expected, 1e-6)


def test_a_line_through_either_side() -> None:
    """`C (1 + CᵀC/λ)⁻¹ = (1 + C Cᵀ/λ)⁻¹ C`: few samples or many."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((7, 4), (4, 7)):
        C = torch.randn(shape, generator=generator)
        g = torch.randn(2, shape[1], generator=generator)
        book = SimpleNamespace(name="w", shape=(1, shape[1]))
        term = Term("outer", "rows")
        columns = Columns(book, term, Region.whole(1, shape[1]), C)
        matrix = SimpleNamespace(
            groups=shape[0],
            books=[book],
            coordinates={},
            whole=lambda _, columns=columns: columns,
            is_large=lambda _: False,
            columns=lambda _, columns=columns: [columns],
        )
        found = ridge.Lines(None).solve(matrix, {"w": g[:, None]}, 3.0)
        assert_close(found, solved(C.double(), g.double(), 3.0), 1e-5)


def test_it_says_how_far_it_is_and_can_be_cancelled(known: Callable[[str], Known]) -> None:
    made, told = known("SGD, Nesterov"), []

    def watch(doing: str, share: float) -> None:
        told.append((doing, share))
        raise KeyboardInterrupt

    with watched(watch), pytest.raises(KeyboardInterrupt):
        made.influence()
    assert len(told) == 1
    assert told[0][0].startswith("reading ")
    assert 0 < told[0][1] <= 1


def test_much_damping_is_accounting(known: Callable[[str], Known]) -> None:
    """In proportion; of gradients stretched by h, where each element has its own coefficient."""
    made = known("SGD, Nesterov")
    C, g = made.contributions(), made.directions()
    assert_close(made.influence(damping=1e12), OWN * C @ g.T)
    adaptive = known("AdamW, amsgrad")
    C, g = stretched(adaptive)
    assert_close(adaptive.influence(damping=1e12), OWN * C @ g.T)
    C = adaptive.contributions()
    assert_close(adaptive.influence("accounting"), C @ adaptive.gradients().T)


@pytest.mark.parametrize("rank", [3, 38])
def test_what_is_left_by_solving(rank: int) -> None:
    """The trace of `K (1 + K/λ)⁻¹`, with the rest of K taken for its mean."""
    C = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    made = ridge.make_ridge(C, rank, samples=40)
    K = made.Q @ made.M @ made.Q.T + made.tail * (torch.eye(40) - made.Q @ made.Q.T)
    expected = torch.linalg.solve(torch.eye(40).double() + K / (2.0 * made.scale), K).trace()
    assert made.damped(2.0).left() == pytest.approx(float(expected), rel=1e-6)


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
    """Of all lines: 4 + 3 of weights and 2 biases; as far as there is memory for it."""
    made = known("AdamW, amsgrad")
    run, found = dualform.open(made.run.path), []
    make = ridge.make_ridge
    monkeypatch.setattr(ridge, "make_ridge", lambda *a: found.append(1) or make(*a))
    first = run.influence(made.model, made.x[:3], 1, rank=2)
    again = run.influence(made.model, made.x[:3], 1, rank=2)
    run.influence(made.model, made.x[3:5], 0, damping=1.0, rank=2)
    assert len(found) == 9
    assert np.array_equal(first.values, again.values)
    assert first.kept == again.kept < 1
    run.influence(made.model, made.x[:3], 1)
    assert len(found) == 18
    monkeypatch.setattr(ridge, "KEPT_BYTES", 0)
    run, found[:] = dualform.open(made.run.path), []
    for _ in range(2):
        assert np.array_equal(run.influence(made.model, made.x[:3], 1, rank=2).values, first.values)
    assert len(found) == 18


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
        expected = by_lines(made, G, made.gradients(), damping)
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
    assert_close(ekfac(made.run, made.model, made.x[:3], 1), expected, 1e-4)


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
    found = ekfac(run, model, queries, 0).T
    assert np.median([np.corrcoef(*p)[0, 1] for p in zip(found, truth, strict=True)]) > 0.9
    assert agreement["tracin"] == pytest.approx(agreement["accounting"])
