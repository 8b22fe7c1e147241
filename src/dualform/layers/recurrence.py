"""A recurrent call as torch makes it: `torch.lstm`, `gru`, `rnn_tanh`, `rnn_relu`, and cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dualform.private import version_of

State: TypeAlias = tuple[Tensor, ...]
"""`(h, c)` of an LSTM, `(h,)` of the others."""

MODES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
NETWORKS: dict[Any, str] = {getattr(torch, mode): mode for mode in MODES}
CELLS: dict[Any, str] = {getattr(torch, f"{mode}_cell"): mode for mode in MODES}

CELL = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
OPTIONS = ("hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
PADDED = ("input", *OPTIONS, "batch_first")
PACKED = ("data", "batch_sizes", *OPTIONS)


def is_recurrent(func: object) -> bool:
    """Whether a torch function is one that `Recurrence.of` understands.

    >>> is_recurrent(torch.lstm), is_recurrent(torch.gru_cell), is_recurrent(torch.relu)
    (True, True, False)
    """
    return func in NETWORKS or func in CELLS


class Weights(NamedTuple):
    """The linear maps of one direction of one layer."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None
    """The projection of the hidden state, where an LSTM has one."""

    @property
    def given(self) -> list[Tensor]:
        """Those that there are, in torch's order."""
        return [weight for weight in self if weight is not None]

    def detached(self) -> Weights:
        """The same numbers: using them is no use of the parameters that somebody may watch."""
        w_ih, w_hh, *rest = self
        others = (None if weight is None else weight.detach() for weight in rest)
        return Weights(w_ih.detach(), w_hh.detach(), *others)


class Output(NamedTuple):
    """What a call returned, as long as nobody changes it in place."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class Recurrence:
    """A recurrent call, whatever its signature. A cell is a network of one layer and one step.

    Rows of all time steps stand one below the other, as in packed sequences: a padded batch is one
    whose sequences end together.

    >>> net = torch.nn.GRU(3, 4, bias=False)
    >>> x, h0 = torch.zeros(5, 2, 3), torch.zeros(1, 2, 4)
    >>> args = (x, h0, list(net.parameters()), False, 1, 0.0, True, False, False)
    >>> call = Recurrence.of(torch.gru, args)
    >>> call.mode, call.sizes
    ('gru', [2, 2, 2, 2, 2])
    """

    mode: str
    input: Tensor
    hx: State
    weights: tuple[Tensor, ...]
    has_biases: bool
    num_layers: int = 1
    dropout: float = 0.0
    train: bool = False
    bidirectional: bool = False
    batch_first: bool = False
    batch_sizes: Tensor | None = None
    cell: bool = False
    rng: Tensor | None = None
    """The random state before the call, where torch draws a dropout between the layers."""
    output: Output | None = None

    @classmethod
    def of(
        cls, func: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Recurrence:
        """Reads the arguments, just before torch's function is called with them."""
        if not is_recurrent(func):
            raise ValueError(f"{func} is no recurrent function; ask is_recurrent first.")
        read = _cell_call if func in CELLS else _network_call
        return read(func, args, kwargs or {})

    def returned(self, output: Tensor) -> Recurrence:
        """The call with the hidden states of its last layer, which need not be computed again."""
        return replace(self, output=Output(output.detach(), version_of(output)))

    @cached_property
    def sizes(self) -> list[int]:
        """How many samples are read at each time step."""
        if self.batch_sizes is not None:
            return self.batch_sizes.tolist()
        batch, time = self.input.shape[:2] if self.batch_first else self.input.shape[1::-1]
        return [batch] * time

    @property
    def drops(self) -> bool:
        """Whether dropout acts between the layers."""
        return self.dropout > 0 and self.train and self.num_layers > 1

    @property
    def replayable(self) -> bool:
        """Whether its dropout can be drawn again: cuDNN draws from a state that torch hides."""
        return self.rng is not None or not self.drops

    @property
    def dtype(self) -> torch.dtype:
        """In which numbers it computes."""
        return self.weights[0].dtype

    @property
    def layers(self) -> list[list[Weights]]:
        """The weights by layer and direction."""
        directions = 2 if self.bidirectional else 1
        each = len(self.weights) // (self.num_layers * directions)
        groups = [self.weights[at : at + each] for at in range(0, len(self.weights), each)]
        named = [_named(group, self.has_biases) for group in groups]
        return [named[at : at + directions] for at in range(0, len(named), directions)]

    @property
    def last_hidden(self) -> Tensor | None:
        """Every hidden state of the last layer, if it is still what the call returned."""
        if self.output is None or version_of(self.output.tensor) != self.output.version:
            return None
        return self.packed(self.output.tensor)

    def packed(self, given: Tensor) -> Tensor:
        """An input, an output, or the gradient of one, with the rows of all steps in one column."""
        given = given.to(self.dtype)
        if self.batch_sizes is not None:
            return given
        return (given.transpose(0, 1) if self.batch_first else given).flatten(0, 1)


def _cell_call(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recurrence:
    given = dict(zip(CELL, args, strict=False)) | dict(kwargs)
    weights = tuple(given[name] for name in CELL[2:] if given.get(name) is not None)
    return Recurrence(
        CELLS[func],
        given["input"].detach()[None],
        tuple(state[None] for state in _states(given["hx"])),
        weights,
        has_biases=len(weights) == 4,
        cell=True,
    )


def _network_call(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recurrence:
    given = dict(zip(_names(args, kwargs), args, strict=False)) | dict(kwargs)
    x = given.pop("data") if "data" in given else given.pop("input")
    hx, weights = _states(given.pop("hx")), tuple(given.pop("params"))
    call = Recurrence(NETWORKS[func], x.detach(), hx, weights, **given)
    drawn_by_torch = call.drops and not (x.is_cuda and torch.backends.cudnn.enabled)
    return replace(call, rng=_random_state(x.device)) if drawn_by_torch else call


def _names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Both signatures take nine arguments, but only batch sizes are whole numbers."""
    second = kwargs.get("batch_sizes") if len(args) < 2 else args[1]
    whole = isinstance(second, Tensor) and not second.is_floating_point()
    return PACKED if whole else PADDED


def _states(hx: Tensor | Sequence[Tensor]) -> State:
    return (hx.detach(),) if isinstance(hx, Tensor) else tuple(state.detach() for state in hx)


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = getattr(torch, device.type).get_rng_state(device)
    return state


def _named(group: Sequence[Tensor], has_biases: bool) -> Weights:
    w_ih, w_hh, *rest = group
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    projection = rest[2:] if has_biases else rest
    return Weights(w_ih, w_hh, b_ih, b_hh, projection[0] if projection else None)
