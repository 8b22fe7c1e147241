"""Names of samples: ids that are given must never be mixed with numbers that are counted.

Without ids, samples are numbered 0, 1, 2 … in the order they are seen. A user's ids look the same.
So a run has either ids or numbers, and only ids can be described.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dualform.errors import RecordingError, SampleIdsError
from dualform.ledger.samples import described_ids, plain

CURE = "call recorder.samples(ids) before every forward pass that trains"


class SampleIds:
    """What a run's samples are called so far; refuses what would mix ids and numbers.

    >>> known = SampleIds()
    >>> known.number()  # a step without ids
    >>> known.name([0, 1])
    Traceback (most recent call last):
    dualform.errors.SampleIdsError: recorder.samples got ids [0, 1], but an earlier step had ...
    """

    def __init__(self) -> None:
        self.named = False
        self._numbered = False
        self._described: type | None = None

    @property
    def is_numbered(self) -> bool:
        """Whether samples are numbered as they are seen."""
        return self._numbered

    def read(self, path: Path) -> None:
        """Takes over what a run folder describes already."""
        for name in described_ids(path):
            self._described = type(name)

    def name(self, ids: Tensor | Sequence[Any]) -> None:
        """Samples are named by the user."""
        if self._numbered:
            raise SampleIdsError(
                f"recorder.samples got ids {plain_start(ids)}, but an earlier step had none: its "
                "samples are numbered 0, 1, 2 … and would be taken for them. Name the samples of "
                "every step, from the first on, or of none."
            )
        if self._described is not None and len(ids):
            self._agree(ids, self._described)
        self.named = True

    def describe(self, ids: Sequence[Any]) -> None:
        """Samples are described by the user."""
        shown = plain_start(ids)
        if self._numbered:
            raise SampleIdsError(
                f"recorder.describe got ids {shown}, but samples were not named: they are numbered "
                f"in the order they are seen, and would be taken for these ids; {CURE}."
            )
        self._described = type(shown[0]) if shown else self._described

    def number(self) -> None:
        """A step's gradient has rows of samples without ids."""
        if self.named:
            raise RecordingError(
                "recorder.samples(ids) named the samples of earlier forward passes, but not of one "
                f"that this step trains on; {CURE}."
            )
        if self._described is not None:
            raise SampleIdsError(
                "samples are described (dataset=… or recorder.describe), but those of this step "
                "have no ids: they would be numbered in the order they are seen, and get the "
                f"labels of others; {CURE}."
            )
        self._numbered = True

    def _agree(self, ids: Tensor | Sequence[Any], described: type) -> None:
        """Ids that are described must be of the kind that is used."""
        given = int if isinstance(ids, Tensor) else type(plain(ids[0]))
        if described is not given:
            words = {int: "integers", str: "strings"}
            raise SampleIdsError(
                f"recorder.samples got {words[given]} ({plain_start(ids)}, …), but the samples are "
                f"described (dataset=… or recorder.describe) by {words[described]}; use one kind "
                "of ids."
            )


def plain_start(ids: Tensor | Sequence[Any]) -> list[Any]:
    """The first few ids, as Python's own numbers or strings.

    >>> plain_start(range(9))
    [0, 1, 2]
    """
    return [plain(one) for one in ids[:3]]
