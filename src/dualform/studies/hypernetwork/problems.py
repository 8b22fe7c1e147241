"""What the two tasks of the study have in common: problems, their parts, and random streams."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from dualform.errors import EvaluationError

Item = TypeVar("Item")

BLOCK = 1 << 14
"""So many training problems are drawn, and shuffled, at a time."""


@dataclass(frozen=True)
class Problems:
    """Some problems of a task: what a network is given, and what it should answer."""

    x: Tensor
    """(problems, tokens, inputs): the last tokens are asked, and carry no answer."""
    y: Tensor
    """(problems, asked): numbers, or classes."""
    rules: Tensor
    """(problems, rules of a problem): the numbers of the rules that made it."""

    def __len__(self) -> int:
        return len(self.y)

    def some(self, rows: Tensor) -> Problems:
        """Those of some numbers, or of a mask.

        >>> three = Problems(torch.zeros(3, 2, 1), torch.arange(3)[:, None], torch.zeros(3, 1))
        >>> three.some(torch.tensor([2, 0])).y.flatten().tolist()
        [2, 0]
        """
        return Problems(self.x[rows], self.y[rows], self.rules[rows])

    def to(self, device: str) -> Problems:
        """The same on a device.

        >>> len(Problems(torch.zeros(3, 2, 1), torch.zeros(3, 1), torch.zeros(3, 1)).to("cpu"))
        3
        """
        return Problems(self.x.to(device), self.y.to(device), self.rules.to(device))


class Task(Hashable, Protocol):
    """Where problems come from."""

    @property
    def name(self) -> str:
        """What the task is called."""

    @property
    def seed(self) -> int:
        """Of every stream of the task."""

    @property
    def parts(self) -> tuple[str, ...]:
        """ "train" and "test", which share their rules, and then what is held out of training."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Tokens, numbers of a token, tokens that are asked, and numbers of an answer."""

    @property
    def has_places(self) -> bool:
        """Whether it matters where a token stands."""

    def draw(self, part: str, count: int, stream: torch.Generator) -> Problems:
        """So many problems of a part, by a stream."""

    def labels(self, rules: Tensor) -> Tensor:
        """(problems, asked): which rule each asked token has to follow, by number."""

    def loss(self, answers: Tensor, y: Tensor) -> Tensor:
        """What training lessens: answers are (problems, asked, numbers of an answer)."""

    def score(self, answers: Tensor, y: Tensor) -> float:
        """How right answers are: 1 where all are."""


def random_stream(seed: int, name: str) -> torch.Generator:
    """A generator of its own for each seed and name: what one draws changes no other.

    >>> draws = [torch.rand(1, generator=random_stream(0, name)) for name in ("train", "test")]
    >>> bool(draws[0] == draws[1])
    False
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def require_part(task: Task, part: str) -> None:
    """Raises unless a task has a part of this name.

    >>> from dualform.studies.hypernetwork.fuzzy_logic import FuzzyLogic
    >>> require_part(FuzzyLogic(), "rules")
    Traceback (most recent call last):
    dualform.errors.EvaluationError: part='rules' is not in fuzzy_logic; it has 'train', 'test', ...
    """
    if part not in task.parts:
        known = ", ".join(map(repr, task.parts))
        raise EvaluationError(f"part='{part}' is not in {task.name}; it has {known}.")


@lru_cache(maxsize=8)
def problems_of(task: Task, part: str, count: int) -> Problems:
    """The problems that every network is tested on: those of a stream of the task and the part.

    They are kept, for the next networks of a seed are tested on them too.
    """
    require_part(task, part)
    return task.draw(part, count, random_stream(task.seed, f"test {part}"))


def training_batches(
    task: Task, seed: int, batch: int, steps: int, device: str = "cpu", first: int = 0
) -> Iterator[Problems]:
    """Batches of training problems from the first on, each problem in one of them.

    The problems come from the stream "train". Blocks of them are shuffled by the stream "order", so
    that another order of the same problems needs no other problems. For a GPU, a thread draws the
    next block meanwhile.

    >>> from dualform.studies.hypernetwork.fuzzy_logic import FuzzyLogic
    >>> [len(batch) for batch in training_batches(FuzzyLogic(), 0, batch=8, steps=3)]
    [8, 8, 8]
    """
    blocks = _blocks(task, seed, batch, steps)
    for problems, order in blocks if torch.device(device).type == "cpu" else ahead(blocks):
        wanted = order[first * batch :]
        first = max(0, first - len(order) // batch)
        if len(wanted):
            there = problems.to(device)
            yield from (there.some(rows) for rows in torch.split(wanted.to(device), batch))


def _blocks(task: Task, seed: int, batch: int, steps: int) -> Iterator[tuple[Problems, Tensor]]:
    """Training problems, and the order in which they come."""
    drawn, order = random_stream(seed, f"train {task.seed}"), random_stream(seed, "order")
    left = steps * batch
    while left:
        block = min(left, BLOCK // batch * batch or batch)
        yield task.draw("train", block, drawn), torch.randperm(block, generator=order)
        left -= block


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, a thread making the next one while one is used.

    >>> list(ahead(iter("abc")))
    ['a', 'b', 'c']
    """
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


def split(count: int, share: float, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Numbers below `count`, each in one of two parts; the second has this share, rounded down.

    >>> kept, held_out = split(10, 0.25, random_stream(0, "split"))
    >>> len(kept), len(held_out)
    (8, 2)
    """
    order = torch.randperm(count, generator=stream)
    second = int(count * share)
    return order[second:].sort().values, order[:second].sort().values
