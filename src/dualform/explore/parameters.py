"""The parameters of a view: texts from a URL, read once and strictly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from dualform.errors import ReadingError
from dualform.explore.cards import shorten
from dualform.read.ask import Ask, Question

T = TypeVar("T")


@dataclass(frozen=True)
class Parameters:
    """What a view was asked; a wrong value says what was expected.

    >>> Parameters.read({"query": "0", "output": "3"}).question.output
    3
    >>> Parameters.read({"output": "three"})
    Traceback (most recent call last):
    dualform.errors.ReadingError: output='three'; expected a number, 0 or more.
    """

    question: Question
    """What is asked about the query; the query itself is a name here."""
    query_text: str = ""
    ids: tuple[str, ...] = ()
    """Training samples, by their ids as texts."""
    by: str = "label"
    """The column that samples are grouped by."""
    label: str = ""
    """Only samples of this label, or value of that column; empty: all."""
    side: str = "for"
    search: str = ""
    wrong: bool = False
    estimate: bool = False
    span_text: str = ""
    offset: int = 0
    limit: int = 50

    @classmethod
    def read(cls, texts: Mapping[str, str | Sequence[str]]) -> Parameters:
        """The parameters as a URL has them; of several values of a name the last one counts."""
        several = {name: [v] if isinstance(v, str) else list(v) for name, v in texts.items()}
        last = {name: values[-1] for name, values in several.items() if values}
        limit = _number("limit", last)
        question = Question(
            cast(Ask, last.get("ask", "layer")),  # the door refuses others
            last.get("layer") or None,
            _number("output", last),
            place=_number("place", last),
            at=_number("at", last),
            detailed=True,
        )
        return cls(
            question,
            last.get("query", ""),
            tuple(several.get("id", ())),
            last.get("by", "label"),
            last.get("label", ""),
            last.get("side", "for"),
            last.get("search", "").lower(),
            last.get("wrong") in ("1", "true"),
            last.get("estimate") == "1",
            last.get("span", ""),
            _number("offset", last) or 0,
            50 if limit is None else limit,
        )

    @property
    def query(self) -> str:
        """The name of the query; see `Subject.name`."""
        if not self.query_text:
            raise ReadingError("'query' is missing; give query=…")
        return self.query_text

    def some_ids(self, most: int) -> tuple[str, ...]:
        """The ids, at least one."""
        if not 0 < len(self.ids) <= most:
            raise ReadingError(f"{len(self.ids):,} values of 'id'; give 1 to {most:,}.")
        return self.ids

    @property
    def one_id(self) -> str:
        """The id, the last where there are several."""
        if not self.ids:
            raise ReadingError("'id' is missing; give id=…")
        return self.ids[-1]

    def span(self, bins: int) -> tuple[int, int] | None:
        """The first and the last bin; None where all are meant."""
        text = self.span_text
        if not text:
            return None
        first, dash, last = text.partition("-")
        fine = dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last) < bins
        if not fine:
            exists = f"bins 0 to {bins - 1}" if bins else "no bins for this question"
            raise ReadingError(
                f"span='{shorten(text, 40)}'; expected FIRST-LAST, there are {exists}."
            )
        return int(first), int(last)

    def page(self, listed: Sequence[T], most: int) -> Sequence[T]:
        """The part of a list that is asked for by offset and limit."""
        return listed[self.offset : self.offset + min(self.limit, most)]


def _number(name: str, texts: Mapping[str, str]) -> int | None:
    """A number, 0 or more; None where nothing was given."""
    text = texts.get(name, "")
    if text and not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ReadingError(f"{name}='{shorten(text, 40)}'; expected a number, 0 or more.")
    return int(text) if text else None
