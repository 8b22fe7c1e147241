"""Excerpts: a few elements of every parameter, taken around each step.

Steps are what the optimizer does. Loops also clip weights, prune them, average them into others or
load them from a file, and another optimizer may step beside the recorded one. If something changes
a parameter between two steps, the excerpt before the second step is not the one after the first.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.recording.shards import is_sharded, local

ELEMENTS = 32
"""So many elements of a parameter are looked at: neighbors, which costs least."""

ROUNDINGS = 4.0
"""So many roundings of its largest element may be left of what was added and taken off again."""


class ExcerptPlace(NamedTuple):
    """Where an excerpt has the elements of one parameter."""

    device: int
    part: slice
    eps: float
    """The relative rounding of the parameter."""


class Excerpt(NamedTuple):
    """Some elements of all parameters. It belongs to nobody and is never changed."""

    elements: tuple[Tensor, ...] = ()
    """For each device, end to end."""
    places: Mapping[str, ExcerptPlace] = {}
    """Of each parameter."""


NO_EXCERPT = Excerpt()


class Excerpts:
    """Takes excerpts of some parameters.

    >>> w = torch.zeros(100)
    >>> excerpts = Excerpts({"w": w})
    >>> before = excerpts.take()
    >>> w += 1
    >>> differing([before], [excerpts.take()])
    {'w': 0}
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._sharded = any(map(is_sharded, parameters.values()))
        self._pointers: list[int] = []
        self._views: dict[torch.device, list[Tensor]] = {}
        self._places: dict[str, ExcerptPlace] = {}
        """Excerpts hold it, so it is never changed, but made anew."""

    def take(self) -> Excerpt:
        """The elements as they are now."""
        held = self._parameters
        if self._sharded:
            held = {name: local(parameter) for name, parameter in held.items()}
        pointers = [parameter.data_ptr() for parameter in held.values()]
        if pointers != self._pointers:  # the first time, or after `parameter.data = …`
            self._pointers = pointers
            self._look(held)
        return Excerpt(tuple([torch.cat(views) for views in self._views.values()]), self._places)

    def _look(self, held: Mapping[str, Tensor]) -> None:
        self._views = {parameter.device: [] for parameter in held.values()}
        ends, devices, places = dict.fromkeys(self._views, 0), list(self._views), {}
        for name, parameter in held.items():
            device, view = parameter.device, _some(parameter.detach())
            end = ends[device] + view.numel()
            eps = torch.finfo(parameter.dtype).eps if parameter.is_floating_point() else 0.0
            places[name] = ExcerptPlace(devices.index(device), slice(ends[device], end), eps)
            self._views[device].append(view)
            ends[device] = end
        self._places = places


def differing(
    earlier: Sequence[Excerpt], later: Sequence[Excerpt], roughly: Container[str] = ()
) -> dict[str, int]:
    """The parameters of which two excerpts differ, and the number of the first such pair.

    Rounding does not count for those that are compared `roughly`: a loop may have added
    something and taken it off again.
    """
    columns = list(zip(_columns(earlier), _columns(later), strict=True))
    if all(torch.equal(a, b) for a, b in columns):
        return {}
    found = {}
    for name, place in later[-1].places.items():
        a, b = (side[:, place.part].cpu() for side in columns[place.device])
        unlike = _unlike(a, b, ROUNDINGS * (place.eps if name in roughly else 0.0))
        if unlike.any():
            found[name] = int(unlike.int().argmax())
    return found


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


def _columns(excerpts: Sequence[Excerpt]) -> list[Tensor]:
    """For each device (excerpts, elements)."""
    return [torch.stack(parts) for parts in zip(*[e.elements for e in excerpts], strict=True)]


def _unlike(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """(excerpts,): whether elements differ by more than this, relative to the largest of them."""
    if not a.shape[1]:
        return torch.zeros(len(a), dtype=torch.bool)
    gap = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, (a - b).abs())
    return ~(gap.amax(1) <= tolerance * a.abs().amax(1))
