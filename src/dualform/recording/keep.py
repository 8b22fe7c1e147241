"""What `keep=` asks for: how much is stored of each parameter's rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from dualform.errors import RecordingError
from dualform.ledger import Codec
from dualform.ledger.codecs import CODECS

AUTO, ROWS, STEPS, SUMMARIES, SUMS = "auto", "rows", "steps", "summaries", "sums"
ASKED = "keep='steps' was asked for"
NOT_RECORDED = "layers= leaves it out"


NUMBERS = 16 * 128
"""A summary whose shape is chosen has at most so many numbers."""


@dataclass(frozen=True)
class Summaries:
    """One small matrix a sample and layer, in place of its rows; see `summaries`."""

    shape: tuple[int, int] | None = None
    """Outputs and inputs; None where each layer's shape is chosen from its first rows."""
    numbers: str = "int8"
    offsets: str = SUMMARIES

    @property
    def size(self) -> int:
        """How many numbers a summary has, at most."""
        return NUMBERS if self.shape is None else math.prod(self.shape)

    def __str__(self) -> str:
        given = "" if self.shape is None else f"{self.shape[0]}, {self.shape[1]}, "
        return f"summaries({given}numbers='{self.numbers}', offsets='{self.offsets}')"


Policy: TypeAlias = str | Summaries
"""How much is stored of a parameter's rows."""
Keep: TypeAlias = Policy | Mapping[str, Policy]
"""A policy for all parameters, or policies by pattern."""


def summaries(
    outputs: int | None = None,
    inputs: int | None = None,
    numbers: str = "int8",
    offsets: str = SUMMARIES,
) -> Summaries:
    """The policy to keep one matrix of `outputs` × `inputs` numbers for each sample and layer.

    A sample's rows in a layer (its tokens, or patches) are added up, and what they add to the
    weight is stored in two bases: the directions in which the layer's errors, and its inputs, vary
    most. Without a size, each layer has the one that holds most of its first rows, of at most
    2,048 numbers. `numbers` is how a summary is stored: "int8", "half" or "rows" (32 bits).
    `offsets` says what becomes of biases and normalizations: "summaries" stores a sample's sum in a
    basis of errors as well, "sums" stores it exactly, and "steps" the change that each step made.
    Steps take least, but explain no sample.

    >>> import tempfile, torch, dualform
    >>> model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 3))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> path = tempfile.mkdtemp() + "/run"
    >>> with dualform.record(model, optimizer, path, keep=dualform.summaries(4, 8)):
    ...     for _ in range(20):
    ...         model(torch.randn(64, 40)).square().mean().backward()
    ...         optimizer.step(); optimizer.zero_grad()
    >>> line = dualform.open(path).audit().books[0]
    >>> line.granularity, 0 < line.attributed < 1
    ('row', True)
    """
    shape = None
    if outputs is not None or inputs is not None:
        for side, count in (("outputs", outputs), ("inputs", inputs)):
            if count is None:
                raise RecordingError(
                    f"summaries was given one side of a size, and {side} is missing; give outputs "
                    "and inputs, or neither: then each layer has a size that suits it."
                )
            if type(count) is not int or count < 1:
                raise RecordingError(
                    f"summaries({side}={count!r}) is no number of directions from 1."
                )
        assert outputs is not None
        assert inputs is not None
        shape = (outputs, inputs)
    if numbers not in (known := [codec.policy for codec in CODECS.values()]):
        raise RecordingError(f"summaries(numbers={numbers!r}) is unknown; there are {known}.")
    if offsets not in (SUMMARIES, SUMS, STEPS):
        raise RecordingError(
            f"summaries(offsets={offsets!r}) is unknown; there are 'summaries', 'sums', 'steps'."
        )
    return Summaries(shape, numbers, offsets)


def policies() -> list[str]:
    """What can be asked for: "auto", the policy of each codec, "summaries" and "steps".

    >>> {"auto", "rows", "half", "int8", "summaries", "steps"} <= set(policies())
    True
    """
    return [AUTO, *(codec.policy for codec in CODECS.values()), SUMMARIES, STEPS]


def read_keep(keep: Keep, parameters: Iterable[str]) -> dict[str, Policy]:
    """The policy of each parameter.

    The first pattern that matches a parameter, or a module that it is part of, says its policy.
    Parameters that no pattern matches have the policy "auto".

    >>> names = ["body.0.weight", "body.0.bias", "head.weight"]
    >>> read_keep({"head": "steps", "*.bias": "rows", "*": "int8"}, names)
    {'body.0.weight': 'int8', 'body.0.bias': 'rows', 'head.weight': 'steps'}
    """
    names = list(parameters)
    given = {"*": keep} if isinstance(keep, str | Summaries) else keep
    if not isinstance(given, Mapping):
        raise RecordingError(
            f"keep={keep!r} is no policy; give one of {listed(policies())}, "
            "dualform.summaries(16, 128), or a dict of patterns and policies such as "
            "{'head': 'steps', '*': 'int8'}."
        )
    for pattern, policy in given.items():
        if not isinstance(policy, Summaries) and policy not in policies():
            raise RecordingError(f"keep={policy!r} is unknown; there are {listed(policies())}.")
        if not any(matches(name, pattern) for name in names):
            raise RecordingError(
                f"keep has the pattern {pattern!r}, and no parameter or module of the model is "
                f"called so; its parameters are {listed(names)}."
            )
    return {
        name: next((_named(given[pattern]) for pattern in given if matches(name, pattern)), AUTO)
        for name in names
    }


def read_layers(layers: str | Sequence[str] | None, parameters: Iterable[str]) -> set[str]:
    """The parameters that are recorded: all, or those that one of the patterns matches.

    >>> sorted(read_layers(["head", "*.bias"], ["body.weight", "body.bias", "head.weight"]))
    ['body.bias', 'head.weight']
    """
    names = list(parameters)
    if layers is None:
        return set(names)
    patterns = [layers] if isinstance(layers, str) else list(layers)
    for pattern in patterns:
        if not isinstance(pattern, str) or not any(matches(name, pattern) for name in names):
            raise RecordingError(
                f"layers has the pattern {pattern!r}, and no parameter or module of the model is "
                f"called so; its parameters are {listed(names)}."
            )
    if not patterns:
        raise RecordingError(
            "layers=[] records nothing; name the layers to record, such as ['head'], or leave it "
            "out to record all of them."
        )
    return {name for name in names if any(matches(name, pattern) for pattern in patterns)}


def why_by_step(policy: Policy, is_recorded: bool) -> str:
    """The reason to keep a parameter by step from the start; empty where there is none."""
    if not is_recorded:
        return NOT_RECORDED
    return ASKED if policy == STEPS else ""


def refuse_needless(keep: Keep, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses summaries of a given size where no weight is larger: nothing would be summarized.

    Where some weights are larger, the others are kept whole.
    """
    given = keep if isinstance(keep, Mapping) else {"*": keep}
    taken: set[str] = set()
    for pattern, policy in given.items():
        own = {name for name in shapes if matches(name, pattern)} - taken
        taken |= own
        weights = {name: shapes[name] for name in sorted(own) if len(shapes[name]) > 1}
        sizes = {name: math.prod(shape) for name, shape in weights.items()}
        if not isinstance(policy, Summaries) or policy.shape is None:
            continue
        if sizes and max(sizes.values()) <= policy.size:
            largest = sorted(weights, key=lambda name: -sizes[name])[:4]
            said = ", ".join(f"'{n}' ({'×'.join(map(str, weights[n]))})" for n in largest)
            raise RecordingError(
                f"summaries{policy.shape} has {policy.size:,} numbers, and no "
                f"weight that {pattern!r} matches has more; the largest are {said}. Give fewer "
                "outputs and inputs, or keep these weights as 'rows'."
            )


def _named(policy: Policy) -> Policy:
    return Summaries() if policy == SUMMARIES else policy


def codec_for(policies_of_books: Iterable[Policy]) -> type[Codec]:
    """The codec of rows that some books share: the most exact that one of them asks for.

    Those that "auto" does not summarize are stored as they are. Rows that are kept until there are
    bases to summarize them in are stored as summaries are.

    >>> codec_for(["int8", "rows", "steps"]).name
    'exact'
    """
    asked = {p.numbers if isinstance(p, Summaries) else p for p in policies_of_books}
    asked |= {ROWS} if AUTO in asked else set()
    return next(codec for codec in CODECS.values() if codec.policy in asked)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a parameter, or a module that it is part of.

    >>> matches("body.0.weight", "body"), matches("body.0.weight", "*.bias")
    (True, False)
    """
    parts = name.split(".")
    whole = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(each, pattern) for each in whole)


def listed(names: list[str]) -> str:
    """Some names for a message; of many, the first.

    >>> listed(["a", "b"])
    "'a', 'b'"
    """
    shown = ", ".join(f"'{name}'" for name in names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
