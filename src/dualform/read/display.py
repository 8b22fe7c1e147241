"""How results look: one table, shown alike in a terminal, in a notebook and by `print`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from io import StringIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dualform.errors import ReadingError

WIDTH = 100


def framed(title: str, table: Table, note: str = "") -> Group:
    """A table between its title and a note, neither of them squeezed to its width."""
    parts: list[RenderableType] = [Text(title, style="bold"), table]
    return Group(*parts, *([Text(note, style="dim")] if note else []))


def columns(names: Iterable[str], words: Collection[str]) -> Table:
    """An empty table: words to the left, numbers to the right; folded, never cut off."""
    table = Table()
    for name in names:
        table.add_column(Text(name), justify="left" if name in words else "right", overflow="fold")
    return table


class Displayed(ABC):
    """Gives a result its appearance: `__rich__` is written once, the rest follows."""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """The result as a rich table."""

    def __repr__(self) -> str:
        console = _silent(no_color=True)
        console.print(self)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        console = _silent(record=True)
        console.print(self)
        frame = '<pre style="line-height:1.3;font-family:monospace">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=frame)


def _silent(**options: Any) -> Console:
    """A console that only writes down; by itself, rich would also display it in a notebook."""
    return Console(file=StringIO(), width=WIDTH, force_jupyter=False, **options)


class Amounts(Displayed):
    """Numbers with one column a query, which convert; a subclass says what its lines are."""

    values: NDArray[np.float64]
    queries: Sequence[str]

    @property
    @abstractmethod
    def lines(self) -> Sequence[Any]:
        """What each line is called: samples, steps, epochs."""

    def __len__(self) -> int:
        return len(self.lines)

    def numpy(self) -> NDArray[np.float64]:
        """(lines, queries) as numpy."""
        return self.values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.values, dtype) if copy else np.asarray(self.values, dtype)

    def tensor(self) -> Tensor:
        """(lines, queries) as a torch tensor."""
        return torch.from_numpy(self.values)

    def to_pandas(self) -> Any:
        """A data frame with one column a query."""
        frame = pandas_frame({name: self.values[:, at] for at, name in enumerate(self.queries)})
        frame.index = list(self.lines)
        return frame


def signed(value: float) -> str:
    """A number with its sign, four digits: +0.1234."""
    return f"{value:+.4g}"


def attributed_words(share: float) -> str:
    """Says how much of a change is attributed to samples.

    >>> attributed_words(0.634)
    '63.4% of what training changed is attributed to samples, 36.6% belongs to no sample'
    """
    percent = min(99.9, round(100 * share, 1)) if share < 1 else 100.0
    return (
        f"{percent:g}% of what training changed is attributed to samples, "
        f"{100 - percent:.3g}% belongs to no sample"
    )


def moment(created: object) -> str:
    """A time as a run's metadata has it, for people.

    >>> moment("2026-11-16T14:49:51+00:00")
    '2026-11-16 14:49:51 UTC'
    """
    return str(created).replace("T", " ").replace("+00:00", " UTC")


def matplotlib_axes(axes: Any = None) -> Any:
    """The axes given, or new ones; matplotlib is an extra."""
    if axes is not None:
        return axes
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ReadingError(
            "plots need matplotlib, which is not installed: pip install 'dualform[plot]'."
        ) from None
    return plt.subplots(layout="constrained")[1]


def pandas_frame(data: dict[str, Any]) -> Any:
    """A pandas DataFrame; pandas is an extra."""
    try:
        import pandas
    except ImportError:
        raise ReadingError(
            "data frames need pandas, which is not installed: pip install 'dualform[pandas]'."
        ) from None
    return pandas.DataFrame(data)
