"""What the samples of a run are called, and the numbers under which they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.errors import CorruptError, ReadingError, UnknownSampleError
from dualform.ledger import Ledger
from dualform.ledger.samples import SampleId, plain_list


@dataclass(frozen=True)
class SampleNames:
    """The samples that left rows.

    >>> names = SampleNames(torch.tensor([0, 1]), ["cat", "dog"])
    >>> names.numbers_of(["dog"]), names.parse("7")
    (tensor([1]), '7')
    """

    numbers: Tensor
    """(samples,): the stored ids that occur, sorted."""
    ids: list[SampleId]
    """What the user calls them."""

    @classmethod
    def of(cls, ledger: Ledger) -> SampleNames:
        """Those of a run."""
        numbers, strings = distinct(map(ledger.samples, ledger.shards)), ledger.ids.strings
        listed = numbers.tolist()
        if strings is not None and listed and not 0 <= listed[0] <= listed[-1] < len(strings):
            raise CorruptError(
                f"the run '{ledger.path}' has {len(strings):,} ids, and samples whose numbers lie "
                "beyond them; restore it from a copy."
            )
        return cls(numbers, listed if strings is None else [strings[n] for n in listed])

    def parse(self, text: str) -> SampleId:
        """The id that a text stands for: an integer, where ids are integers."""
        is_number = text.removeprefix("-").isdecimal()
        return int(text) if is_number and self.ids and isinstance(self.ids[0], int) else text

    def numbers_of(self, ids: Sequence[SampleId]) -> Tensor:
        """The stored ids of some samples; those that are not there are refused."""
        if isinstance(ids, str | int):
            raise ReadingError(f"got the id {ids!r}; give a list of ids: [{ids!r}].")
        position = {name: at for at, name in enumerate(self.ids)}
        given = plain_list(ids)
        for name in given:
            if name not in position:
                raise UnknownSampleError(
                    f"sample {name!r} is not in this run; it has {len(self.ids):,} samples, "
                    f"such as {', '.join(map(repr, self.ids[:3]))}."
                )
        return self.numbers[torch.tensor([position[name] for name in given], dtype=torch.long)]


def distinct(parts: Iterable[Tensor]) -> Tensor:
    """The numbers that occur in some parts, sorted.

    Parts are taken in once they have more numbers than were found: so each number is sorted a few
    times, and no more of them are held than about three times those that occur, and a part.

    >>> distinct([torch.tensor([5, 3, 5]), torch.tensor([3, 4])])
    tensor([3, 4, 5])
    """
    found, waiting = torch.empty(0, dtype=torch.long), list[Tensor]()
    for part in parts:
        waiting.append(part)
        if sum(map(len, waiting)) > len(found):
            found, waiting = _sorted([found, *waiting]), []
    return _sorted([found, *waiting])


def _sorted(parts: Sequence[Tensor]) -> Tensor:
    """The numbers of some parts, each once; numpy sorts them faster than torch does."""
    every = torch.cat(list(parts))
    every.numpy().sort()
    found: Tensor = torch.unique_consecutive(every)
    return found
