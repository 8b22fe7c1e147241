"""Steps of optimizers other than the recorded one, on the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from dualform.recording.shards import is_sharded, local

Noticed: TypeAlias = Callable[[Optimizer, dict[str, Tensor]], None]
"""Told of a step: by which optimizer, and what the parameters that it changed were before it."""


class OtherOptimizers:
    """Sees every optimizer of the process, and tells of steps that no recorder would see.

    A loop may make its optimizer anew, or train a part of the model with a second one. What an
    optimizer does inside a step of the recorded one, or around it, is not told: a wrapper.

    >>> weight, told = nn.Parameter(torch.zeros(2)), []
    >>> ours, theirs = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
    >>> others = OtherOptimizers(ours, {"w": weight}, lambda other, before: told.append([*before]))
    >>> weight.grad = torch.ones(2)
    >>> ours.step(); theirs.step(); others.close(); theirs.step()
    >>> told
    [['w']]
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], noticed: Noticed
    ) -> None:
        self._ours, self._noticed = optimizer, noticed
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = parameters
        self._told: set[str] = set()
        """Parameters that need not be told of again."""
        self._own_steps = 0
        self._inside = False
        self._before: tuple[int, dict[str, Tensor]] = (0, {})
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(self._enter),
            register_optimizer_step_post_hook(self._leave),
        ]

    def close(self) -> None:
        """Stops looking."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._ours:
            self._inside, self._own_steps = True, self._own_steps + 1
        elif not self._inside:
            names = {
                name
                for group in optimizer.param_groups
                for parameter in group["params"]
                if (name := self._names.get(id(parameter))) is not None
            }
            before = {n: local(self._parameters[n]).detach().clone() for n in names - self._told}
            self._before = (self._own_steps, before)

    def _leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._ours:
            self._inside = False
        elif not self._inside:
            (own_steps, before), self._before = self._before, (0, {})
            changed = {name: old for name, old in before.items() if self._has_changed(name, old)}
            if changed and own_steps == self._own_steps:
                self._told |= changed.keys()
                self._noticed(optimizer, changed)

    def _has_changed(self, name: str, old: Tensor) -> bool:
        """Whether a parameter was changed; of a sharded one, all processes say the same."""
        parameter = self._parameters[name]
        if is_sharded(parameter):
            return parameter.grad is not None
        return not torch.equal(old, parameter.detach())
