"""What the study found, as values that print."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dualform.read.display import Displayed, framed
from dualform.studies.fixed_point.continuum import Growth, Path
from dualform.studies.fixed_point.dynamics import FAR
from dualform.studies.fixed_point.normality import Normality

FEW = 40
VISIBLE = 0.01


@dataclass(frozen=True)
class Trace:
    """One cloud, one contraction, one seed: measurements at some steps."""

    steps: tuple[int, ...]
    measured: tuple[Normality, ...]
    moved: float
    """How far tokens still moved in the last step, on average."""

    @property
    def fate(self) -> str:
        """In a word, where the cloud went."""
        last = self.measured[-1]
        if not last.scale < FAR / 100:
            return "runs away"
        if last.scale < 1e-3:
            return "vanishes"
        if last.clusters <= FEW:
            return "1 point" if last.clusters == 1 else f"{last.clusters} clusters"
        return "stays spread"


@dataclass(frozen=True)
class Cell:
    """One start under one contraction, over several seeds."""

    start: str
    contraction: str
    traces: tuple[Trace, ...]

    @property
    def fates(self) -> str:
        """The fates of the seeds; clusters as a range."""
        fates = [trace.fate for trace in self.traces]
        counts = sorted(int(fate.split()[0]) for fate in fates if fate[0].isdigit())
        if len(counts) == len(fates):
            low, high = counts[0], counts[-1]
            return f"{low} to {high} clusters" if low < high else fates[0]
        return ", ".join(sorted(set(fates)))

    def last(self, name: str) -> tuple[float, float]:
        """The mean of the seeds' last measurements, and two standard errors."""
        values = [float(getattr(trace.measured[-1], name)) for trace in self.traces]
        values = [value for value in values if math.isfinite(value)]
        if not values:
            return math.nan, math.nan
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return statistics.fmean(values), 2 * error


@dataclass(frozen=True)
class Lifetime:
    """Steps until samples of a Gaussian, standardized each time, were VISIBLE away from it."""

    size: int
    steps: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Study(Displayed):
    """Everything that was found."""

    settings: dict[str, Any]
    growths: tuple[Growth, ...]
    paths: tuple[Path, ...]
    cells: tuple[Cell, ...]
    lifetimes: tuple[Lifetime, ...]
    null: float
    """95 % of Gaussian samples of this size have a smaller energy distance."""
    answer: tuple[str, ...] = field(default=())

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [
            framed("a small cumulant of a Gaussian after one step, ×", self._growth_table()),
            framed("densities on a line, standardized", self._path_table()),
            framed(
                f"{self.settings['size']:,} tokens of width {self.settings['width']}",
                self._cell_table(),
                f"95 % of Gaussian samples have an energy distance below {self.null:.1e}; "
                "± two standard errors over seeds",
            ),
            framed(f"steps until a Gaussian sample is {VISIBLE:g} away", self._life_table()),
            Text("\n".join(self.answer)),
        ]
        return Group(*parts)

    def to_dict(self) -> dict[str, Any]:
        """The study as plain values; what is not a number is None."""
        fates = {f"{cell.start}, {cell.contraction}": cell.fates for cell in self.cells}
        found: dict[str, Any] = _plain({**asdict(self), "fates": fates})
        return found

    def _growth_table(self) -> Table:
        table = _table("order k", "temperature T", "1 + k/(Tᵏ⁻²(1 + T))", "measured")
        for one in self.growths:
            numbers = (f"{one.temperature:g}", f"{one.predicted:.4f}", f"{one.measured:.4f}")
            table.add_row(str(one.order), *numbers)
        return table

    def _path_table(self) -> Table:
        table = _table("start", "kurtosis at first", "at last", "energy distance at last")
        for path in self.paths:
            first, last = path.kurtosis[0], path.kurtosis[-1]
            table.add_row(path.start, f"{first:+.2f}", f"{last:+.2f}", f"{path.energy[-1]:.1e}")
        return table

    def _cell_table(self) -> Table:
        table = _table("start", "contraction", "ends as", "kurtosis", "energy distance", "spread")
        for cell in self.cells:
            shape = ("kurtosis", "energy", "spread")
            numbers = ["–" if cell.fates == "1 point" else _pm(*cell.last(n)) for n in shape]
            table.add_row(cell.start, cell.contraction, cell.fates, *numbers)
        return table

    def _life_table(self) -> Table:
        table = _table("tokens", "steps")
        for life in self.lifetimes:
            table.add_row(f"{life.size:,}", " ".join(map(str, life.steps)))
        return table


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _pm(value: float, error: float) -> str:
    if not math.isfinite(value):
        return "–"
    shown = f"{value:+.2g}" if abs(value) >= 0.01 else f"{value:.1e}"
    return f"{shown} ± {error:.1g}" if math.isfinite(error) else shown


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in ("start", "contraction") else "right")
    return table
