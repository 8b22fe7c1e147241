"""What a study found: a question, tables, pictures, and sentences that the numbers decide."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Group
from rich.text import Text

from dualform.evaluate.work_folder import write_whole
from dualform.read.display import Displayed, columns, framed
from dualform.studies.estimate import Estimate


@dataclass(frozen=True)
class Passage:
    """A place in a text: what stands before it, what stands there, and what follows.

    >>> print(Passage("a Wolf\\nand a Lam", "b", " met"))
    a Wolf⏎and a Lam⟦b⟧ met
    """

    before: str
    marked: str
    after: str

    def __str__(self) -> str:
        return f"{_on_one_line(self.before)}{self._mark}{_on_one_line(self.after)}"

    def rich(self) -> Text:
        """For a terminal, highlighted."""
        found = Text(_on_one_line(self.before))
        return found.append(self._mark, style="reverse").append(_on_one_line(self.after))

    def markdown(self) -> str:
        """For a page: what stands in a text is no markup."""
        return f"`{self}`".replace("|", "\\|")

    @property
    def _mark(self) -> str:
        return f"⟦{_on_one_line(self.marked)}⟧"


def _on_one_line(text: str) -> str:
    return text.replace("\n", "⏎").replace("`", "´")


Cell: TypeAlias = str | int | float | Estimate | Passage | None
"""What stands in a table; None where nothing was measured."""


@dataclass(frozen=True)
class NumberTable:
    """A titled table, the same in a terminal, in Markdown and in JSON.

    >>> table = NumberTable("accuracy", ("set", "right, %"), (("train", 99.0), ("test", None)))
    >>> print(table.markdown())
    **accuracy**
    <BLANKLINE>
    | set | right, % |
    |---|---|
    | train | 99 |
    | test | – |
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def rich(self) -> Group:
        """For a terminal."""
        words = {
            name
            for at, name in enumerate(self.columns)
            if any(isinstance(row[at], str | Passage) for row in self.rows)
        }
        table = columns(self.columns, words)
        for row in self.rows:
            cells = (c.rich() if isinstance(c, Passage) else Text(shown(c)) for c in row)
            table.add_row(*cells)
        return framed(self.title, table, self.note)

    def markdown(self) -> str:
        """For a page."""
        lines = [f"| {' | '.join(self.columns)} |", "|" + "---|" * len(self.columns)]
        for row in self.rows:
            cells = (c.markdown() if isinstance(c, Passage) else shown(c) for c in row)
            lines.append(f"| {' | '.join(cells)} |")
        note = f"\n\n{self.note}" if self.note else ""
        return f"**{self.title}**\n\n" + "\n".join(lines) + note


@dataclass(frozen=True)
class Picture:
    """A picture that a study drew, in its folder."""

    file: str
    caption: str


@dataclass(frozen=True, repr=False)
class Report(Displayed):
    """The result of a study: it prints, and `save` writes it as JSON and as a page.

    >>> table = NumberTable("sums", ("class", "sum"), (("cat", Estimate(2.0, 0.5, 3)),))
    >>> report = Report("cats", "Do cats count?", {"seeds": 3}, ("They do.",), (table,))
    >>> print(report)
    Do cats count?
    sums
    ┏━━━━━━━┳━━━━━━━━━━━┓
    ┃ class ┃       sum ┃
    ┡━━━━━━━╇━━━━━━━━━━━┩
    │ cat   │ 2.0 ± 0.5 │
    └───────┴───────────┘
    - They do.
    """

    name: str
    question: str
    settings: Mapping[str, Any]
    findings: tuple[str, ...]
    """Whole sentences, written by the numbers."""
    tables: tuple[NumberTable, ...] = ()
    pictures: tuple[Picture, ...] = ()
    look: tuple[str, ...] = ()
    """Commands that open the study's runs in the explorer."""

    def __rich__(self) -> Group:
        said = [Text(f"- {sentence}") for sentence in self.findings]
        look = [Text(f"Look: {command}", style="dim") for command in self.look]
        tables = [table.rich() for table in self.tables]
        return Group(Text(self.question, style="bold"), *tables, *said, *look)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is not a finite number is None."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        found: dict[str, Any] = _plain(own)
        return found

    def markdown(self) -> str:
        """The report as a page."""
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        parts = [f"# {self.question}", f"Settings: {settings}."]
        parts += ["\n".join(f"- {sentence}" for sentence in self.findings)]
        parts += [table.markdown() for table in self.tables]
        parts += [f"![{picture.caption}]({picture.file})" for picture in self.pictures]
        parts += [f"    {command}" for command in self.look]
        return "\n\n".join(part for part in parts if part) + "\n"

    def save(self, folder: Path) -> list[Path]:
        """Writes study.json and study.md; returns what is in the folder of the report."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False, ensure_ascii=False)
        page, words = folder / "study.json", folder / "study.md"
        write_whole(page, text.encode())
        write_whole(words, self.markdown().encode())
        return [page, words, *(folder / picture.file for picture in self.pictures)]


def read_tables(path: Path) -> list[NumberTable]:
    """The tables of a saved report.

    >>> import tempfile
    >>> table = NumberTable("sums", ("class", "sum"), (("cat", Estimate(2.0, 0.5, 3)),))
    >>> saved = Report("cats", "Do cats count?", {}, (), (table,)).save(Path(tempfile.mkdtemp()))
    >>> read_tables(saved[0]) == [table]
    True
    """
    return [
        NumberTable(
            table["title"],
            tuple(table["columns"]),
            tuple(tuple(map(_cell, row)) for row in table["rows"]),
            table["note"],
        )
        for table in json.loads(path.read_text(encoding="utf-8"))["tables"]
    ]


def shown(cell: Cell) -> str:
    """A cell in words.

    >>> shown(0.12344), shown(1234567), shown(1234.5), shown(None), shown(-3.2e-8)
    ('0.1234', '1,234,567', '1,234', '–', '-3.2e-08')
    """
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate | NumberTable | Passage | Picture):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Cell:
    if not isinstance(value, dict):
        found: Cell = value
        return found
    if "marked" in value:
        return Passage(**value)
    mean, interval = (math.nan if value[n] is None else value[n] for n in ("mean", "interval"))
    return Estimate(mean, interval, value["count"])
