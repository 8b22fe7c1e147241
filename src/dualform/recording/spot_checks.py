"""Spot checks: some steps are made twice, and whole weights are compared.

Probes and excerpts look at a few elements in every step. A spot check looks at every element in a
few steps. Before such a step, the optimizer's own code steps copies of the parameters. After it
each parameter must be equal to its copy: else something else changed it within the step. Before the
next step it must still be so, and so must what the optimizer remembers of it: else something
changed them between the two steps. Where steps are handed over, weights are copied anyway, and
are compared with these copies before the next step.

A copy and its parameter go through the same code with the same numbers, so they agree to rounding
under any optimizer. What changes an element in every step is found by the next spot check.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.optimizers import Rule
from dualform.recording.bookkeeping import OUTSIDE
from dualform.recording.observer import FORGOTTEN
from dualform.recording.randomness import undisturbed
from dualform.recording.reconcile import differs
from dualform.recording.shards import local

EVERY = 128
"""One step in so many is checked. The first ones are checked more often: 1, 2, 4, 8, 16 …"""
LEEWAY = 1e-2
"""How far an element of a copy may be off, as a part of the longest step in its row and column.

Only where steps go through products or roots of matrices: their rounding may depend on where a
tensor lies in memory, and the step magnifies it.
"""
WITHIN = "something other than the optimizer changed it within a step, or what shares its rows"
UNCHECKED = (
    "the recorder cannot compare whole weights: {} failed to step a copy of a parameter ({}). It "
    "compares parts of them, as at other steps; run.audit() shows what these checks miss."
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of so many bytes."""


class AfterStep(NamedTuple):
    """A parameter after a step that was checked, and what the optimizer remembers of it."""

    weight: Tensor
    """A copy."""
    memory: list[Tensor] | None = None
    """Fingerprints of what the optimizer remembers; None where nobody looked."""


class SpotChecks:
    """Checks some steps of an optimizer; told before and after each of them.

    >>> from dualform.optimizers import rule_for
    >>> weight = nn.Parameter(torch.zeros(3))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> checks = SpotChecks({"w": weight}, optimizer, rule_for(optimizer))
    >>> weight.grad = torch.ones(3)
    >>> checks.before_step(["w"]); optimizer.step(); weight.data[2] = 5.0
    >>> checks.after_step()[WITHIN]
    {'w': tensor(True)}
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, rule: Rule
    ) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._leeway = 0.0 if rule.in_parts else LEEWAY
        self._random = random.Random(0)  # the user's random states stay untouched
        self._steps, self._next = 0, 1
        self._expected: dict[str, tuple[Tensor, Tensor | float]] = {}
        """During a step that is checked: what each parameter will be, and how far it may be off."""
        self._left: dict[str, AfterStep] = {}
        """After a step that was checked: what it left."""
        self._edited: dict[str, dict[str, Tensor]] = {}
        """For each reason and book, whether it holds."""
        self.problem = ""
        """Why steps cannot be checked, until that was told."""

    def before_step(self, names: Collection[str]) -> None:
        """Compares what the last step left, if that was checked; prepares a step to be checked.

        `names` are the parameters that are kept by row.
        """
        self._expected = {}  # if the last step raised, nobody was told after it
        if self._left:
            self._compare_left(names)
        self._steps += 1
        if self._steps >= self._next:
            self._expect(names)

    def wait(self, steps: int | None) -> None:
        """Checks the step that comes after so many; none before it is asked for, if None."""
        self._next = sys.maxsize if steps is None else self._steps + steps

    def take_problem(self) -> str:
        """Why steps cannot be checked, in words; from then on it counts as told."""
        problem, self.problem = self.problem, ""
        return problem

    def handed_over(self, weights: Mapping[str, Tensor], at_once: bool = False) -> None:
        """Takes down copies of the weights, made after the last step; they are not changed.

        If made `at_once`, they are what the step left, and take the place of its own copies.
        """
        own, self._left = self._left, {name: AfterStep(copy) for name, copy in weights.items()}
        for name, left in own.items():
            copy = weights[name] if at_once and name in weights else left.weight
            self._left[name] = AfterStep(copy, left.memory)

    def after_step(self) -> dict[str, dict[str, Tensor]]:
        """What was found: for each reason and parameter, whether something else changed it."""
        found, self._edited = self._edited, {}
        for name, (after, reach) in self._expected.items():
            now = local(self._parameters[name]).detach()
            found.setdefault(WITHIN, {})[name] = differs(after, now, reach)
            self._left[name] = AfterStep(after.copy_(now), self._memory(name))
        self._expected = {}
        return found

    def _compare_left(self, names: Collection[str]) -> None:
        """Compares what the last step left with what is there now."""
        left, self._left = self._left, {}
        for name in left.keys() & set(names):
            weight, memory = left[name]
            now = local(self._parameters[name]).detach()
            self._edited.setdefault(OUTSIDE, {})[name] = differs(weight, now)
            if memory is not None:
                unlike = _unlike(memory, self._memory(name))
                self._edited.setdefault(FORGOTTEN, {})[name] = unlike

    def _expect(self, names: Collection[str]) -> None:
        """Steps copies of the parameters, and says which step is checked next."""
        later = (self._steps // EVERY + 1) * EVERY + self._random.randrange(EVERY)
        self._next = later if self._steps >= EVERY else 2 * self._steps
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        try:
            with undisturbed():
                for name in names:
                    parameter = self._parameters[name]
                    after = stepped_copy(self._optimizer, groups[id(parameter)], parameter)
                    far = local(_longest(after - parameter.detach())) if self._leeway else 0.0
                    self._expected[name] = (local(after), self._leeway * far)
        except Exception as error:  # if the step itself fails too, the loop is told by torch
            kind, self._next = type(self._optimizer).__name__, sys.maxsize
            self.problem = UNCHECKED.format(kind, f"{type(error).__name__}: {error}")

    def _memory(self, name: str) -> list[Tensor]:
        memory = self._optimizer.state.get(self._parameters[name], {})
        return [fingerprint(kept) for kept in _tensors(memory)]


def stepped_copy(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """What the optimizer's next step will make of a parameter of this group.

    The step is made by a second optimizer of the same class, whose parameter, gradient and memory
    are copies. No hook is called.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> weight.grad = torch.ones(2)
    >>> stepped_copy(optimizer, optimizer.param_groups[0], weight), weight.data
    (tensor([0.5000, 0.5000]), tensor([1., 1.]))
    """
    copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    if parameter.grad is not None:
        copy.grad = parameter.grad.detach().clone()
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = [{**group, "params": [copy]}]
    twin.state = defaultdict(dict)
    if parameter in optimizer.state:
        twin.state[copy] = _copied(optimizer.state[parameter])
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(twin)
    return copy.detach()


def fingerprint(tensor: Tensor) -> Tensor:
    """The sums of its bits, read as integers, over the first dimension.

    >>> fingerprint(torch.tensor([1.0, 2.0])), fingerprint(torch.tensor([1.0, -2.0]))
    (tensor(2139095040), tensor(-8388608))
    """
    dense = local(tensor).detach().to_dense().contiguous()
    return dense.view(INTEGERS[dense.itemsize]).sum(0)


def _longest(change: Tensor) -> Tensor:
    """For each element, the longest change in its row or in its column, whichever is shorter.

    >>> _longest(torch.tensor([[0.0, 3.0], [0.0, 2.0]]))
    tensor([[0., 3.],
            [0., 2.]])
    """
    dims, sizes = set(range(change.ndim)), change.abs()
    if change.ndim < 2 or not change.numel():
        return sizes.amax() if change.numel() else sizes
    lines = [sizes.amax(tuple(dims - {dim}), keepdim=True) for dim in dims]
    return functools.reduce(torch.minimum, lines)


def _unlike(old: list[Tensor], new: list[Tensor]) -> Tensor:
    """(): whether fingerprints are not the same, one by one."""
    if [part.shape for part in old] != [part.shape for part in new]:
        return torch.tensor(True)
    found = [(a != b.to(a.device)).any() for a, b in zip(old, new, strict=True)]
    return (
        torch.stack([part.to(found[0].device) for part in found]).any()
        if found
        else torch.tensor(False)
    )


def _tensors(memory: Any) -> Iterator[Tensor]:
    """All tensors of an optimizer's memory of a parameter."""
    if isinstance(memory, Tensor):
        yield memory
    elif isinstance(memory, Mapping | list):
        for part in memory.values() if isinstance(memory, Mapping) else memory:
            yield from _tensors(part)


def _copied(memory: Any) -> Any:
    """An optimizer's memory of a parameter, of which steps may change every tensor in place."""
    if isinstance(memory, Tensor):
        return memory.detach().clone()
    if isinstance(memory, Mapping):
        return {name: _copied(part) for name, part in memory.items()}
    return [_copied(part) for part in memory] if isinstance(memory, list) else memory
