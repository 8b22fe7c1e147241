"""Matplotlib for the pictures of studies; it is an extra."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from dualform.errors import ReadingError
from dualform.studies.report import Picture

INK, FAINT = "#222222", "#d9d9d9"

Drawing: TypeAlias = tuple[str, str, Callable[[Any], Any]]
"""A file, its caption, and what draws it: called with pyplot, it returns a figure."""


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


def save_drawings(drawings: Iterable[Drawing], out: Path) -> tuple[Picture, ...]:
    """Writes all of them into a folder."""
    plt, pictures = pyplot(), []
    for file, caption, make in drawings:
        figure = make(plt)
        figure.savefig(out / file, dpi=110, facecolor="white")
        plt.close(figure)
        pictures.append(Picture(file, caption))
    return tuple(pictures)


def clean_axes(axes: Any, title: str, x: str = "", y: str = "") -> None:
    """Names axes, and takes away what they do not need."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, color=FAINT, labelcolor=INK)
    axes.set_axisbelow(True)


def color_scale(figure: Any, image: Any, axes: Any, label: str) -> None:
    """What the colors of a heat map mean."""
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label(label, fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8, color=FAINT, labelcolor=INK)


def show_image(axes: Any, pixels: Any, title: str) -> None:
    """A picture of a data set, in ink on white where it has no colors."""
    axes.imshow(pixels.numpy(), cmap="gray_r")
    axes.set_title(title, fontsize=8, color=INK)
    axes.axis("off")
