"""How much memory is left, and whether a convolution's record fits into it as rows."""

from __future__ import annotations

import math
import os
from pathlib import Path

from dualform.errors import ReadingError
from dualform.layers import positions
from dualform.ledger import Stream

LARGE_RECORD = 1 << 30
"""Records that take more than this as rows are compared with the memory that is free."""


def free_memory() -> float:
    """Bytes that may still be allocated, as far as the system says."""
    known = Path("/proc/meminfo")
    if known.exists():
        lines = dict(line.split(":") for line in known.read_text().splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")


def expanded_bytes(stream: Stream) -> int:
    """What a record takes as rows, beyond itself: a convolution's has a patch for each position.

    >>> expanded_bytes(Stream("conv", (3, 8), (16, 6), {"kernel": [3]}))
    216
    """
    if not stream.layout:
        return 0
    patch: int = stream.keys[0] * math.prod(stream.layout["kernel"])
    return 4 * patch * positions(stream)


def check_record(stream: Stream) -> None:
    """Says before anything is allocated that one record will not fit."""
    needed = expanded_bytes(stream)
    if needed > LARGE_RECORD and needed > (free := free_memory()):
        raise ReadingError(
            f"one record of '{stream.name}' takes {needed / 1e9:,.1f} GB as rows, and "
            f"{free / 1e9:,.1f} GB are free; read the run on a machine with more memory."
        )
