"""Noticing that a loop saves its model and optimizer, so that the step can be gone on from.

A saved checkpoint is of use only if the run knows its step, and knows it *before* the file is
written: training may be killed at any moment. A loop that saves asks both model and optimizer for
their state dicts, and only then writes them. So the second of the two questions is the moment to
mark the step, whatever the loop does after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dualform.layers import Hook, is_scripted


class SaveDetector:
    """Calls `mark` when model and optimizer have both been asked for their states in one step.

    One of them alone is asked for other reasons: averages of weights, a look at the learning rate.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> saving = SaveDetector(model, optimizer, lambda: print("marked"))
    >>> state = model.state_dict(); optimizer.step(); state = optimizer.state_dict()
    >>> state = model.state_dict()
    marked
    >>> saving.close()
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, mark: Callable[[], None]) -> None:
        self._mark = mark
        self._asked: set[str] = set()
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = [
            optimizer.register_state_dict_pre_hook(partial(self._ask, "optimizer")),
            optimizer.register_step_post_hook(self._end_step),
        ]
        if not is_scripted(
            model
        ):  # TorchScript takes no such hooks: its loops mark steps themselves
            ask = Hook(self._ask_model)
            self._handles.append(model.register_state_dict_pre_hook(ask))  # type: ignore[no-untyped-call]

    def _end_step(self, *_: object) -> None:
        """The optimizer has stepped: what was asked before is out of date."""
        self._asked.clear()

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _ask_model(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:  # else it is we who ask, or somebody who wants the parameters themselves
            self._ask("model")

    def _ask(self, who: str, *_: object) -> None:
        if threading.get_ident() != self._thread:
            return  # what trains is not what saves, and this may be the middle of a step
        self._asked.add(who)
        if len(self._asked) == 2:
            self._mark()
