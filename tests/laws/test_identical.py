"""Recording changes nothing: weights, buffers, optimizer and random numbers, to the bit.

Layers are compared in `test_balance.py`, in every cell of the grid.
"""

from __future__ import annotations

import pytest
import torch
from tests.laws.conftest import Fit, Fitted
from tests.laws.grid import same
from tests.laws.training import fit, pairs


@pytest.mark.parametrize(("name", "optimizer"), pairs("uses", "structures", "architectures"))
def test_recording_changes_nothing(fitted: Fit, name: str, optimizer: str) -> None:
    recorded = fitted(name, optimizer, torch.float32)
    plain = Fitted.of(recorded.case, *fit(name, optimizer, torch.float32))
    assert same(recorded.after, plain.after)
