"""The largest singular value by Lanczos' iteration, and blocks that are measured together."""

from __future__ import annotations

import pytest
import torch
from tests.diagnose.models import encoder
from torch import Tensor

from dualform.diagnose import collapse, spread
from dualform.diagnose.token_spread import TOLERANCE, SpreadReader
from dualform.errors import AttentionError


def with_spectrum(values: Tensor, count: int, width: int) -> Tensor:
    """(3, count, width) with such singular values, in float64."""
    draws = torch.Generator().manual_seed(1)
    sides = (
        torch.linalg.qr(torch.randn(3, n, len(values), generator=draws, dtype=torch.float64)).Q
        for n in (count, width)
    )
    left, right = sides
    return left * values @ right.mT


SPECTRA = {
    "one axis": torch.tensor([1.0, 1e-6, 1e-9]),
    "falling": 1 / torch.arange(1.0, 101),
    "two alike, 1 in 1,000 apart": torch.cat([torch.tensor([1.001, 1.0]), torch.full((90,), 0.3)]),
    "two alike, 1 in 50 apart": torch.cat([torch.tensor([1.02, 1.0]), torch.full((90,), 0.3)]),
    "a crowd below the largest": torch.cat([torch.tensor([1.01]), torch.linspace(0.5, 1.0, 99)]),
    "all equal": torch.ones(100),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "width"), [(120, 200), (400, 100)], ids=["gram", "tokens"])
@pytest.mark.parametrize("name", SPECTRA)
def test_stable_rank_is_within_a_thousandth(
    name: str, count: int, width: int, dtype: torch.dtype
) -> None:
    """Few tokens are compared in pairs, so that their products are known; many go another way."""
    values = SPECTRA[name].double()
    exact = float((values / values[0]).square().sum())
    found = spread(with_spectrum(values, count, width).to(dtype)).stable_rank
    assert found == pytest.approx(exact, rel=TOLERANCE)


def test_stable_rank_of_no_tokens_at_all_is_a_number() -> None:
    assert spread(torch.zeros(2, 5, 3)).is_finite


def test_blocks_that_are_measured_together_are_what_they_are_alone() -> None:
    """Shapes, types and sizes may change from block to block; one of them is not finite."""
    draws = torch.Generator().manual_seed(0)
    shapes = [(3, 6, 4), (3, 6, 4), (3, 5, 4), (2, 300, 8), (2, 300, 8), (3, 6, 4)]
    tokens = [torch.randn(shape, generator=draws) for shape in shapes]
    tokens[1][0, 0, 0] = torch.nan
    tokens[4] = tokens[4].double()
    reader = SpreadReader()
    for one in tokens:
        reader.add(one)
    found = reader.result()
    assert [one.is_finite for one in found] == [True, False, True, True, True, True]
    for together, one in zip(found, tokens, strict=True):
        alone = spread(one)
        if alone.is_finite:
            assert together.stable_rank == pytest.approx(alone.stable_rank, rel=1e-5)
            assert together.distance == pytest.approx(alone.distance, rel=1e-6)
            assert together.cosine == pytest.approx(alone.cosine, rel=1e-5)


def test_autocast_of_a_caller_does_not_round() -> None:
    x = torch.randn(2, 300, 16, generator=torch.Generator().manual_seed(0)) + 3
    with torch.autocast("cpu", torch.bfloat16):
        inside = spread(x)
    assert inside == spread(x)


def test_tokens_that_change_in_place_are_measured_as_they_were() -> None:
    reader, x = SpreadReader(), torch.randn(2, 6, 4)
    before = spread(x).distance
    reader.add(x)
    x.zero_()
    assert reader.result()[0].distance == before


def test_some_samples_are_measured_and_the_result_says_how_many() -> None:
    model, x = encoder(), torch.randn(9, 6, 16)
    found = collapse(model, x, samples=3)
    assert (found.measured, found.given) == (3, 9)
    assert "3 of 9 samples" in str(found)
    own = collapse(model, x[::3], samples=None)
    assert found.layers[-1].spread.distance == pytest.approx(own.layers[-1].spread.distance)
    assert "samples" not in str(own)
    assert collapse(model, x).measured == 4
    assert collapse(model, x[:2]).measured == 2
    with pytest.raises(AttentionError, match="samples=0: give 1 or more, or None for all"):
        collapse(model, x, samples=0)
