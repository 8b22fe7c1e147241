"""What tests of studies share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dualform.studies.drawing import Drawing
from dualform.studies.report import Picture

DRAWN_IN = ("collapse.pictures", "controls.study", "language.pictures", "mnist.pictures")
DRAWN_IN += ("two_tasks.pictures",)


@pytest.fixture
def undrawn() -> Iterator[None]:
    """Leaves out the drawing, which takes most of the time of a tiny study.

    For tests of what is done again, or asked from the shell. Others look at the pictures.
    """

    def captions(drawings: Iterable[Drawing], out: Path) -> tuple[Picture, ...]:
        return tuple(Picture(file, caption) for file, caption, _ in drawings)

    with pytest.MonkeyPatch.context() as patch:
        for place in DRAWN_IN:
            patch.setattr(f"dualform.studies.{place}.save_drawings", captions)
        yield
