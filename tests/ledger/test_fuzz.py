"""A run that was damaged at random: an error of ours, the right answer, or damage that is named."""

from __future__ import annotations

import pytest
from tests.ledger.fuzz import fuzz


def test_random_damage_is_never_silent() -> None:
    outcomes = fuzz(count=50, seed=0)
    assert outcomes["refused"] > 15
    assert outcomes["right"] > 2  # in what is only for people


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 107))
def test_much_random_damage_is_never_silent(seed: int) -> None:
    fuzz(count=1500, seed=seed)
