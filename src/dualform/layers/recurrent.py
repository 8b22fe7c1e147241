"""Recurrent layers, whose fused kernels hide the errors of each time step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dualform.layers.recurrence import Recurrence
from dualform.layers.reserve import Action, Reserve
from dualform.layers.unroll import rows_of
from dualform.layers.use import (
    Finder,
    Function,
    Inside,
    LayerKind,
    Rows,
    Site,
    book_terms,
)


class Recurrent(LayerKind):
    """`nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells: one stream for each of their matrices.

    >>> torch.lstm in Recurrent.functions
    True
    """

    functions = (
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
        torch.lstm_cell,
        torch.gru_cell,
        torch.rnn_tanh_cell,
        torch.rnn_relu_cell,
    )

    def see(
        self, find: Finder, inside: Inside, func: Function, args: Sequence[Any], kwargs: Any
    ) -> tuple[Any, RecurrentUse | None]:
        """Rows for every matrix; dropout between layers starts from the random state before."""
        call = find.guard(Recurrence.of, func, args, kwargs)
        out = func(*args, **kwargs)
        if call is None or not call.replayable:
            return out, None  # dropout drawn inside a fused kernel
        outputs = out if isinstance(out, tuple) else (out,)
        return out, RecurrentUse(find, call.returned(outputs[0]), outputs)


class RecurrentUse:
    """One call of a recurrent layer."""

    def __init__(self, find: Finder, call: Recurrence, outputs: tuple[Tensor, ...]) -> None:
        self._find, self._call, self.outputs = find, call, outputs
        self._order = find.order
        self._reserve = Reserve.of(outputs[0])

    def await_errors(self, action: Action) -> RemovableHandle | None:
        """Where cuDNN made the call, it leaves what rows are made of when it has gone back."""
        return None if self._reserve is None else self._reserve.await_errors(action)

    def rows(self, errors: Sequence[Tensor | None] | None) -> Iterable[Rows]:
        """Keys of every matrix, and values where errors are given; batch first."""
        for found in rows_of(self._call, errors, self._reserve):
            site = self._site(found.weight, found.bias)
            if site is not None:
                values = None if found.values is None else self._in_order(found.values)
                rounding = rounding_on(found.keys.device)
                yield Rows(site, self._in_order(found.keys), values, rounding=rounding)

    def _in_order(self, rows: Tensor) -> Tensor:
        return rows if self._order is None else rows[self._order]

    def _site(self, weight: Tensor, bias: Tensor | None) -> Site | None:
        W, b = self._find.each(weight, bias)
        first = W or b
        if first is None:
            return None
        key = ("recurrent", W, b)
        return self._find.site(key, lambda: Site(first.label, book_terms(W, b), axis=0))


def rounding_on(device: torch.device) -> torch.dtype | None:
    """The type that cuDNN's recurrent layers round as: TF32 has as many digits as float16.

    >>> rounding_on(torch.device("cpu"))
    """
    return torch.float16 if device.type == "cuda" and torch.backends.cudnn.allow_tf32 else None
