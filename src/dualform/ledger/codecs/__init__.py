"""How the rows of a stream are kept: one codec a file, found by its name.

`encode` makes arrays of rows and `decode` makes rows of arrays. What a codec loses of a step's
gradient is kept beside the rows, as the residual of the step. A log names the codec of each stream
and its parameters; nothing is read off the type of an array.
"""

from __future__ import annotations

from typing import Any

from dualform.errors import FormatVersionError
from dualform.ledger.codecs.bfloat16 import BFloat16
from dualform.ledger.codecs.codec import Codec, Column, Records
from dualform.ledger.codecs.exact import Exact
from dualform.ledger.codecs.int8 import Int8

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Exact, BFloat16, Int8)}
"""All codecs, by name; the most exact come first."""

__all__ = ["CODECS", "BFloat16", "Codec", "Column", "Exact", "Int8", "Records", "read_codec"]


def read_codec(declared: Any) -> Codec:
    """The codec that a log declares; the log may come from a stranger.

    >>> read_codec({"name": "exact", "keys": "float32", "values": "float16"})
    Exact(keys='float32', values='float16')
    """
    if not isinstance(declared, dict) or not isinstance(declared.get("name"), str):
        raise ValueError(f"{declared!r} names no codec")
    if declared["name"] not in CODECS:
        known = ", ".join(f"'{name}'" for name in CODECS)
        raise FormatVersionError(
            f"the run keeps rows by the codec {declared['name']!r}, and this dualform knows "
            f"{known}; if it is of a newer one, update with `pip install -U dualform`."
        )
    parameters = {name: value for name, value in declared.items() if name != "name"}
    return CODECS[declared["name"]].from_parameters(parameters)
