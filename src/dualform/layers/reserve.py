"""What cuDNN leaves behind of a recurrent call: the errors at all gates, and the hidden states.

cuDNN keeps what the backward pass needs in one piece of memory, the reserve. Where a gate was, the
backward pass writes the error at that gate, and makes the gradients of all weights of these errors
afterwards. So they are there, and need not be computed again step by step. How cuDNN arranges its
reserve is not documented: `unroll.py` uses what is read here only where it has seen that it is the
same as what it computes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from dualform.layers.gates import GateErrors
from dualform.layers.recurrence import Recurrence
from dualform.private import at_backward_end, saved_reserve

BLOCKS = {"lstm": 4, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""How many vectors of a hidden state's width a time step leaves: a GRU's are those at the input of
its three gates, and those at the hidden state."""

Action: TypeAlias = Callable[[Sequence[Tensor | None]], None]


class Reserve:
    """What cuDNN left of a call, once its backward pass is over.

    Where there is none, because cuDNN did not make the call or the loop keeps its graph elsewhere,
    or not as its sizes would have it, `of` gives None.

    >>> net, x = torch.nn.LSTM(3, 4), torch.zeros(5, 2, 3)
    >>> Reserve.of(net(x)[0]) is None
    True
    """

    def __init__(self, node: Node, saved: Any, dtype: torch.dtype) -> None:
        self._node, self._saved, self._dtype = node, saved, dtype
        self._memory: Tensor | None = None

    @classmethod
    def of(cls, output: Tensor) -> Reserve | None:
        """That of the call that has just returned this output."""
        node = output.grad_fn
        saved = saved_reserve(node)
        if node is None or saved is None or getattr(saved, "unpack_hook", True) is not None:
            return None
        return cls(node, saved, output.dtype)

    def await_errors(self, action: Action) -> RemovableHandle:
        """Calls the action with the gradients of the call's outputs when all is over.

        Only then it is known whether the graph was kept for another backward pass: then cuDNN was
        given a copy of the reserve, and what it left is nowhere.
        """

        def ran(_: Any, errors: Sequence[Tensor | None]) -> None:
            memory = self._saved.data

            def end() -> None:
                self._memory = memory if self._saved.data is None else None
                action(errors)
                self._memory = None

            at_backward_end(end)

        return self._node.register_hook(ran)

    def left(self, call: Recurrence) -> tuple[list[Tensor], list[list[GateErrors]]] | None:
        """The hidden states of all layers but the last, and the errors by layer and direction."""
        memory = self._memory
        if memory is None or call.sizes[0] != call.sizes[-1]:
            return None
        if any(weights.w_hr is not None for layer in call.layers for weights in layer):
            return None
        directions, rows = (2 if call.bidirectional else 1), sum(call.sizes)
        width = call.layers[0][0].w_hh.shape[1]
        below = (call.num_layers - 1) * directions * rows * width
        cells = call.num_layers * directions * rows * width if call.mode == "lstm" else 0
        each = BLOCKS[call.mode] * rows * width
        size = below + cells + call.num_layers * directions * each
        if memory.nbytes < size * self._dtype.itemsize:
            return None
        numbers = memory.view(self._dtype)[:size].to(call.dtype)
        hidden = numbers[:below].view(-1, rows, directions * width)
        errors = numbers[below + cells :].view(call.num_layers, directions, rows, -1)
        found = [[_at_gates(call.mode, direction) for direction in layer] for layer in errors]
        return list(hidden), found


def _at_gates(mode: str, errors: Tensor) -> GateErrors:
    """(rows, blocks × width) as gradients at what both linear maps gave."""
    if mode == "gru":
        at_input, at_hidden = errors.chunk(2, -1)
        return GateErrors(at_input, at_hidden, errors)
    return GateErrors(errors, errors, errors)
