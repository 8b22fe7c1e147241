"""What some steps are to a parameter under a rule of numbers; the same for all that had them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualform.optimizers import BY_ROW, History, ScalarRule, walk_back


class NumbersOfSteps(NamedTuple):
    """How much of what was there before some steps, and of their gradients, is there after them."""

    on_W: tuple[float, float]
    """How much of the weight and of the buffer before is in the weight."""
    on_b: tuple[float, float]
    """The same for the buffer."""
    into_W: Tensor
    """(steps,): how much of each gradient is in the weight."""
    into_b: Tensor
    """(steps,): the same for the buffer."""
    makes_buffer: bool


def numbers_of_steps(
    rule: ScalarRule,
    states: Sequence[int],
    hyper: Sequence[tuple[float, ...]],
    buffered: bool,
) -> NumbersOfSteps:
    """The numbers of steps that treated a book so, with these hyper-parameters.

    >>> from dualform.optimizers.sgd import SGDRule
    >>> plain = (0.5, 0.0, 0.0, 0.0, 0.0, 0.0)  # lr=0.5, no momentum
    >>> numbers = numbers_of_steps(SGDRule(), [BY_ROW, BY_ROW], [plain, plain], buffered=False)
    >>> numbers.on_W, numbers.into_W
    ((1.0, 0.0), tensor([-0.5000, -0.5000], dtype=torch.float64))
    """
    given = np.array(hyper, dtype=np.float64)
    history = History(np.array(states, dtype=np.uint8), given, rule.fields, {0: buffered})
    steps = rule.transitions(history)
    ends: Any = walk_back(steps, (0.0, 0.0), [*[0.0] * (len(steps) - 1), 1.0])
    buffers: Any = walk_back(steps, (0.0, 1.0), [0.0] * len(steps))
    by_row = {each for each, state in zip(hyper, states, strict=True) if state == BY_ROW}
    return NumbersOfSteps(
        ends[1],
        buffers[1],
        torch.tensor(ends[0], dtype=torch.float64),
        torch.tensor(buffers[0], dtype=torch.float64),
        any(rule.makes_buffer(dict(zip(rule.fields, each, strict=True))) for each in by_row),
    )
