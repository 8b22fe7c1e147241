"""What the fused recurrent kernels hide: the key and the error of every time step.

The output of a call holds every hidden state of its last layer. Those of the layers below are
computed again, each layer by one call of a fused kernel. From there, layer by layer from the last
to the first, `gates.py` finds the errors at the gates.
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
    with _replaying(call):
        layers = _layers(call)
        given = any(grad is not None for grad in grads or ())
        errors = _errors(call, layers, Outside.of(call, grads)) if grads and given else None
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


def _layers(call: Recurrence) -> list[Layer]:
    x, layers = call.packed(call.input), list[Layer]()
    for at, weights in enumerate(call.layers):
        noise = None
        if layers and call.drops:
            noise = torch.dropout(torch.ones_like(x), call.dropout, True)
            x = x * noise
        places = range(at * len(weights), (at + 1) * len(weights))
        first = [tuple(state[place].to(call.dtype) for state in call.hx) for place in places]
        hidden = _hidden(call, x, weights, first, is_last=at == call.num_layers - 1)
        directions = []
        for which, left in enumerate(hidden.chunk(len(weights), -1)):
            steps = Steps(call.sizes, reverse=which == 1)
            before = steps.before(left, first[which][0])
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
