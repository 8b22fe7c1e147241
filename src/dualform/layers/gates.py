"""What the gates of a recurrent layer do to errors, where all hidden states are known.

A step reads the hidden state before it. Where all of these are known, the gates of all steps are
found at once, and so is the derivative of every step. Only errors go from step to step: a small
product with `W_hh` and a few multiplications each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.layers.recurrence import State, Weights


class Steps(NamedTuple):
    """The time steps of one direction, by how many samples each of them reads.

    >>> steps = Steps([3, 2], reverse=True)
    >>> [part.tolist() for part in steps.parts(torch.arange(5))]
    [[3, 4], [0, 1, 2]]
    >>> steps.before(torch.arange(5), torch.tensor([7, 8, 9])).tolist()
    [3, 4, 9, 7, 8]
    """

    sizes: list[int]
    reverse: bool

    def parts(self, rows: Tensor) -> list[Tensor]:
        """The rows of each step, in the order in which steps are taken."""
        parts = list(rows.split_with_sizes(self.sizes))
        return parts[::-1] if self.reverse else parts

    def states(self, parts: Sequence[Tensor], first: Tensor) -> Iterator[Tensor]:
        """What each step finds; parts are what each of them leaves, by the time the next is asked.

        Samples beyond those of a step have ended, or in reverse not begun: their state stays.
        """
        for part in parts:
            yield _first(first, len(part))
            first = part if len(part) == len(first) else torch.cat([part, first[len(part) :]])

    def before(self, rows: Tensor, first: Tensor) -> Tensor:
        """The states that the steps find, of which `rows` are those that they leave."""
        if self.sizes[0] == self.sizes[-1]:
            each = self.sizes[0]
            return torch.cat([rows[each:], first] if self.reverse else [first, rows[:-each]])
        found = list(self.states(self.parts(rows), first))
        return torch.cat(found[::-1] if self.reverse else found)

    def add_final(self, errors: Tensor, final: Tensor) -> None:
        """Adds the errors of the final states to those of the steps that left them."""
        done = 0
        for part in reversed(self.parts(errors)):
            if len(part) > done:
                part[done:] += final[done : len(part)]
                done = len(part)


class StateErrors(NamedTuple):
    """Gradients at the states that steps leave, from outside of the layer: h, and an LSTM's c."""

    h: Tensor
    c: Tensor
    """The same as h where there is no c."""


class GateErrors(NamedTuple):
    """Gradients at what linear maps give: of the input, of the hidden state, of its projection."""

    at_input: Tensor
    at_hidden: Tensor
    at_output: Tensor


class Gates(ABC):
    """One direction of a layer: its gates at all steps, from what both linear maps gave them."""

    @property
    def raw(self) -> Tensor | None:
        """The hidden states before their projection, of layers that may have one."""
        return None

    def without_h(self, errors: StateErrors) -> StateErrors:
        """The errors, where those of c hold what comes by way of h: without that."""
        return errors

    @abstractmethod
    def back(self, errors: StateErrors, weights: Weights) -> GateErrors:
        """The errors at the gates; those at the states are added to in place."""


class LSTM(Gates):
    """`c ← f c + i g`, `h = o tanh c`."""

    def __init__(self, x: Tensor, h: Tensor, first: State, steps: Steps) -> None:
        self.steps = steps
        i, f, g, o = (x + h).chunk(4, -1)
        self.i, self.f, self.g, self.o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        self.c = self.i * self.g
        parts = steps.parts(self.c)
        states = steps.states(parts, first[1])
        for c, kept, before in zip(parts, steps.parts(self.f), states, strict=True):
            c.addcmul_(kept, before)
        self.c_before = steps.before(self.c, first[1])
        self.tanh_c = self.c.tanh()

    @property
    def raw(self) -> Tensor:
        """o tanh c."""
        return self.o * self.tanh_c

    @property
    def to_cell(self) -> Tensor:
        """∂h/∂c, before a projection."""
        return self.o * _square_from_one(self.tanh_c)

    def without_h(self, errors: StateErrors) -> StateErrors:
        """h is o tanh c."""
        at_c = torch.addcmul(errors.c, errors.h, self.to_cell, value=-1)
        return StateErrors(errors.h, at_c)

    def back(self, errors: StateErrors, weights: Weights) -> GateErrors:
        """Errors of c go back to i, f and g, those of h to o and c."""
        i, f, g, o = self.i, self.f, self.g, self.o
        slopes = torch.stack(
            [
                g * _sigmoid_slope(i),
                self.c_before * _sigmoid_slope(f),
                i * _square_from_one(g),
                self.tanh_c * _sigmoid_slope(o),
            ],
            1,
        )
        found = torch.empty_like(slopes)
        at_gates = found.flatten(1)
        # What each step takes and gives is looked up beforehand: a slice takes as long as a kernel.
        wide = errors.c[:, None], slopes[:, :3], found[:, :3]
        outer = slopes[:, 3], found[:, 3]
        rows = (errors.h, errors.c, self.to_cell, *wide, *outer, at_gates, f)
        later: tuple[Tensor, Tensor, Tensor] | None = None
        for at_h, at_c, to_cell, wide_c, slope_c, out_c, slope_h, out_h, out, keep in reversed(
            list(zip(*map(self.steps.parts, rows), strict=True))
        ):
            if later is not None:
                both = min(len(at_h), len(later[0]))
                gates, cell, kept = (_first(part, both) for part in later)
                _first(at_h, both).addmm_(gates, weights.w_hh)
                _first(at_c, both).addcmul_(cell, kept)
            at_raw = at_h if weights.w_hr is None else at_h @ weights.w_hr
            at_c.addcmul_(at_raw, to_cell)
            torch.mul(wide_c, slope_c, out=out_c)
            torch.mul(at_raw, slope_h, out=out_h)
            later = out, at_c, keep
        return GateErrors(at_gates, at_gates, errors.h)


class GRU(Gates):
    """`n = tanh(x_n + r h_n)`, `h ← (1 − z) n + z h`."""

    def __init__(self, x: Tensor, h: Tensor, before: Tensor, steps: Steps) -> None:
        self.steps, self.before = steps, before
        (x_r, x_z, x_n), (h_r, h_z, self.h_n) = x.chunk(3, -1), h.chunk(3, -1)
        self.r, self.z = (x_r + h_r).sigmoid_(), (x_z + h_z).sigmoid_()
        self.n = torch.addcmul(x_n, self.r, self.h_n).tanh_()

    def back(self, errors: StateErrors, weights: Weights) -> GateErrors:
        """Every gate's error is that of h, times what is known beforehand."""
        r, z, n = self.r, self.z, self.n
        to_new = (1 - z) * _square_from_one(n)
        slopes = torch.stack(
            [
                to_new * self.h_n * _sigmoid_slope(r),
                (self.before - n) * _sigmoid_slope(z),
                to_new * r,
            ],
            1,
        )
        at_hidden = _back(self.steps, errors.h, slopes, z, weights.w_hh)
        at_input = torch.cat([at_hidden[:, :2].flatten(1), errors.h * to_new], 1)
        return GateErrors(at_input, at_hidden.flatten(1), errors.h)


class RNN(Gates):
    """`h ← tanh(x + h)`, or `relu(x + h)`."""

    def __init__(self, x: Tensor, h: Tensor, relu: bool, steps: Steps) -> None:
        self.steps, self.relu = steps, relu
        self.h = (x + h).relu_() if relu else (x + h).tanh_()

    def back(self, errors: StateErrors, weights: Weights) -> GateErrors:
        """There is one gate."""
        slope = (self.h > 0).to(self.h.dtype) if self.relu else _square_from_one(self.h)
        found = _back(self.steps, errors.h, slope[:, None], None, weights.w_hh).flatten(1)
        return GateErrors(found, found, errors.h)


def gates_of(mode: str, x: Tensor, h: Tensor, before: Tensor, first: State, steps: Steps) -> Gates:
    """The gates, from what the input and the hidden states `before` every step give them."""
    if mode == "lstm":
        return LSTM(x, h, first, steps)
    return GRU(x, h, before, steps) if mode == "gru" else RNN(x, h, mode == "rnn_relu", steps)


def _back(steps: Steps, at_h: Tensor, slopes: Tensor, keep: Tensor | None, w_hh: Tensor) -> Tensor:
    """(rows, gates, width): the errors of h times slopes; h keeps a share of what it was."""
    found = torch.empty_like(slopes)
    parts = [steps.parts(rows) for rows in (at_h, at_h[:, None], slopes, found, found.flatten(1))]
    kept = [None] * len(steps.sizes) if keep is None else steps.parts(keep)
    later: tuple[Tensor, Tensor, Tensor | None] | None = None
    for at, wide, slope, out, flat, share in reversed(list(zip(*parts, kept, strict=True))):
        if later is not None:
            gates, error, of_error = later
            both = min(len(at), len(error))
            _first(at, both).addmm_(_first(gates, both), w_hh)
            if of_error is not None:
                _first(at, both).addcmul_(_first(error, both), _first(of_error, both))
        torch.mul(wide, slope, out=out)
        later = flat, at, share
    return found


def _first(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) == count else rows[:count]


def _sigmoid_slope(y: Tensor) -> Tensor:
    return torch.addcmul(y, y, y, value=-1)


def _square_from_one(y: Tensor) -> Tensor:
    """1 − y², the slope of tanh."""
    return torch.addcmul(torch.ones((), dtype=y.dtype, device=y.device), y, y, value=-1)
