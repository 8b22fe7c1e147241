"""Where a view of a parameter lies in it: by index, whatever the order of its elements in memory.

A parameter in `channels_last` has other strides than a contiguous one, and is the same matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

Block = tuple[str, tuple[int, int]]
"""A way to see a parameter as a matrix, and where a block of that matrix begins."""


class Extent(NamedTuple):
    """The part of a parameter that a view of it covers."""

    shape: tuple[int, ...]
    """The parameter's."""
    start: tuple[int, ...]
    """The index of the first element, by dimension of the parameter."""
    size: tuple[int, ...]
    """How many indices are covered from there, by dimension of the parameter."""
    runs: tuple[tuple[int, ...], ...]
    """By dimension of the view, the parameter's dimensions that it goes along, slowest first."""

    def block(self, outputs: Sequence[int], inputs: Sequence[int]) -> Block | None:
        """The view as a block of a matrix whose rows its dimensions `outputs` count.

        Dimensions of the parameter at which the view stands still count rows too. None where the
        elements are no block of such a matrix.
        """
        across = [dim for at in inputs for dim in self.runs[at]]
        down = [dim for at in outputs for dim in self.runs[at]]
        still = [d for d, n in enumerate(self.shape) if n > 1 and d not in (*across, *down)]
        down = still + down
        top, left = self._begin(down), self._begin(across)
        if top is None or left is None:
            return None
        return self._view(down, across), (top, left)

    def flat(self) -> Block | None:
        """The view as a stretch of the flattened parameter; None where it is none."""
        covered = [dim for run in self.runs for dim in run]
        dims = [dim for dim, n in enumerate(self.shape) if n > 1]
        start = self._begin(dims) if covered == sorted(covered) else None
        return None if start is None else ("flat", (start, 0))

    def _begin(self, dims: Sequence[int]) -> int | None:
        """The place of the first element where these dimensions are made one; None if torn."""
        first = next((at for at, dim in enumerate(dims) if self.size[dim] > 1), len(dims))
        if any(self.size[dim] != self.shape[dim] for dim in dims[first + 1 :]):
            return None
        begin = 0
        for dim in dims:
            begin = begin * self.shape[dim] + self.start[dim]
        return begin

    def _view(self, down: list[int], across: list[int]) -> str:
        """The name of a view; dimensions of size 1 may stand anywhere."""
        count = len(self.shape)
        usual = {"rows": ([0], list(range(1, count)))}
        if count > 1:
            usual["swapped"] = ([1], [0, *range(2, count)])
        for name, sides in usual.items():
            if [[dim for dim in side if self.shape[dim] > 1] for side in sides] == [down, across]:
                return name
        single = [dim for dim in range(count) if self.shape[dim] == 1]
        return "".join(map(str, down)) + "|" + "".join(map(str, [*across, *single]))


def extent(parameter: Tensor, view: Tensor) -> Extent | None:
    """The part of a parameter that a view covers; None where it leaves some out in between.

    >>> import torch
    >>> experts = torch.zeros(4, 6, 5)
    >>> extent(experts, experts[2]).block(outputs=[0], inputs=[1])
    ('01|2', (12, 0))
    >>> extent(experts, experts[2]).block(outputs=[1], inputs=[0])
    ('02|1', (10, 0))
    >>> extent(experts, experts[:, ::2]) is None
    True
    """
    shape, strides = tuple(parameter.shape), parameter.stride()
    wide = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
    if any(strides[d] != math.prod(shape[e] for e in wide[at:]) for at, d in enumerate(wide, 1)):
        return None  # its elements do not fill its memory
    rest = int(view.storage_offset()) - int(parameter.storage_offset())
    start, size = [0] * len(shape), [1] * len(shape)
    for dim in wide:
        start[dim], rest = divmod(rest, strides[dim])
    runs = []
    for count, stride in zip(view.shape, view.stride(), strict=True):
        run: list[int] = []
        while count > 1:
            at = next((d for d in wide if strides[d] == stride), None)
            if at is None or size[at] > 1 or (run and _wide_before(run[0], shape) != at):
                return None
            dim = at
            run.insert(0, dim)
            size[dim] = min(count, shape[dim])
            if start[dim] + count <= shape[dim]:
                break
            if start[dim] or count % shape[dim]:
                return None
            count, stride = count // shape[dim], stride * shape[dim]
        runs.append(tuple(run))
    return Extent(shape, tuple(start), tuple(size), tuple(runs))


def _wide_before(dim: int, shape: Sequence[int]) -> int | None:
    """The dimension before this one that has more than one index."""
    return next((d for d in range(dim - 1, -1, -1) if shape[d] > 1), None)
