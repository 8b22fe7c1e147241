"""Matplotlib for the pictures of studies; it is an extra."""

from __future__ import annotations

from typing import Any

from dualform.errors import ReadingError


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files only."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ReadingError(
            "pictures need matplotlib, which is not installed: pip install 'dualform[plot]'."
        ) from None
    return plt
