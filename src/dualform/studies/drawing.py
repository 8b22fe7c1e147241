"""Matplotlib for the pictures of studies; it is an extra."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from dualform.errors import ReadingError
from dualform.studies.report import Picture

INK, FAINT = "#222222", "#d9d9d9"

Drawing: TypeAlias = tuple[str, str, Callable[[Any], Any]]
"""A file, its caption, and what makes the figure, given matplotlib.pyplot."""


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


def drawn_into(folder: Path, drawings: Iterable[Drawing]) -> tuple[Picture, ...]:
    """Writes figures into a folder."""
    plt, pictures = pyplot(), []
    for file, caption, make in drawings:
        figure = make(plt)
        figure.savefig(folder / file, dpi=110, facecolor="white")
        plt.close(figure)
        pictures.append(Picture(file, caption))
    return tuple(pictures)


def clean(axes: Any, title: str, x: str = "", y: str = "") -> None:
    """Gives axes their titles, and takes away what says nothing."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, color=FAINT, labelcolor=INK)
    axes.set_axisbelow(True)
