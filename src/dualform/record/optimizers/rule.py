"""What an optimizer makes of gradients, as coefficients of a linear recursion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer

UNTOUCHED, BY_ROW, OBSERVED = 0, 1, 2
"""How a step treated a book: left it alone, booked it by row, or booked its observed change."""


@dataclass(frozen=True)
class History:
    """What happened to one book, step by step; what a rule needs to find the coefficients."""

    states: NDArray[np.uint8]
    """(T,): UNTOUCHED, BY_ROW or OBSERVED."""
    hyper: NDArray[np.float64]
    """(T, fields): the hyper-parameters of the book's group."""
    fields: tuple[str, ...]
    """What they are called; a field that the run does not know is 0."""
    buffers: Mapping[int, bool]
    """Before which steps a recorder started, and whether the optimizer then had a buffer."""


@dataclass(frozen=True)
class Coefficients:
    """`W_T = initial · W_0 + buffer · b_0 + Σ_t steps[t] · g_t` for one book."""

    initial: float
    buffer: float
    steps: NDArray[np.float64]


@dataclass(frozen=True)
class Transition:
    """One step of `(W, b)`: `z_t = M z_{t-1} + n g_t`, rows W and b."""

    M: tuple[tuple[float, float], tuple[float, float]]
    n: tuple[float, float]


STILL = Transition(((1.0, 0.0), (0.0, 1.0)), (0.0, 0.0))
SEEN = Transition(((1.0, 0.0), (0.0, 1.0)), (1.0, 0.0))


class Rule(ABC):
    """An optimizer whose step is linear in the gradient, with scalar coefficients.

    A new rule names its optimizer and fields, and writes two methods: `accepts` and `transition`.
    """

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]

    @abstractmethod
    def accepts(self, optimizer: Optimizer) -> bool:
        """Whether the rule describes this optimizer exactly."""

    @abstractmethod
    def transition(self, hyper: Mapping[str, float], buffered: bool) -> Transition:
        """The step these hyper-parameters make, with a momentum buffer already there or not."""

    def makes_buffer(self, hyper: Mapping[str, float]) -> bool:
        """Whether a step leaves a momentum buffer behind."""
        return False

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The hyper-parameters of a parameter group, as they are now."""
        return tuple([float(group[name]) for name in self.fields])

    def coefficients(self, history: History) -> Coefficients:
        """Walks the recursion backward once: `a_t = r · n_t`, then `r ← r M_t`."""
        steps = np.zeros(len(history.states))
        r_W, r_b = 1.0, 0.0
        for t, step in reversed(list(enumerate(self._transitions(history)))):
            (WW, Wb), (bW, bb) = step.M
            steps[t] = r_W * step.n[0] + r_b * step.n[1]
            r_W, r_b = r_W * WW + r_b * bW, r_W * Wb + r_b * bb
        return Coefficients(r_W, r_b, steps)

    def _transitions(self, history: History) -> list[Transition]:
        transitions: list[Transition] = []
        known: dict[tuple[Any, ...], tuple[Transition, bool]] = {}
        buffered = False
        for t, (state, values) in enumerate(zip(history.states, history.hyper, strict=True)):
            buffered = history.buffers.get(t, buffered)
            key = (state, buffered, *values)
            if key not in known:
                named = dict(zip(history.fields, map(float, values), strict=True))
                known[key] = self._one(int(state), named, buffered)
            transition, buffered = known[key]
            transitions.append(transition)
        return transitions

    def _one(
        self, state: int, known: Mapping[str, float], buffered: bool
    ) -> tuple[Transition, bool]:
        if state != BY_ROW:
            return (SEEN if state == OBSERVED else STILL), buffered
        hyper = {name: known.get(name, 0.0) for name in self.fields}
        return self.transition(hyper, buffered), buffered or self.makes_buffer(hyper)
