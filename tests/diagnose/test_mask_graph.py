"""The graph of a mask: its center, its radius, and the bound that follows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dualform.diagnose import dobrushin, mask_graph
from dualform.errors import AttentionError


def window(count: int, back: int, ahead: int) -> Tensor:
    distance = torch.arange(count)[:, None] - torch.arange(count)
    return (distance <= back) & (distance >= -ahead)


def steps_by_breadth_first(mask: Tensor, start: int) -> float:
    """The plain way: who has heard from `start`, step by step."""
    heard, steps = {start}, 0
    while len(heard) < len(mask):
        more = {i for i in range(len(mask)) if any(mask[i, j] for j in heard)}
        if more <= heard:
            return math.inf
        heard, steps = heard | more, steps + 1
    return steps


@given(st.integers(1, 9), st.floats(0.05, 0.6), st.integers(0, 10_000))
def test_center_and_radius_are_those_of_a_breadth_first_search(
    count: int, density: float, seed: int
) -> None:
    mask = torch.rand(count, count, generator=torch.Generator().manual_seed(seed)) < density
    graph, reached = mask_graph(mask), [steps_by_breadth_first(mask, i) for i in range(count)]
    if min(reached) == math.inf:
        assert graph.center is None
        assert graph.radius is None
        assert len(graph.apart) > 1
    else:
        assert graph.radius == min(reached)
        assert graph.center is not None
        assert reached[graph.center] == graph.radius


@pytest.mark.parametrize("count", [2, 5, 10, 33])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_radii_of_known_masks(count: int, width: int) -> None:
    assert mask_graph(window(count, count, count)).radius == 1
    assert mask_graph(window(count, count, 0)).radius == 1
    assert mask_graph(window(count, width, width)).radius == math.ceil(count // 2 / width)
    assert mask_graph(window(count, width, 0)).radius == math.ceil((count - 1) / width)
    with_global = window(count, width, width)
    with_global[0, :] = with_global[:, 0] = True
    assert mask_graph(with_global).radius == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("hides", ["-inf", "-1e9", "least"])
def test_masks_of_numbers_are_those_of_booleans(hides: str, dtype: torch.dtype) -> None:
    mask = window(12, 2, 0)
    number = torch.finfo(dtype).min if hides == "least" else float(hides)
    numbers = torch.zeros(12, 12, dtype=dtype).masked_fill(~mask, number)
    assert mask_graph(numbers) == mask_graph(mask)
    biased = numbers + torch.randn(12, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert mask_graph(biased) == mask_graph(mask)


def test_tokens_that_are_never_reached_are_named() -> None:
    graph = mask_graph(torch.eye(5).bool())
    assert graph.apart == (0, 1, 2, 3, 4)
    assert graph.bound(0.5, 100) == 1.0
    assert "the groups of tokens 0, 1, 2, 3, 4 hear nothing from each other" in str(graph)


@pytest.mark.parametrize(
    "mask", [window(9, 9, 9), window(9, 9, 0), window(9, 2, 2), window(9, 2, 0)]
)
def test_the_bound_holds_for_attention_of_any_weights(mask: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    ranges, least, graph = [], 1.0, mask_graph(mask)
    for _ in range(24):
        scores = torch.randn(9, 9, generator=generator, dtype=torch.float64)
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
        least = min(least, float(weights[mask].min()))
        x = weights @ x
        ranges.append(float((x.amax(0) - x.amin(0)).max()))
    assert graph.radius is not None
    for layers in range(graph.radius, 24, graph.radius):
        assert ranges[layers - 1] / ranges[0] <= graph.bound(least, layers - graph.radius) + 1e-12


def test_dobrushin_bounds_the_range_and_is_reached() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        A = torch.softmax(3 * torch.randn(6, 6, generator=generator, dtype=torch.float64), -1)
        x = torch.randn(6, generator=generator, dtype=torch.float64)
        tau = float(dobrushin(A))
        assert (A @ x).amax() - (A @ x).amin() <= tau * (x.amax() - x.amin()) + 1e-12
        pairs = (A[:, None] - A).abs().sum(-1) / 2
        assert tau == pytest.approx(float(pairs.max()), abs=1e-12)
        i, k = divmod(int(pairs.argmax()), 6)
        worst = (A[i] > A[k]).double()
        assert (A @ worst).amax() - (A @ worst).amin() == pytest.approx(tau, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dobrushin_of_weights_in_half_precision(dtype: torch.dtype) -> None:
    scores = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(0))
    weights = torch.softmax(scores, -1).to(dtype)
    assert torch.equal(dobrushin(weights), dobrushin(weights.float()))


def test_dobrushin_leaves_out_rows_that_see_nothing() -> None:
    """A padded row reads 0, which is no average of anything."""
    A = torch.softmax(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)), -1)
    padded = torch.stack([torch.cat([A, torch.zeros(2, 6)]), torch.cat([torch.zeros(2, 6), A])])
    torch.testing.assert_close(dobrushin(padded), dobrushin(A).expand(2))


def test_what_is_no_mask_is_refused() -> None:
    with pytest.raises(AttentionError, match=r"mask is torch\.int64; give .* \(mask\.bool\(\)\)"):
        mask_graph(torch.ones(2, 2).long())
    for mask in (torch.ones(2, 2).bool(), torch.eye(2).bool()):
        with pytest.raises(AttentionError, match="layers=-3 is no number of layers; give how many"):
            mask_graph(mask).bound(0.2, layers=-3)
    with pytest.raises(AttentionError, match=r"mask has shape \(2, 3\)"):
        mask_graph(torch.ones(2, 3).bool())
    with pytest.raises(AttentionError, match=r"least_weight=1\.5 is no attention weight"):
        mask_graph(torch.ones(2, 2).bool()).bound(1.5, 3)
