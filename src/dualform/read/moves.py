"""The steps of a replay: one by one, or many at once where the optimizer's rule can do that."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from dualform.errors import CorruptError, DualformError
from dualform.optimizers import Hyper, Rule, State, StateRule, Step

MOST_STEPS = 32
"""How many steps are made at once: the work of a step grows with it, its calls of torch fall."""
SMALL = 1 << 13
"""A book of at most so many elements is small: its steps are made many at a time."""
MOST_NUMBERS = 1 << 16
"""How many elements the gradients of such steps may have: a processor's cache holds them."""


class Moment(NamedTuple):
    """A parameter, its buffer, and what else the optimizer remembers of it."""

    W: Tensor
    b: Tensor
    state: State


class Move(NamedTuple):
    """A step of the optimizer, or many as one."""

    place: int | slice
    """Which of the gradients are its own."""
    steps: int
    """How many steps it is."""
    step: Step
    after: Moment
    """Where it leads."""


@contextmanager
def computable(rule: Rule) -> Iterator[None]:
    """Numbers that an optimizer cannot compute with are an error of the run.

    >>> from dualform.optimizers import rule_named
    >>> with computable(rule_named("adam")):
    ...     (1 - 2.0**3) ** 0.5 / 0
    Traceback (most recent call last):
    dualform.errors.CorruptError: some hyper-parameters of the run, or its counts of steps, are none
    that 'adam' can have (...division by zero); restore it from a copy.
    """
    try:
        yield
    except DualformError:
        raise
    except (ArithmeticError, ValueError) as error:
        raise CorruptError(
            "some hyper-parameters of the run, or its counts of steps, are none that "
            f"'{rule.name}' can have ({error}); restore it from a copy."
        ) from error


def moves(
    rule: StateRule, hypers: Sequence[Hyper], gradients: Tensor, at: Moment
) -> Iterator[Move]:
    """What steps with these gradients, (steps, *shape), make of a parameter.

    One move if the rule can, else one each.
    """
    with computable(rule):
        found = rule.stretch(hypers, at.state, gradients) if len(hypers) > 1 else None
        if found is not None:
            step, state = found
            after = Moment(*step.forward(at.W, at.b, gradients), state)
            yield Move(slice(None), len(hypers), step, after)
            return
        for place, (hyper, gradient) in enumerate(zip(hypers, gradients.unbind(), strict=True)):
            step, state = rule.transition(hyper, at.state, at.W, at.b, gradient)
            at = Moment(*step.forward(at.W, at.b, gradient), state)
            yield Move(place, 1, step, at)


def stretches(
    numbers: Sequence[int], by_row: Container[int], shares: Sequence[float], size: int
) -> Iterator[list[int]]:
    """The steps in groups that may be made at once, for a book of so many numbers.

    A group ends after a step whose parameter counts, and has steps by row alone or one other step.

    >>> list(stretches(range(1, 8), {1, 2, 3, 5, 6, 7}, [0.0] * 6 + [0.5, 0.5], 10))
    [[1, 2, 3], [4], [5, 6], [7]]
    """
    most = max(1, min(MOST_STEPS, MOST_NUMBERS // max(1, size))) if size <= SMALL else 1
    group = list[int]()
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
