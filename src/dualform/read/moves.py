"""The steps of a replay: one by one, or many at once where the optimizer's rule can do that."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.optimizers import Hyper, State, StateRule, Step

MOST_STEPS = 32
"""How many steps are made at once: the work of a step grows with it, its calls of torch fall."""
MOST_NUMBERS = 1 << 16
"""How many elements the gradients of such steps may have: a processor's cache holds them."""


class Moment(NamedTuple):
    """A parameter, its buffer, and what else the optimizer remembers of it."""

    W: Tensor
    b: Tensor
    state: State


class Move(NamedTuple):
    """A step of the optimizer, or many as one."""

    places: range
    """Which of the steps that were asked for."""
    step: Step
    gradient: Tensor
    """(*shape) of one step, (steps, *shape) of many."""
    after: Moment
    """Where it leads."""


def moves(
    rule: StateRule, hypers: Sequence[Hyper], gradients: Sequence[Tensor], at: Moment
) -> Iterator[Move]:
    """What some steps in a row make of a parameter: one move if the rule can, else one each."""
    count = len(hypers)
    if count > 1:
        stacked = torch.stack(list(gradients))
        found = rule.stretch(hypers, at.state, stacked)
        if found is not None:
            step, state = found
            after = Moment(*step.forward(at.W, at.b, stacked), state)
            yield Move(range(count), step, stacked, after)
            return
    for place, (hyper, gradient) in enumerate(zip(hypers, gradients, strict=True)):
        step, state = rule.transition(hyper, at.state, at.W, at.b, gradient)
        at = Moment(*step.forward(at.W, at.b, gradient), state)
        yield Move(range(place, place + 1), step, gradient, at)


def stretches(
    numbers: Sequence[int], by_row: Container[int], shares: Sequence[float], size: int
) -> Iterator[list[int]]:
    """The steps in groups that may be made at once, for a book of so many numbers.

    A group ends after a step whose parameter counts, and has steps by row alone or one other step.

    >>> list(stretches(range(1, 8), {1, 2, 3, 5, 6, 7}, [0.0] * 6 + [0.5, 0.5], 10))
    [[1, 2, 3], [4], [5, 6], [7]]
    """
    most, group = max(1, min(MOST_STEPS, MOST_NUMBERS // max(1, size))), list[int]()
    for t in numbers:
        if group and (t not in by_row or len(group) == most):
            yield group
            group = []
        group.append(t)
        if shares[t] or t not in by_row:
            yield group
            group = []
    if group:
        yield group
