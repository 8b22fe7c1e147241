"""Attention paths: features, action and scores against plain loops; what renormalization is for."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.diagnose.models import encoder, gpt2
from tests.diagnose.test_report import Pools
from torch import Tensor, nn

from dualform import diagnose
from dualform.diagnose import PathPrior, fit_paths, head_scores, path_features, paths
from dualform.diagnose.path_kernels import action
from dualform.errors import AttentionError


def drawn(samples: int = 12, heads: tuple[int, ...] = (2, 3), tokens: int = 5) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, tokens, 4, generator=generator, dtype=torch.float64)
    scores = [
        torch.randn(samples, n, tokens, tokens, generator=generator, dtype=torch.float64)
        for n in heads
    ]
    y = torch.randn(samples, generator=generator, dtype=torch.float64).sign()
    return x, [s.softmax(-1) for s in scores], y


@pytest.mark.parametrize("query", [-1, 2, None])
@pytest.mark.parametrize("skip", [False, True])
def test_features_are_sums_over_ways_of_tokens(query: int | None, skip: bool) -> None:
    x, attention, _ = drawn()
    features = path_features(x, attention, query, skip)
    layers = [
        torch.cat([A, torch.eye(5).double().expand(12, 1, 5, 5)], 1) if skip else A
        for A in attention
    ]
    every = list(itertools.product(*[range(A.shape[1]) for A in layers]))
    assert features.shape == (12, len(every), 4)
    for at, (one, two) in enumerate(every):
        for sample in range(0, 12, 5):
            whole = layers[1][sample, two] @ layers[0][sample, one] @ x[sample]
            expected = whole.mean(0) if query is None else whole[query]
            torch.testing.assert_close(features[sample, at], expected, rtol=0, atol=1e-12)


def plain_action(
    C: Any,
    y: Any,
    heads: tuple[int, ...],
    widths: tuple[float, ...],
    s2: float,
    T: float,
    u: float,
    U: Any,
) -> float:
    """The formula, with loops over paths, in numpy."""
    count = len(y)
    K = np.zeros((count, count))
    for p, q in itertools.product(range(len(U[0])), repeat=2):
        K += U[0][p, q] * C[p, q]
    K += T * np.eye(count)
    total = np.linalg.slogdet(K)[1] + y @ np.linalg.inv(K) @ y
    total += widths[-1] * (u / s2 - math.log(u))
    last = len(heads) - 1
    total += widths[last] * (
        np.trace(U[last]) / (u * s2) - np.linalg.slogdet(U[last])[1] + heads[last] * math.log(u)
    )
    for at in range(last):
        above, inside = U[at + 1], np.zeros_like(U[at + 1])
        size = len(above)
        for head in range(heads[at]):
            for p, q in itertools.product(range(size), repeat=2):
                inside[p, q] += U[at][head * size + p, head * size + q]
        total += widths[at] * (
            np.trace(np.linalg.inv(above) @ inside) / s2
            - np.linalg.slogdet(U[at])[1]
            + heads[at] * np.linalg.slogdet(above)[1]
        )
    return float(total)


def test_the_action_is_its_formula() -> None:
    x, attention, y = drawn()
    features, prior = path_features(x, attention), PathPrior((2, 3), (3.0, 5.0, 7.0), 1.3, 0.2)
    generator = torch.Generator().manual_seed(1)
    U = []
    for size in (6, 3):
        root = torch.randn(size, size, generator=generator, dtype=torch.float64)
        U.append(root @ root.T + torch.eye(size).double())
    C = np.einsum("npd,mqd->pqnm", features, features) * 1.3 / (4 * 6)
    expected = plain_action(
        C, y.numpy(), (2, 3), (3.0, 5.0, 7.0), 1.3, 0.2, 0.7, [one.numpy() for one in U]
    )
    found = action(torch.from_numpy(C), y, prior, torch.tensor(0.7, dtype=torch.float64), U)
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_very_wide_layers_are_a_gaussian_process() -> None:
    x, attention, y = drawn()
    features = path_features(x, attention)
    gp = fit_paths(features, y, PathPrior((2, 3), 1e7, 1.3), renormalized=False)
    wide = fit_paths(features, y, PathPrior((2, 3), 1e7, 1.3))
    torch.testing.assert_close(gp.order, 1.3**3 * torch.eye(6).double())
    torch.testing.assert_close(wide.order, gp.order, rtol=0, atol=1e-3)
    K = 1.3**4 / (4 * 6) * features.flatten(1) @ features.flatten(1).T
    direct = K @ torch.linalg.inv(K + 0.01 * torch.eye(12).double()) @ y
    torch.testing.assert_close(gp.predict(features), direct, rtol=0, atol=1e-9)


@pytest.mark.parametrize("heads", [(3,), (2, 2)])
def test_narrow_layers_settle_where_the_action_is_least(heads: tuple[int, ...]) -> None:
    x, attention, y = drawn(heads=heads)
    features, prior = path_features(x, attention), PathPrior(heads, 4.0, temperature=0.1)
    found, gp = fit_paths(features, y, prior), fit_paths(features, y, prior, renormalized=False)
    assert found.action < gp.action - 0.1
    from scipy.optimize import minimize

    sizes = [math.prod(heads[at:]) for at in range(len(heads))]
    C = np.einsum("npd,mqd->pqnm", features, features) / (4 * prior.paths)

    def plain(z: Any) -> float:
        """By log u and the factors' entries, one after the other."""
        U, at = [], 1
        for size in sizes:
            L = np.zeros((size, size))
            L[np.tril_indices(size)] = z[at : at + size * (size + 1) // 2]
            at += size * (size + 1) // 2
            L[np.diag_indices(size)] = np.exp(L.diagonal())
            U.append(L @ L.T)
        widths = (4.0,) * (len(heads) + 1)
        return plain_action(C, y.numpy(), heads, widths, 1.0, 0.1, math.exp(z[0]), U)

    count = 1 + sum(size * (size + 1) // 2 for size in sizes)
    best = minimize(plain, np.zeros(count), method="L-BFGS-B", options={"maxiter": 60})
    assert found.action <= best.fun + 1e-6
    assert found.action == pytest.approx(best.fun, abs=0.01)


def test_scores_count_the_pairs_that_use_a_head() -> None:
    U = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    every = list(itertools.product(range(2), range(3)))
    for layer, scores in enumerate(head_scores(U, (2, 3))):
        for head, score in enumerate(scores):
            uses = sum(
                abs(float(U[p, q]))
                for p, one in enumerate(every)
                for q, two in enumerate(every)
                if head in (one[layer], two[layer]) and (one[layer] == head or two[layer] == head)
            )
            assert float(score) == pytest.approx(uses / float(U.abs().sum()), rel=1e-12)


def test_renormalized_kernels_find_the_head_that_tells() -> None:
    """Of four heads, one brings the class and three bring noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(160, generator=generator).sign().double()
    features = 4 * torch.randn(160, 4, 20, generator=generator).double()
    features[:, 2] /= 4
    features[:, 2, 0] += 1.5 * y
    gp, found = (
        fit_paths(features[:60], y[:60], PathPrior((4,), 4.0), renormalized)
        for renormalized in (False, True)
    )
    right = [
        float((one.predict(features[60:]).sign() == y[60:]).double().mean()) for one in (gp, found)
    ]
    assert right[1] > right[0] + 0.05
    assert int(found.head_scores[0].argmax()) == 2
    torch.testing.assert_close(gp.head_scores[0], torch.full((4,), 0.25).double())


class TellsFirst(nn.Module):
    """Two blocks whose second head, in the first, reads the first token; others read all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reads(at == 0) for at in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Reads(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.stack([x, x], 1)
        mask = torch.ones(2, x.shape[1], x.shape[1]).bool()
        mask[1, :, int(self.first) :] = not self.first
        mask[1, :, 0] = True
        nothing = torch.zeros_like(heads)
        y = nn.functional.scaled_dot_product_attention(nothing, nothing, heads, mask)
        return y.mean(1) * self.weight  # type: ignore[no-any-return]


def test_a_network_is_scored_by_the_paths_that_its_attention_makes() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 12, 6, generator=generator)
    y = x[:, 0, 0].sign().double()
    found = paths(TellsFirst(), x, targets=y, skip=False, width=6)
    assert found.blocks == ("blocks.0", "blocks.1")
    first, second = found.scores
    assert first[1] > first[0] + 0.05
    assert float(second[0]) == pytest.approx(float(second[1]), rel=0.05)  # both read what is there
    assert found.fit > 0.6
    assert found.finding.startswith("Paths to the targets use head 1 of blocks.0 most (score 0.")
    assert "scores of heads by attention paths" in repr(found)
    assert found.to_pandas().shape == (4, 3)
    assert found.plot().images[0].get_array().shape == (4, 4)


def test_models_of_transformers_have_paths_and_residuals() -> None:
    model, ids = gpt2()
    found = paths(model, ids.repeat(4, 1), targets=torch.arange(8.0), layers="*h.[01]", query=-1)
    assert [len(one) for one in found.scores] == [4, 4]
    assert all(rest is not None and 0 < rest < 1 for rest in found.skipped)
    assert "residual" in repr(found)


def test_what_does_not_go_together_is_refused() -> None:
    x, attention, y = drawn()
    features = path_features(x, attention)
    cases: list[tuple[Any, str]] = [
        (lambda: path_features(x[0], attention), r"x has shape \(5, 4\) and there are 2 layers"),
        (
            lambda: path_features(x, [attention[0][:, :, :3]]),
            r"attention\[0\] has shape .* 12 samples of 5",
        ),
        (
            lambda: path_features(x, attention, query=5),
            "query=5: there are 5 tokens; give one of them",
        ),
        (lambda: fit_paths(features, y, PathPrior((2, 2), 4)), r"heads=\(2, 2\) make 4 paths"),
        (
            lambda: fit_paths(features, y[:3], PathPrior((2, 3), 4)),
            r"y has shape \(3,\); give one number",
        ),
        (
            lambda: fit_paths(features, y, PathPrior((2, 3), (4, 4))),
            "width has 2 numbers; give one for all",
        ),
        (lambda: fit_paths(features, y, PathPrior((2, 3), 0)), "have to be above 0"),
        (
            lambda: fit_paths(torch.zeros(400, 64, 2), torch.zeros(400), PathPrior((8, 8), 4)),
            "400 samples and 64 paths have 655,360,000 products, more than",
        ),
        (
            lambda: paths(Pools(), torch.randn(2, 16, 8), targets=torch.ones(2)),
            "Paths join layers of the same tokens",
        ),
        (
            lambda: paths(encoder(), torch.randn(2, 6, 16), targets=torch.ones(3)),
            r"y has shape \(3,\); give one number for each of 2 samples",
        ),
        (
            lambda: diagnose.paths(
                nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
                torch.ones(1, 3, 2),
                targets=torch.ones(1),
            ),
            "no self-attention was seen",
        ),
    ]
    for call, said in cases:
        with pytest.raises(AttentionError, match=said):
            call()
