"""What steps did to books that are kept by step: small books end to end, as they were copied.

A network with many normalizations has hundreds of such books, and each step changes all of them. To
cut a step's changes into books takes a call of torch for each, and most steps are never looked at
book by book.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.recording.transfer import to_host


class ChangePlace(NamedTuple):
    """Where the change of a book lies."""

    vector: int
    start: int
    shape: torch.Size

    @property
    def part(self) -> slice:
        """Its elements in that vector."""
        return slice(self.start, self.start + self.shape.numel())


@dataclass(frozen=True, eq=False)
class StepChanges(Mapping[str, Tensor]):
    """The changes of some books in one step; a book's is cut out when it is asked for.

    >>> changes = StepChanges.of({"w": torch.ones(2, 1), "b": torch.zeros(1)})
    >>> list(changes), changes["w"].shape, changes.nbytes
    (['w', 'b'], torch.Size([2, 1]), 12)
    """

    places: Mapping[str, ChangePlace]
    """One object for steps whose changes lie alike."""
    vectors: tuple[Tensor, ...]
    """Elements of several books end to end, or of one."""

    @classmethod
    def of(cls, changes: Mapping[str, Tensor]) -> StepChanges:
        """Changes that lie apart."""
        items = enumerate(changes.items())
        places = {name: ChangePlace(at, 0, change.shape) for at, (name, change) in items}
        return cls(places, tuple([change.reshape(-1) for change in changes.values()]))

    def __getitem__(self, book: str) -> Tensor:
        place = self.places[book]
        return self.vectors[place.vector][place.part].view(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """What they take."""
        return sum([vector.nbytes for vector in self.vectors])


NO_CHANGES = StepChanges({}, ())


class Stack(NamedTuple):
    """What lies in one vector, of all steps in which changes lie alike."""

    at: list[int]
    """The indices of these steps."""
    places: dict[str, ChangePlace]
    """The books in it."""
    vectors: list[Tensor]
    """One a step."""

    def values(self) -> Tensor:
        """(steps, elements)."""
        return torch.stack(self.vectors)


def stacks(steps: Sequence[StepChanges]) -> Iterator[Stack]:
    """The changes of some steps, vector by vector.

    >>> first = StepChanges.of({"w": torch.ones(2)})
    >>> (stack,) = stacks([first, NO_CHANGES, StepChanges(first.places, (torch.zeros(2),))])
    >>> stack.at, stack.values().tolist()
    ([0, 2], [[1.0, 1.0], [0.0, 0.0]])
    """
    alike: dict[int, list[int]] = {}
    for at, changes in enumerate(steps):
        alike.setdefault(id(changes.places), []).append(at)
    for indices in alike.values():
        inside: dict[int, dict[str, ChangePlace]] = {}
        for name, place in steps[indices[0]].places.items():
            inside.setdefault(place.vector, {})[name] = place
        for vector, places in inside.items():
            yield Stack(indices, places, [steps[at].vectors[vector] for at in indices])


def by_book(steps: Sequence[StepChanges]) -> dict[str, tuple[Tensor, Tensor]]:
    """For each book the indices of the steps that changed it, and these changes, in main memory.

    >>> at, changes = by_book([NO_CHANGES, StepChanges.of({"w": torch.ones(2)})])["w"]
    >>> at.tolist(), changes.tolist()
    ([1], [[1.0, 1.0]])
    """
    found: dict[str, list[tuple[list[int], Tensor]]] = {}
    for stack in stacks(steps):
        values = to_host(stack.values())
        for name, place in stack.places.items():
            own = values[:, place.part].reshape(-1, *place.shape)
            found.setdefault(name, []).append((stack.at, own))
    return {name: _in_order(found[name]) for name in sorted(found)}


def _in_order(parts: Sequence[tuple[list[int], Tensor]]) -> tuple[Tensor, Tensor]:
    """Parts of a book's changes as one, in the order of steps."""
    at = torch.tensor([index for indices, _ in parts for index in indices])
    if len(parts) == 1:
        return at, parts[0][1]
    order = at.argsort()
    return at[order], torch.cat([values for _, values in parts])[order]


def with_changes(steps: Sequence[StepChanges], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What books were before these steps, with the changes that were observed; themselves if none.

    >>> with_changes([StepChanges.of({"w": torch.ones(2)})] * 3, {"w": torch.zeros(2)})
    {'w': tensor([3., 3.], dtype=torch.float64)}
    """
    ends = dict(before)
    for stack in stacks(steps):
        names = [name for name in stack.places if name in ends]
        if names:
            values = stack.values()
            total = values.sum(0, dtype=torch.promote_types(values.dtype, torch.float64))
            for name in names:
                place = stack.places[name]
                ends[name] = ends[name].double() + total[place.part].view(place.shape)
    return ends
