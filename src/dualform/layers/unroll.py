"""What the fused recurrent kernels hide: the key and the error of every time step.

A call of `torch.lstm`, `gru`, `rnn_tanh`, `rnn_relu` or of one of their cells is computed again
step by step, on detached tensors and in the layout of packed sequences: the rows of all time
steps one below the other, so that a padded batch is one whose sequences end together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

State: TypeAlias = tuple[Tensor, ...]
"""`(h, c)` of an LSTM, `(h,)` of the others."""

Cell: TypeAlias = Callable[[Tensor, Tensor, State], State]
"""The state after a step, from what the input and the hidden state give its gates."""

MODES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
NETWORKS: dict[Any, str] = {getattr(torch, mode): mode for mode in MODES}
CELLS: dict[Any, str] = {getattr(torch, f"{mode}_cell"): mode for mode in MODES}
FUSED = ("cuda", "xpu")
"""Devices on which an LSTM cell is one kernel; elsewhere autograd sees into it."""

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


@dataclass(frozen=True)
class Recurrence:
    """A recurrent call, whatever its signature. A cell is a network of one layer and one step.

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

    @classmethod
    def of(
        cls, func: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Recurrence:
        """Reads the arguments, just before torch's function is called with them."""
        if not is_recurrent(func):
            raise ValueError(f"{func} is no recurrent function; ask is_recurrent first.")
        read = _cell_call if func in CELLS else _network_call
        return read(func, args, kwargs or {})

    @property
    def sizes(self) -> list[int]:
        """How many samples are read at each time step."""
        if self.batch_sizes is not None:
            return [int(size) for size in self.batch_sizes]
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


@dataclass(frozen=True)
class WeightRows:
    """The rows of one weight: its gradient is Σ value ⊗ key, and its bias's is Σ value.

    >>> cell = torch.nn.RNNCell(3, 4)
    >>> args = (torch.ones(2, 3), torch.zeros(2, 4), *cell.parameters())
    >>> rows = rows_of(Recurrence.of(torch.rnn_tanh_cell, args))[0]
    >>> rows.weight is cell.weight_ih, rows.bias is cell.bias_ih, rows.keys.shape
    (True, True, torch.Size([2, 1, 3]))
    """

    weight: Tensor
    bias: Tensor | None
    keys: Tensor
    """`(batch, time, in)`, zeros where a sequence has ended."""
    values: Tensor | None
    """`(batch, time, out)`: the error at the output of the linear map; None without gradients."""


def rows_of(call: Recurrence, grads: Sequence[Tensor | None] | None = None) -> list[WeightRows]:
    """Keys and values of every weight, from the gradients that autograd finds for the outputs.

    Samples come in the order of the call, which for packed sequences is the sorted one, and a row
    lies at the time step at which its input was read, also in the reverse direction.

    >>> cell = torch.nn.GRUCell(3, 4)
    >>> x, h = torch.randn(2, 3), torch.randn(2, 4)
    >>> cell(x, h).sum().backward()
    >>> call = Recurrence.of(torch.gru_cell, (x, h, *cell.parameters()))
    >>> for rows in rows_of(call, [torch.ones(2, 4)]):
    ...     gradient = torch.einsum("bto,bti->oi", rows.values, rows.keys)
    ...     assert torch.allclose(gradient, rows.weight.grad, atol=1e-6)
    """
    if not call.replayable:
        raise ValueError(
            f"cuDNN drew the dropout of {call.dropout} between the {call.num_layers} layers of a "
            f"{call.mode} from a state that cannot be restored; make the call under "
            "torch.backends.cudnn.flags(enabled=False), or set dropout=0."
        )
    wanted = grads is not None and any(grad is not None for grad in grads)
    with _replaying(call, wanted):
        uses, outputs = _unroll(call)
        errors = _errors(call, uses, outputs, grads) if grads and wanted else [None] * len(uses)
    return [_rows(call.sizes, use, error) for use, error in zip(uses, errors, strict=True)]


# Reading a call


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


# Computing it again


class Weights(NamedTuple):
    """The linear maps of one direction of one layer."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None


class GateUse(NamedTuple):
    """A linear map at work: what it read, and the pieces it made, whose gradients are errors."""

    weight: Tensor
    bias: Tensor | None
    keys: Tensor
    made: list[Tensor]


class UnrolledRun(NamedTuple):
    """One direction of one layer: how it used its weights, and what came of it."""

    uses: list[GateUse]
    output: Tensor
    final: State


class TimeStep(NamedTuple):
    """One time step: the hidden state it read, what that gave its gates, and what came of it."""

    before: Tensor
    gates: Tensor
    raw: Tensor
    """The new hidden state before its projection, if it has one."""
    state: State


@contextmanager
def _replaying(call: Recurrence, grad: bool) -> Iterator[None]:
    """Random draws are those of the call, and leave no trace; backward may run under autocast."""
    device = call.input.device
    others = [] if device.type == "cpu" else [device]
    with (
        torch.set_grad_enabled(grad),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(others, enabled=call.rng is not None, device_type=device.type),
    ):
        if call.rng is not None:
            module = getattr(torch, device.type) if others else torch
            module.set_rng_state(call.rng, *others)
        yield


def _unroll(call: Recurrence) -> tuple[list[GateUse], tuple[Tensor, ...]]:
    """All uses of the weights, and the outputs in the shapes that the call gave them."""
    x, runs = _packed_input(call), list[UnrolledRun]()
    for directions in _layers(call):
        if runs and call.drops:
            x = torch.dropout(x, call.dropout, True)
        layer = [_run(call, at, x, weights) for at, weights in enumerate(directions, len(runs))]
        x = torch.cat([run.output for run in layer], -1)
        runs += layer
    return [use for run in runs for use in run.uses], _as_called(call, x, runs)


def _packed_input(call: Recurrence) -> Tensor:
    x = call.input.to(call.weights[0].dtype)
    if call.batch_sizes is not None:
        return x
    return (x.transpose(0, 1) if call.batch_first else x).flatten(0, 1)


def _layers(call: Recurrence) -> list[list[Weights]]:
    """The flat weights by layer and direction."""
    directions = 2 if call.bidirectional else 1
    each = len(call.weights) // (call.num_layers * directions)
    groups = [call.weights[at : at + each] for at in range(0, len(call.weights), each)]
    named = [_named(group, call.has_biases) for group in groups]
    return [named[at : at + directions] for at in range(0, len(named), directions)]


def _named(group: Sequence[Tensor], has_biases: bool) -> Weights:
    w_ih, w_hh, *rest = group
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    projection = rest[2:] if has_biases else rest
    return Weights(w_ih, w_hh, b_ih, b_hh, projection[0] if projection else None)


def _run(call: Recurrence, at: int, x: Tensor, weights: Weights) -> UnrolledRun:
    """The direction at this place among the call's hidden states."""
    gates = _apply(x, weights.w_ih, weights.b_ih)
    order = slice(None, None, -1 if call.bidirectional and at % 2 else 1)
    parts = gates.split_with_sizes(call.sizes)[order]
    steps, final = _scan(call.mode, weights, parts, tuple(h[at].to(x.dtype) for h in call.hx))
    steps = steps[order]
    output = [step.state[0] for step in steps]
    # A sum passes one error to both its summands; only a GRU's gates are no plain sum.
    made = [step.gates for step in steps] if call.mode == "gru" else [gates]
    uses = [
        GateUse(weights.w_ih, weights.b_ih, x, [gates]),
        GateUse(weights.w_hh, weights.b_hh, torch.cat([step.before for step in steps]), made),
    ]
    if weights.w_hr is not None:
        uses.append(GateUse(weights.w_hr, None, torch.cat([step.raw for step in steps]), output))
    return UnrolledRun(uses, torch.cat(output), final)


def _scan(
    mode: str, weights: Weights, parts: Sequence[Tensor], state: State
) -> tuple[list[TimeStep], State]:
    """The steps in the order of the parts, which are what the input gives their gates."""
    steps = []
    for part in parts:
        steps.append(_step(mode, weights, part, tuple(s[: len(part)] for s in state)))
        state = tuple(_over(new, s) for new, s in zip(steps[-1].state, state, strict=True))
    return steps, state


def _step(mode: str, weights: Weights, part: Tensor, state: State) -> TimeStep:
    gates = _apply(state[0], weights.w_hh, weights.b_hh)
    raw, *rest = ADVANCE[mode](part, gates, state)
    after = raw if weights.w_hr is None else _apply(raw, weights.w_hr, None)
    return TimeStep(state[0], gates, raw, (after, *rest))


def _over(new: Tensor, old: Tensor) -> Tensor:
    """The samples beyond the new ones have ended, or in reverse not begun: their state stays."""
    return new if len(new) == len(old) else torch.cat([new, old[len(new) :]])


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`W x + b` with a gradient of its own, though no weight has one here."""
    y = linear(x, weight.detach(), None if bias is None else bias.detach())
    return y.requires_grad_() if torch.is_grad_enabled() else y


def _as_called(call: Recurrence, output: Tensor, runs: Sequence[UnrolledRun]) -> tuple[Tensor, ...]:
    if call.cell:
        return runs[0].final
    if call.batch_sizes is None:
        output = output.view(len(call.sizes), -1, output.shape[-1])
        output = output.transpose(0, 1) if call.batch_first else output
    return output, *(torch.stack(states) for states in zip(*(r.final for r in runs), strict=True))


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), h.chunk(3, -1)
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return (n + (x_z + h_z).sigmoid() * (state[0] - n),)


def _rnn_tanh(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).tanh(),)


def _rnn_relu(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).relu(),)


ADVANCE: dict[str, Cell] = dict(zip(MODES, (_lstm, _gru, _rnn_tanh, _rnn_relu), strict=True))


# Taking the rows


def _errors(
    call: Recurrence,
    uses: Sequence[GateUse],
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> list[Tensor]:
    """The gradients of what each map made, in the packed layout."""
    # Not strict: seen from its node, a fused kernel has workspaces behind its outputs.
    pairs = [(y, g.to(y.dtype)) for y, g in zip(outputs, grads, strict=False) if g is not None]
    ends, starts = zip(*pairs, strict=True)
    if call.cell and len(ends) == 2 and call.input.device.type not in FUSED:
        starts = _own(ends, starts)
    made = [piece for use in uses for piece in use.made]
    found = iter(torch.autograd.grad(ends, made, starts, materialize_grads=True))
    return [torch.cat(list(islice(found, len(use.made)))) for use in uses]


def _own(state: State, grads: State) -> State:
    """An unfused LSTM cell makes h out of the very c it returns: c's gradient holds h's share."""
    (share,) = torch.autograd.grad(state[0], state[1], grads[0], retain_graph=True)
    return grads[0], grads[1] - share


def _rows(sizes: list[int], use: GateUse, error: Tensor | None) -> WeightRows:
    values = None if error is None else _padded(sizes, error)
    return WeightRows(use.weight, use.bias, _padded(sizes, use.keys.detach()), values)


def _padded(sizes: list[int], rows: Tensor) -> Tensor:
    """`(batch, time, width)` from the packed layout."""
    return pad_packed_sequence(
        PackedSequence(rows, torch.tensor(sizes, device="cpu")), batch_first=True
    )[0]
