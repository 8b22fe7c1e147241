"""The parameters of a view: texts from a URL, read strictly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from dualform.errors import ReadingError
from dualform.explore.pictures import shorten

T = TypeVar("T")


class Given:
    """What a view was given, by name; a wrong value says what was expected.

    >>> Given({"output": "3"}).number("output")
    3
    >>> Given({"output": "three"}).number("output")
    Traceback (most recent call last):
    dualform.errors.ReadingError: output='three'; expected a number, 0 or more.
    """

    def __init__(self, parameters: Mapping[str, str | Sequence[str]]) -> None:
        self._parameters = parameters

    def text(self, name: str, usual: str | None = None) -> str:
        """One value, the last where there are several."""
        found = self._parameters.get(name, usual)
        if found is None:
            raise ReadingError(f"'{name}' is missing; give {name}=…")
        return found if isinstance(found, str) else found[-1]

    def number(self, name: str) -> int | None:
        """A number, 0 or more; None where nothing was given."""
        text = self.text(name, "")
        if text and not (text.isascii() and text.isdecimal() and len(text) < 16):
            raise ReadingError(f"{name}='{shorten(text, 40)}'; expected a number, 0 or more.")
        return int(text) if text else None

    def choice(self, name: str, among: Sequence[str]) -> str:
        """One of some words, by default the first."""
        text = self.text(name, among[0])
        if text not in among:
            raise ReadingError(f"{name}='{shorten(text, 40)}'; there are {', '.join(among)}.")
        return text

    def several(self, name: str, most: int) -> list[str]:
        """All values of a name, at least one."""
        found = self._parameters.get(name, ())
        listed = [found] if isinstance(found, str) else list(found)
        if not 0 < len(listed) <= most:
            raise ReadingError(f"{len(listed):,} values of '{name}'; give 1 to {most:,}.")
        return listed

    def span(self, bins: int) -> tuple[int, int] | None:
        """The first and the last bin; None where all are meant."""
        text = self.text("span", "")
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
        offset, limit = self.number("offset") or 0, self.number("limit")
        return listed[offset : offset + min(50 if limit is None else limit, most)]

    def without(self, *names: str) -> dict[str, str | Sequence[str]]:
        """All of it but some names."""
        return {name: value for name, value in self._parameters.items() if name not in names}
