"""What is kept of samples for people: texts, pictures, numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualform.errors import SampleIdsError
from dualform.ledger.samples import Samples, describe_samples

PICTURES = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8)


@pytest.mark.parametrize(
    "previews", [PICTURES, list(PICTURES), torch.tensor(PICTURES), list(torch.tensor(PICTURES))]
)
def test_pictures_may_come_from_numpy_or_torch(previews: Any, tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    describe_samples(tmp_path, ["a", "b"], previews=previews)
    found = Samples(tmp_path).preview("b")
    assert found is not None
    assert found.kind == "image"
    assert torch.equal(found.data, torch.tensor(PICTURES[1]))


def test_anything_else_is_no_preview(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    message = "previews of type object; give texts, or images or numbers of one shape, as one"
    with pytest.raises(SampleIdsError, match=message):
        describe_samples(tmp_path, [0], previews=[object()])
    with pytest.raises(SampleIdsError, match="previews of type ndarray; give texts, or images"):
        describe_samples(tmp_path, [0, 1], previews=[np.zeros((2, 2)), np.zeros((3, 3))])
