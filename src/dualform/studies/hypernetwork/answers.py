"""How many answers of a symbolic Raven's matrix agree with the panels that are seen."""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor

AT_A_TIME = 512
"""Puzzles."""


def answer_counts(panels: Tensor, values: int = 8) -> Tensor:
    """(puzzles): how many ninth panels agree with the eight before; panels as `Raven.panels` has.

    A ninth panel agrees if the features of the three columns can be matched so that along the
    rows each follows some rule. No order and no combination of rules is known beforehand.

    >>> rows = torch.tensor([[0, 0, 0], [0, 0, 0], [4, 3, 7]])  # sum or difference, of one feature
    >>> answer_counts(rows[None, :, :, None])
    tensor([2])
    """
    parts = torch.split(panels, AT_A_TIME)
    return torch.cat([_answers(some, values).sum(1) for some in parts])


def _answers(panels: Tensor, values: int) -> Tensor:
    """(puzzles, values ** features): which ninth panels agree."""
    count, features = len(panels), panels.shape[-1]
    follows = _continuations(panels, values)
    orders = torch.tensor(list(permutations(range(features))))
    second = orders.repeat_interleave(len(orders), 0)
    third = orders.repeat(len(orders), 1)
    fits = follows.any(-1)[:, torch.arange(features), second, third].all(-1)
    puzzle, matching = fits.nonzero().unbind(1)
    third_places = third[matching].argsort(-1)  # the answer has the third column's order
    first_places, second_places = third_places, second[matching].gather(1, third_places)
    told = follows[
        puzzle[:, None], first_places, second_places, torch.arange(features).expand(len(puzzle), -1)
    ]
    agreeing = told[:, 0]
    for feature in range(1, features):
        agreeing = (agreeing[:, :, None] & told[:, feature, None]).flatten(1)
    found = torch.zeros(count, values**features)
    return found.index_add(0, puzzle, agreeing.float()) > 0


def _continuations(panels: Tensor, values: int) -> Tensor:
    """(puzzles, features, features, features, values): what three features together allow.

    The features are those of the first, second and third column; they allow a value for the ninth
    panel if a rule holds in the first two rows and in what is seen of the third, and tells it.
    """
    a, b, c = panels.unbind(2)
    a, b = a[:, :, :, None, None], b[:, :, None, :, None]
    c = c[:, :2, None, None, :]
    allowed = torch.zeros(len(panels), *[panels.shape[-1]] * 3, values, dtype=torch.bool)

    def allow(holds: Tensor, told: Tensor) -> None:
        nonlocal allowed
        told = torch.nn.functional.one_hot(told % values, values).bool()
        allowed = allowed | (holds[..., None] & told)

    for step in (0, 1, 2, -1, -2):
        holds = ((a + step - b) % values == 0).all(1) & ((b[:, :2] + step - c) % values == 0).all(1)
        allow(holds, b[:, 2] + step)
    for sign in (1, -1):
        holds = ((a[:, :2] + sign * b[:, :2] - c) % values == 0).all(1)
        allow(holds, a[:, 2] + sign * b[:, 2])
    allow(*_of_three(a, b, c))
    return allowed


def _of_three(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each row has three values of its own in the same set, and which is left."""
    features = c.shape[-1]
    every = (-1, -1, features, features, features)
    rows = torch.stack([x.expand(every) for x in (a[:, :2], b[:, :2], c)], -1).sort(-1).values
    three = rows[:, 0]
    distinct = (three[..., 1:] != three[..., :-1]).all(-1)
    last_a, last_b = (x[:, 2, ..., None] for x in (a, b))
    seen = (three == last_a).any(-1) & (three == last_b).any(-1) & (last_a != last_b)[..., 0]
    holds = distinct & (rows[:, 0] == rows[:, 1]).all(-1) & seen
    return holds, (three.sum(-1) - last_a[..., 0] - last_b[..., 0]).clamp_min(0)
