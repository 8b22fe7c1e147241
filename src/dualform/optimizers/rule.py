"""What an optimizer makes of gradients, as coefficients of a linear recursion.

Every optimizer here moves `z = (W, b)`, the parameter and one buffer, by
`z_t = M_t z_{t-1} + n_t g_t`. Going backward once from step T (`r = (1, 0)`; at each step
`H_t = r · n_t`, then `r ← r M_t`) gives `W_T = r_W W_0 + r_b b_0 + Σ_t H_t g_t`.
The entries of M and n are numbers for some optimizers (`ScalarRule`), and for others (`StateRule`)
depend on the gradients seen so far: they are found again by replaying training from the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from dualform.optimizers.operators import Diagonal
from dualform.optimizers.steps import SEEN, STILL, Hyper, Step, Transition, walk_back

UNTOUCHED, BY_ROW, OBSERVED = 0, 1, 2
"""How a step treated a book: left it alone, booked it by row, or booked its observed change."""

State: TypeAlias = dict[str, Tensor]
"""What an optimizer remembers of one parameter, by name."""


def is_from_torch(optimizer: Optimizer, name: str) -> bool:
    """Whether it is torch's optimizer of this name and no other: a subclass may do anything.

    >>> is_from_torch(torch.optim.Adam([torch.zeros(1)]), "Adam")
    True
    >>> is_from_torch(torch.optim.AdamW([torch.zeros(1)]), "Adam")
    False
    """
    return type(optimizer) is getattr(torch.optim, name, None)  # older versions lack some


def complex_parameters(optimizer: Optimizer) -> str:
    """Why complex parameters have no coefficients; empty where there are none.

    >>> complex_parameters(torch.optim.Adam([torch.zeros(1, dtype=torch.complex64)]))
    'Adam steps the two parts of complex64 parameters apart; by row are real ones'
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    dtypes = [str(p.dtype).removeprefix("torch.") for p in parameters if p.is_complex()]
    name = type(optimizer).__name__
    apart = f"{name} steps the two parts of {', '.join(dict.fromkeys(dtypes))} parameters apart"
    return f"{apart}; by row are real ones" if dtypes else ""


class Rule(ABC):
    """An optimizer whose step is linear in the gradient, given what it remembers.

    A new rule names its fields and its buffer, and writes two methods: `describes` (unless it names
    an optimizer of torch) and `transition`, as `ScalarRule` or `StateRule` asks for it. What it
    does not describe of such an optimizer, `refusal` and `group_refusal` say.
    """

    name: ClassVar[str]
    optimizer: ClassVar[str] = ""
    """The class that it describes, one of torch.optim unless `describes` says otherwise."""
    fields: ClassVar[tuple[str, ...]]
    """The hyper-parameters of a step; those of the optimizer's groups unless `hyper` says more."""
    buffer: ClassVar[str] = ""
    """What the optimizer's state calls the buffer `b`; empty where there is none."""
    state: ClassVar[tuple[str, ...]] = ()
    """What else of the optimizer's memory its coefficients depend on."""
    by_numbers: ClassVar[bool]
    """Whether its coefficients are numbers, known without a replay of the training."""
    elementwise: ClassVar[bool] = False
    """Whether each element goes its own way, so that parts of a parameter can be replayed alone."""
    follows_signs: ClassVar[bool] = False
    """Whether it steps by the sign of a gradient, whose rounding it therefore magnifies."""
    turns: ClassVar[bool] = False
    """Whether its operators are elementwise in other bases, `Turned`."""

    @property
    def in_parts(self) -> bool:
        """Whether parts of a parameter can be followed through its steps alone."""
        return self.by_numbers or self.elementwise

    @property
    def scalar(self) -> ScalarRule:
        """The rule, as one whose coefficients are numbers."""
        raise TypeError(f"the coefficients of '{self.name}' are no numbers; replay it.")

    @property
    def replayed(self) -> StateRule:
        """The rule, as one that is replayed."""
        raise TypeError(f"the coefficients of '{self.name}' are numbers; ask `scalar` for them.")

    def describes(self, optimizer: Optimizer) -> bool:
        """Whether the rule is for optimizers of this very class."""
        return is_from_torch(optimizer, self.optimizer)

    def refusal(self, optimizer: Optimizer) -> str:
        """Why it cannot be kept by row as a whole: what was given, and what can; or nothing."""
        return complex_parameters(optimizer)

    def group_refusal(self, group: Mapping[str, Any]) -> str:
        """Why the parameters of a group cannot be kept by row, with its options as they are now."""
        return ""

    def group_refusals(self, optimizer: Optimizer) -> dict[int, str]:
        """Why some parameters cannot be kept by row under their group's options, by their `id`."""
        given = [(group, self.group_refusal(group)) for group in optimizer.param_groups]
        return {id(p): reason for group, reason in given if reason for p in group["params"]}

    def accepts(self, optimizer: Optimizer) -> bool:
        """Whether the rule describes this optimizer exactly."""
        return self.describes(optimizer) and not self.refusal(optimizer)

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The hyper-parameters of a parameter group, as they are now; `betas` as two.

        `double` says whether torch keeps the numbers of its state in float64.
        """
        given = {"double": torch.get_default_dtype() == torch.float64}
        given |= zip(("beta1", "beta2"), group.get("betas", ()), strict=False)
        return tuple([float(given[name] if name in given else group[name]) for name in self.fields])

    def memory(self, optimizer: Optimizer, parameter: Tensor) -> State:
        """What the optimizer remembers of a parameter now, under the names of buffer and state.

        Names it does not know yet are left out. These are the optimizer's own tensors: copy them.
        """
        known = optimizer.state.get(parameter, {})
        names = [name for name in (self.buffer, *self.state) if known.get(name) is not None]
        return {name: known[name] for name in names}

    def keeps(self, optimizer: Optimizer, joined: bool) -> bool:
        """Whether the step just made changed what no replay from the rows can find again.

        `joined` says whether it was the first step of some parameter. What the optimizer remembers
        is then kept.
        """
        return False


@dataclass(frozen=True)
class History:
    """What happened to one book, step by step; what a scalar rule needs for its coefficients."""

    states: NDArray[np.uint8]
    """(T,): UNTOUCHED, BY_ROW or OBSERVED."""
    hyper: NDArray[np.float64]
    """(T, fields): the hyper-parameters of the book's group."""
    fields: tuple[str, ...]
    """What they are called; a field that the run does not know is 0."""
    buffers: Mapping[int, bool]
    """Before which steps a recorder started, and whether the optimizer then had a buffer."""

    def named(self, t: int) -> dict[str, float]:
        """The hyper-parameters of step `t`, counted from 0."""
        return dict(zip(self.fields, map(float, self.hyper[t]), strict=True))

    def at(self, step: int, fields: Sequence[str]) -> dict[str, float]:
        """These hyper-parameters of a step, by its number; 0 for those the run does not have."""
        known = self.named(step - 1)
        return {name: known.get(name, 0.0) for name in fields}

    def each(self, steps: Sequence[int], fields: Sequence[str]) -> dict[int, Hyper]:
        """The same of many steps, by their numbers; steps that are alike share one mapping."""
        found: dict[int, Hyper] = {}
        known: dict[bytes, Hyper] = {}
        for step in steps:
            line = self.hyper[step - 1].tobytes()
            if line not in known:
                known = {line: self.at(step, fields)}  # a schedule does not come back to a line
            found[step] = known[line]
        return found


@dataclass(frozen=True)
class Coefficients:
    """`W_T = initial · W_0 + buffer · b_0 + Σ_t steps[t] · g_t` for one book."""

    initial: float
    buffer: float
    steps: NDArray[np.float64]


class ScalarRule(Rule):
    """A rule whose coefficients are numbers, known from the hyper-parameters alone."""

    by_numbers = True

    @property
    def scalar(self) -> ScalarRule:
        """Itself."""
        return self

    @abstractmethod
    def transition(self, hyper: Hyper, buffered: bool) -> Transition:
        """The step these hyper-parameters make, with a buffer already there or not."""

    def makes_buffer(self, hyper: Hyper) -> bool:
        """Whether a step leaves a buffer behind."""
        return False

    def coefficients(self, history: History, shares: Sequence[float] = ()) -> Coefficients:
        """Walks the recursion backward once.

        `shares` are for a mean of `W_0 … W_T`: how much each of them counts. Without, `W_T` does.
        """
        counts = [*shares] or [*[0.0] * len(history.states), 1.0]
        found: Any  # numbers here, one and all
        r: Any
        found, r = walk_back(self.transitions(history), (0.0, 0.0), counts[1:])
        return Coefficients(r[0] + counts[0], r[1], np.array(found, dtype=np.float64))

    def transitions(self, history: History) -> list[Transition]:
        """What each step was to the parameter and its buffer."""
        transitions: list[Transition] = []
        known: dict[tuple[Any, ...], tuple[Transition, bool]] = {}
        buffered = False
        for t, state in enumerate(history.states):
            buffered = history.buffers.get(t, buffered)
            key = (state, buffered, *history.hyper[t])
            if key not in known:
                known[key] = self._one(int(state), history.named(t), buffered)
            transition, buffered = known[key]
            transitions.append(transition)
        return transitions

    def _one(self, state: int, known: Hyper, buffered: bool) -> tuple[Transition, bool]:
        if state != BY_ROW:
            return (SEEN if state == OBSERVED else STILL), buffered
        hyper = {name: known.get(name, 0.0) for name in self.fields}
        return self.transition(hyper, buffered), buffered or self.makes_buffer(hyper)


class StateRule(Rule):
    """A rule whose coefficients depend on the gradients seen so far, through `state`."""

    by_numbers = False

    @property
    def replayed(self) -> StateRule:
        """Itself."""
        return self

    def divisor(self, hyper: Hyper, memory: State) -> Tensor | None:
        """What its steps divide by, of what `memory` finds; None where steps depend on more.

        Where it is kept at some steps, the steps between are known without their gradients.
        """
        return None

    def step_by(self, hyper: Hyper, taken: float, inverse: Diagonal) -> Step:
        """The step after so many were `taken`, given the inverse of a divisor that was kept."""
        raise TypeError(f"steps of '{self.name}' depend on more than a divisor.")

    def stretch(
        self, hypers: Sequence[Hyper], state: State, gradients: Tensor
    ) -> tuple[Step, State] | None:
        """Some steps in a row as one, whose `gradients` are (steps, *shape).

        None where a step depends on the parameter: then they are made one by one.
        """
        return None

    @abstractmethod
    def transition(
        self, hyper: Hyper, state: State, W: Tensor, b: Tensor, gradient: Tensor
    ) -> tuple[Step, State]:
        """The step, and what the optimizer remembers after it.

        `state` is what it remembered before, as float64: what `memory` found, or what the last
        step left. Before a parameter's first step names may be missing, and `b` is zero.
        All tensors but those of `state` have the parameter's shape. Nothing is changed in place.
        """
