"""What the fused recurrent kernels hide: the key and the error of every time step.

The output of a call holds every hidden state of its last layer. Those of the layers below are
computed again, each layer by one call of a fused kernel. From there, layer by layer from the last
to the first, `gates.py` finds the errors at the gates. Where cuDNN made the call, it has left both
(`reserve.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from dualform.layers.gates import GateErrors, Gates, StateErrors, Steps, gates_of
from dualform.layers.recurrence import Recurrence, State, Weights
from dualform.layers.reserve import Reserve

FUSED = ("cuda", "xpu")
"""Devices on which an LSTM cell is one kernel; elsewhere autograd sees into it."""
LAYERS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": partial(nn.RNN, nonlinearity="relu"),
}


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


ALIKE = 1e-2
"""By how much of its length the errors at a gate may differ, to be those that were computed: where
products have 10 bits, they are the same in the first three digits."""
_as_left: dict[object, bool] = {}
"""For each kind and size of call, whether what cuDNN leaves is what is looked for there."""


def rows_of(
    call: Recurrence,
    grads: Sequence[Tensor | None] | None = None,
    reserve: Reserve | None = None,
) -> list[WeightRows]:
    """Keys and values of every weight, from the gradients that autograd finds for the outputs.

    What cuDNN has left in its `reserve` is taken from there. The first time that a call of its kind
    and size is met, it is compared with what is computed.

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
    with _replaying(call):
        found = None if reserve is None else _left(call, reserve)
        if found and _as_left.get(_kind(call)):
            return found
        computed = _computed(call, grads)
        if found and _kind(call) not in _as_left:
            lengths = [rows.values.norm() for rows in computed if rows.values is not None]
            if all(length.isfinite() for length in lengths):  # a loss scale may be too large
                _as_left[_kind(call)] = all(map(_are_alike, found, computed))
        return computed


def _kind(call: Recurrence) -> object:
    """What the arrangement of a reserve may depend on."""
    shapes = (call.input.shape, *(state.shape for state in call.hx))
    options = (call.mode, call.num_layers, call.bidirectional, call.has_biases, call.batch_first)
    types = (call.dtype, call.input.dtype, call.input.device, torch.backends.cudnn.allow_tf32)
    return shapes, options, types


def _computed(call: Recurrence, grads: Sequence[Tensor | None] | None) -> list[WeightRows]:
    layers = _layers(call)
    given = any(grad is not None for grad in grads or ())
    errors = _errors(call, layers, Outside.of(call, grads)) if grads and given else None
    return _all_rows(call, layers, errors)


def _left(call: Recurrence, reserve: Reserve) -> list[WeightRows] | None:
    """The rows that cuDNN has left, if it has."""
    left = reserve.left(call)
    return None if left is None else _all_rows(call, _layers(call, left[0]), left[1])


def _are_alike(one: WeightRows, other: WeightRows) -> bool:
    """Whether rows are the same, as far as the kernels of a device agree."""
    pairs = ((one.keys, other.keys), (one.values, other.values))
    return all(
        a is not None and b is not None and bool((a - b).norm() <= ALIKE * b.norm())
        for a, b in pairs
    )


def _all_rows(
    call: Recurrence, layers: Sequence[Layer], errors: Sequence[Sequence[GateErrors]] | None
) -> list[WeightRows]:
    return [
        rows
        for at, layer in enumerate(layers)
        for which, direction in enumerate(layer.directions)
        for rows in _rows(call.sizes, direction, errors[at][which] if errors else None)
    ]


@contextmanager
def _replaying(call: Recurrence) -> Iterator[None]:
    """Random draws are those of the call, and leave no trace; backward may run under autocast."""
    device = call.input.device
    others = [] if device.type == "cpu" else [device]
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(others, enabled=call.rng is not None, device_type=device.type),
    ):
        if call.rng is not None:
            module = getattr(torch, device.type) if others else torch
            module.set_rng_state(call.rng, *others)
        yield


# Hidden states, from the first layer to the last


@dataclass(frozen=True)
class Direction:
    """One direction of one layer: what it read at every step."""

    mode: str
    weights: Weights
    steps: Steps
    place: int
    """Among the hidden states of the call."""
    first: State
    """Its state before the first step."""
    x: Tensor
    before: Tensor
    """The hidden states that its steps found."""

    @cached_property
    def gates(self) -> Gates:
        """What the steps did, all at once."""
        w_ih, w_hh, b_ih, b_hh, _ = self.weights.detached()
        x, h = linear(self.x, w_ih, b_ih), linear(self.before, w_hh, b_hh)
        return gates_of(self.mode, x, h, self.before, self.first, self.steps)


class Layer(NamedTuple):
    """One layer, and what a dropout multiplied its input by."""

    directions: list[Direction]
    dropout: Tensor | None


def _layers(call: Recurrence, left: Sequence[Tensor] = ()) -> list[Layer]:
    """What every layer read; `left` are the hidden states of the first ones, where known."""
    x, layers = call.packed(call.input), list[Layer]()
    for at, weights in enumerate(call.layers):
        noise = None
        if layers and call.drops:
            noise = torch.dropout(torch.ones_like(x), call.dropout, True)
            x = x * noise
        places = range(at * len(weights), (at + 1) * len(weights))
        first = [tuple(state[place].to(call.dtype) for state in call.hx) for place in places]
        if at < len(left):
            hidden = left[at]
        else:
            hidden = _hidden(call, x, weights, first, is_last=at == call.num_layers - 1)
        directions = []
        for which, states in enumerate(hidden.chunk(len(weights), -1)):
            steps = Steps(call.sizes, reverse=which == 1)
            before = steps.before(states, first[which][0])
            directions.append(
                Direction(call.mode, weights[which], steps, places[which], first[which], x, before)
            )
        layers.append(Layer(directions, noise))
        x = hidden
    return layers


def _hidden(
    call: Recurrence,
    x: Tensor,
    weights: Sequence[Weights],
    first: Sequence[State],
    is_last: bool,
) -> Tensor:
    """The hidden states that the steps of a layer leave, both directions side by side."""
    if is_last and len(call.sizes) == 1:
        return torch.cat([state[0] for state in first], -1)  # what it leaves, no step finds
    known = call.last_hidden if is_last else None
    return _run_layer(call, x, weights, first) if known is None else known


def _run_layer(
    call: Recurrence, x: Tensor, weights: Sequence[Weights], first: Sequence[State]
) -> Tensor:
    """A layer of the same kind and with the same weights is run once, by a fused kernel."""
    own = weights[0]
    layer = LAYERS[call.mode](
        x.shape[-1],
        first[0][-1].shape[-1],
        bias=call.has_biases,
        bidirectional=call.bidirectional,
        device="meta",  # so that no random numbers are drawn for weights
        dtype=call.dtype,
        **({} if own.w_hr is None else {"proj_size": len(own.w_hr)}),
    ).to_empty(device=x.device)
    given = [weight for direction in weights for weight in direction.given]
    for parameter, weight in zip(layer.parameters(), given, strict=True):
        parameter.copy_(weight.detach())
    states = tuple(torch.stack(parts) for parts in zip(*first, strict=True))
    hx = states if call.mode == "lstm" else states[0]
    if call.batch_sizes is not None:
        packed: PackedSequence = layer.forward(PackedSequence(x, call.batch_sizes), hx)[0]
        return packed.data
    output: Tensor = layer.forward(x.view(len(call.sizes), -1, x.shape[-1]), hx)[0]
    return output.flatten(0, 1)


# Errors, from the last layer to the first


class Outside(NamedTuple):
    """Gradients from outside of the call: of its output, and of the final states."""

    output: Tensor | None
    final: list[Tensor | None]
    """Of h, and of an LSTM's c."""

    @classmethod
    def of(cls, call: Recurrence, grads: Sequence[Tensor | None]) -> Outside:
        """From the gradients of what torch's function returned."""
        # Seen from its node, a fused kernel has workspaces behind its outputs.
        given = [None if g is None else g.to(call.dtype) for g in grads[: 1 + len(call.hx)]]
        if call.cell:
            return cls(None, [None if g is None else g[None] for g in given])
        output, *final = given
        return cls(None if output is None else call.packed(output), final)


def _errors(call: Recurrence, layers: Sequence[Layer], outside: Outside) -> list[list[GateErrors]]:
    """The errors at all gates, by layer and direction."""
    found: list[list[GateErrors]] = []
    output = outside.output
    for at in reversed(range(len(layers))):
        if found:
            output = _at_input(layers[at + 1], found[-1])
        parts = layers[at].directions
        outputs = [None] * len(parts) if output is None else output.chunk(len(parts), -1)
        states = [_at_states(*pair, outside) for pair in zip(parts, outputs, strict=True)]
        if call.cell and outside.final[-1] is not None and call.input.device.type not in FUSED:
            # An unfused LSTM cell makes h out of the very c it returns: autograd adds h's share.
            states = [parts[0].gates.without_h(states[0])]
        pairs = zip(parts, states, strict=True)
        found.append([part.gates.back(errors, part.weights.detached()) for part, errors in pairs])
    return found[::-1]


def _at_input(layer: Layer, errors: Sequence[GateErrors]) -> Tensor:
    """The errors at what a layer read: at the output of the one below."""
    pairs = zip(layer.directions, errors, strict=True)
    shares = [error.at_input @ part.weights.w_ih.detach() for part, error in pairs]
    total = shares[0] if len(shares) == 1 else shares[0] + shares[1]
    return total if layer.dropout is None else total * layer.dropout


def _at_states(part: Direction, output: Tensor | None, outside: Outside) -> StateErrors:
    """What comes from above and from outside, in tensors of its own."""
    found = [state.new_zeros(len(part.x), state.shape[-1]) for state in part.first]
    if output is not None:
        found[0].copy_(output)
    for errors, final in zip(found, outside.final, strict=False):
        if final is not None:
            part.steps.add_final(errors, final[part.place])
    return StateErrors(found[0], found[-1])


# Taking the rows


def _rows(sizes: list[int], part: Direction, errors: GateErrors | None) -> Iterator[WeightRows]:
    w_ih, w_hh, b_ih, b_hh, w_hr = part.weights
    at_input, at_hidden, at_output = (None, None, None) if errors is None else errors
    uses = [(w_ih, b_ih, part.x, at_input), (w_hh, b_hh, part.before, at_hidden)]
    if w_hr is not None and (raw := part.gates.raw) is not None:
        uses.append((w_hr, None, raw, at_output))
    for weight, bias, keys, values in uses:
        padded = None if values is None else _padded(sizes, values)
        yield WeightRows(weight, bias, _padded(sizes, keys), padded)


def _padded(sizes: list[int], rows: Tensor) -> Tensor:
    """`(batch, time, width)` from the packed layout."""
    if sizes[0] == sizes[-1]:
        return rows.view(len(sizes), -1, rows.shape[-1]).transpose(0, 1)
    packed = PackedSequence(rows, torch.tensor(sizes, device="cpu"))
    return pad_packed_sequence(packed, batch_first=True)[0]
