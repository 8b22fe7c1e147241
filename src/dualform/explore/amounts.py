"""Numbers as a page shows them: signed, alike in one place, and exact underneath."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Amount:
    """A number in words, and the same number in full.

    >>> Amount("+0.25", 0.25).tone
    'for'
    """

    text: str
    value: float

    @property
    def tone(self) -> str:
        """Which color it has: "for", "against", or none."""
        return "for" if self.value > 0 else "against" if self.value < 0 else ""


class Scale:
    """Writes numbers with the decimals that give the largest of them so many digits.

    >>> scale = Scale([7.4131, -0.25])
    >>> scale.signed(7.4131).text, scale.signed(-0.25).text, scale.plain(0).text
    ('+7.41', '−0.25', '0.00')

    What would look like zero and is not, is written as a power of ten.

    >>> scale.signed(-8e-8).text
    '−8e-08'
    """

    def __init__(self, values: Iterable[float], digits: int = 3) -> None:
        largest = max((abs(value) for value in values), default=0.0)
        exponent = math.floor(math.log10(largest)) if largest else 0
        self._decimals = max(0, digits - 1 - exponent)
        self._form = f".{self._decimals}f" if -4 < exponent < 7 else f".{digits - 1}e"

    def signed(self, value: float) -> Amount:
        """With a plus or a minus."""
        return self._amount(value, "+" if value else "")

    def plain(self, value: float) -> Amount:
        """With a minus where there is one."""
        return self._amount(value, "")

    def _amount(self, value: float, sign: str) -> Amount:
        vanishes = value != 0 and abs(value) < 0.5 * 10**-self._decimals
        text = format(value, f"{sign},{'.0e' if vanishes else self._form}")
        return Amount(text.replace("-", "−", 1) if value < 0 else text, float(value))


def shorten(text: object, length: int) -> str:
    """At most `length` characters of it, on one line.

    >>> shorten("a stranger's label", 10)
    'a strange…'
    """
    line = " ".join(str(text).split())
    return line if len(line) <= length else line[: length - 1] + "…"
