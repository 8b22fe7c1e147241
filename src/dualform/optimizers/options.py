"""The numbers of a step as torch computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualform.optimizers.rule import State
from dualform.optimizers.steps import Hyper


def count(state: State) -> tuple[float, Tensor]:
    """Which step this is to the optimizer, counted from 1; as a number, and as a state keeps it.

    >>> count({}), count({"step": torch.tensor(4.0)})[0]
    ((1.0, tensor(1., dtype=torch.float64)), 5.0)
    """
    step = float(state.get("step", 0.0)) + 1
    return step, kept(step)


def kept(number: float) -> Tensor:
    """A number as a rule's state keeps it."""
    return torch.tensor(number, dtype=torch.float64)


def rounded(number: float, hyper: Hyper) -> Tensor:
    """A number as torch's state keeps it: in float32, unless `double`.

    >>> rounded(0.1, {"double": 0.0}).item(), rounded(0.1, {"double": 1.0}).item()
    (0.10000000149011612, 0.1)
    """
    return torch.tensor(number, dtype=torch.float64 if hyper["double"] else torch.float32)


def clock(step: float, hyper: Hyper) -> Any:
    """The step as torch computes with it: a float, or where `capturable` a tensor.

    In float32 that matters: 1 - β2^t is off by 1e-5 of itself, and torch steps by it.

    >>> [f"{1 - 0.999 ** clock(1.0, {'capturable': c, 'double': 0.0}):.9f}" for c in (0.0, 1.0)]
    ['0.001000000', '0.000999987']
    """
    return rounded(step, hyper) if hyper["capturable"] else step
