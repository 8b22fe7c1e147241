"""What `keep=` asks for: how much is stored of each parameter's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

from dualform.errors import RecordingError
from dualform.ledger import Codec
from dualform.ledger.codecs import CODECS

Keep: TypeAlias = str | Mapping[str, str]
"""A policy for all parameters, or policies by pattern."""
ROWS, STEPS = "rows", "steps"
ASKED = "keep='steps' was asked for"


def policies() -> list[str]:
    """What can be asked for: the policy of each codec, and "steps".

    >>> policies()
    ['rows', 'half', 'int8', 'steps']
    """
    return [*(codec.policy for codec in CODECS.values()), STEPS]


def read_keep(keep: Keep, parameters: Iterable[str]) -> dict[str, str]:
    """The policy of each parameter.

    The first pattern that matches a parameter, or a module that it is part of, says its policy.
    Parameters that no pattern matches have the policy "rows".

    >>> names = ["body.0.weight", "body.0.bias", "head.weight"]
    >>> read_keep({"head": "steps", "*.bias": "rows", "*": "int8"}, names)
    {'body.0.weight': 'int8', 'body.0.bias': 'rows', 'head.weight': 'steps'}
    """
    names = list(parameters)
    given = {"*": keep} if isinstance(keep, str) else keep
    if not isinstance(given, Mapping):
        raise RecordingError(
            f"keep={keep!r} is no policy; give one of {_listed(policies())}, or a dict of patterns "
            "and policies such as {'head': 'steps', '*': 'int8'}."
        )
    for pattern, policy in given.items():
        if policy not in policies():
            raise RecordingError(f"keep={policy!r} is unknown; there are {_listed(policies())}.")
        if not any(_matches(name, pattern) for name in names):
            raise RecordingError(
                f"keep has the pattern {pattern!r}, and no parameter or module of the model is "
                f"called so; its parameters are {_listed(names)}."
            )
    return {
        name: next((policy for pattern, policy in given.items() if _matches(name, pattern)), ROWS)
        for name in names
    }


def codec_for(policies_of_books: Iterable[str]) -> type[Codec]:
    """The codec of rows that some books share: the most exact that one of them asks for.

    >>> codec_for(["int8", "rows", "steps"]).name
    'exact'
    """
    asked = set(policies_of_books)
    return next(codec for codec in CODECS.values() if codec.policy in asked)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a parameter, or a module that it is part of."""
    parts = name.split(".")
    whole = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(each, pattern) for each in whole)


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
