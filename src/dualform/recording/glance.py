"""Glances: a few elements of every parameter, taken around each step.

Steps are what the optimizer does. Loops also clip weights, prune them, average them into others or
load them from a file, and another optimizer may step beside the recorded one. Whatever changes a
parameter between two steps shows as a glance before the second that is not the one after the first.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

ELEMENTS = 32
"""So many elements of a parameter are looked at: neighbors, which costs least."""

ROUNDINGS = 4.0
"""So many roundings of its largest element may be left of what was added and taken off again."""

Glance: TypeAlias = tuple[Tensor, ...]
"""The elements of all parameters, end to end, for each device."""


class Glances:
    """Looks at some parameters.

    >>> w = torch.zeros(100)
    >>> glances = Glances({"w": w})
    >>> before = glances.take()
    >>> w += 1
    >>> glances.differing([before], [glances.take()])
    {'w': 0}
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._pointers: list[int] = []
        self._views: dict[torch.device, list[Tensor]] = {}
        self._places: dict[str, tuple[int, slice]] = {}

    def take(self) -> Glance:
        """The elements as they are now."""
        pointers = [parameter.data_ptr() for parameter in self._parameters.values()]
        if pointers != self._pointers:  # the first time, or after `parameter.data = …`
            self._pointers = pointers
            self._look()
        return tuple([torch.cat(views) for views in self._views.values()])

    def differing(
        self, earlier: Sequence[Glance], later: Sequence[Glance], roughly: Container[str] = ()
    ) -> dict[str, int]:
        """The parameters of which two glances differ, and the number of the first such pair.

        Rounding does not count for those that are compared `roughly`: a loop may have added
        something and taken it off again.
        """
        columns = list(zip(_columns(earlier), _columns(later), strict=True))
        if all(torch.equal(a, b) for a, b in columns):
            return {}
        found = {}
        for name, (at, part) in self._places.items():
            a, b = (side[:, part].cpu() for side in columns[at])
            eps = torch.finfo(self._parameters[name].dtype).eps if name in roughly else 0.0
            unlike = _unlike(a, b, ROUNDINGS * eps)
            if unlike.any():
                found[name] = int(unlike.int().argmax())
        return found

    def _look(self) -> None:
        self._views = {parameter.device: [] for parameter in self._parameters.values()}
        ends = dict.fromkeys(self._views, 0)
        for name, parameter in self._parameters.items():
            device, view = parameter.device, _some(parameter.detach())
            end = ends[device] + view.numel()
            self._places[name] = (list(self._views).index(device), slice(ends[device], end))
            self._views[device].append(view)
            ends[device] = end


def _some(parameter: Tensor) -> Tensor:
    """A view of neighboring elements from the middle of the parameter, as it lies in memory."""
    if parameter.is_floating_point() and parameter.itemsize == 1:
        parameter = parameter.view(torch.uint8)  # torch does not put 8-bit floats beside others
    order = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
    lying = parameter.permute(order)
    if not lying.is_contiguous():
        return parameter[(0,) * parameter.ndim].view(1)
    start = max(0, lying.numel() - ELEMENTS) // 2
    return lying.view(-1)[start : start + ELEMENTS]


def _columns(glances: Sequence[Glance]) -> list[Tensor]:
    """For each device (glances, elements)."""
    return [torch.stack(parts) for parts in zip(*glances, strict=True)]


def _unlike(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """(glances,): whether elements differ by more than this, relative to the largest of them."""
    if not a.shape[1]:
        return torch.zeros(len(a), dtype=torch.bool)
    gap = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, (a - b).abs())
    return ~(gap.amax(1) <= tolerance * a.abs().amax(1))
