"""Matplotlib for the pictures of studies; it is an extra."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dualform.errors import ReadingError
from dualform.studies.report import Picture

INK, FAINT = "#222222", "#d9d9d9"


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


def clean(axes: Any, title: str, x: str = "", y: str = "") -> None:
    """A title, names of both axes, and nothing that stands out."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, color=FAINT, labelcolor=INK)
    axes.set_axisbelow(True)


def save_pictures(
    drawn: Sequence[tuple[str, str, Callable[[Any], Any]]], out: Path
) -> tuple[Picture, ...]:
    """Writes pictures into a folder: each has a file name, a caption, and what draws it."""
    plt = pyplot()
    for file, _, make in drawn:
        figure = make(plt)
        figure.savefig(out / file, dpi=110, facecolor="white")
        plt.close(figure)
    return tuple(Picture(file, caption) for file, caption, _ in drawn)
