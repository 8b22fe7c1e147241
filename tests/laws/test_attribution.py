"""What a sample added to a weight is the gradient of its own loss: in every case.

In evaluation mode, where batch normalization and dropout leave each sample to itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cases import CASES, without
from tests.cases.case import MIXES
from tests.laws.attribution import attribution_holds

REACH = {"layers": 1e-11, "uses": 1e-11, "structures": 1e-10, "architectures": 1e-9}
"""How far a sample's part may be off, relative to the largest one: by rounding, which adds up."""


@pytest.mark.parametrize("name", without(MIXES))
def test_what_a_sample_added_is_its_own_gradient(name: str, tmp_path: Path) -> None:
    audit = attribution_holds(CASES[name], tmp_path / "run", REACH[name.partition(":")[0]])
    assert all(book.remainder <= max(1e-12, book.rounding) for book in audit.books), audit
