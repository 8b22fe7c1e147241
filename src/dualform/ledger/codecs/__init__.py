"""How the rows of a stream are kept: one codec a file, found by its name.

`encode` makes arrays of rows and `decode` makes rows of arrays. What a codec loses of a step's
gradient is kept beside the rows, as the residual of the step. A log names the codec of each stream
and its parameters; nothing is read off the type of an array.
"""

from __future__ import annotations

from typing import Any

from dualform.errors import FormatVersionError, LedgerError
from dualform.ledger.codecs.bfloat16 import BFloat16
from dualform.ledger.codecs.codec import Codec, Column, Records
from dualform.ledger.codecs.exact import Exact

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Exact, BFloat16)}
"""All codecs, by name."""

__all__ = ["CODECS", "BFloat16", "Codec", "Column", "Exact", "Records", "codec_named", "read_codec"]


def codec_named(name: str) -> type[Codec]:
    """The codec of this name.

    >>> codec_named("zip")
    Traceback (most recent call last):
    dualform.errors.LedgerError: codec='zip' is unknown; there are 'exact', 'bfloat16'.
    """
    if name not in CODECS:
        raise LedgerError(f"codec={name!r} is unknown; there are {_known()}.")
    return CODECS[name]


def read_codec(declared: Any) -> Codec:
    """The codec that a log declares; the log may come from a stranger.

    >>> read_codec({"name": "exact", "keys": "float32", "values": "float16"})
    Exact(keys='float32', values='float16')
    """
    if not isinstance(declared, dict) or not isinstance(declared.get("name"), str):
        raise ValueError(f"{declared!r} names no codec")
    if declared["name"] not in CODECS:
        raise FormatVersionError(
            f"the run keeps rows by the codec {declared['name']!r}, and this dualform knows "
            f"{_known()}; if it is of a newer one, update with `pip install -U dualform`."
        )
    parameters = {name: value for name, value in declared.items() if name != "name"}
    return CODECS[declared["name"]].from_parameters(parameters)


def _known() -> str:
    return ", ".join(f"'{name}'" for name in CODECS)
