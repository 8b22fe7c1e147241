"""What a layer gives beside its rows: parameters that were frozen, kept by step, or computed.

A layer's books may hold only a part of what it does: its bias, where the weight was frozen or is
computed from other parameters. The rest is no evidence of any sample, but it is part of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dualform.layers import Finder, LayerKind, Rows, Seen, Watching
from dualform.ledger import Ledger, Term
from dualform.memory.blocks import as_matrix
from dualform.read.questions import term_output

PRODUCTS = frozenset(
    {
        F.linear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        torch.addmm,
        torch.Tensor.addmm,
    }
)
"""Functions that may be handed weights, or offsets, which are no parameters themselves."""
ROUNDING = 256
"""By how many units in the last place an output may differ from what its parameters give."""


@dataclass(frozen=True)
class Unrecorded:
    """(queries, outputs): what parameters without rows give; before training, and what came since.

    >>> Unrecorded.nothing(2, 3).total.shape
    torch.Size([2, 3])
    """

    initial: Tensor
    by_step: Tensor

    @classmethod
    def nothing(cls, queries: int, outputs: int) -> Unrecorded:
        """No parameter is without rows."""
        zero = torch.zeros(queries, outputs, dtype=torch.float64)
        return cls(zero, zero)

    @property
    def total(self) -> Tensor:
        """Both."""
        return self.initial + self.by_step

    def __getitem__(self, queries: Tensor) -> Unrecorded:
        return Unrecorded(self.initial[queries], self.by_step[queries])


class OutputWatching(Watching):
    """Also notes what products of matrices gave, before it is changed in place."""

    def __init__(
        self, find: Finder, kinds: Mapping[Any, LayerKind], take: Callable[[Seen, Any], None]
    ) -> None:
        super().__init__(find, kinds, lambda use: take(use, self._output(use)))
        self._function: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Makes the call, and remembers which it was."""
        self._function = func
        return super().__torch_function__(func, types, args, kwargs)

    def _output(self, use: Seen) -> Tensor | None:
        outputs = use.outputs
        known = self._function in PRODUCTS and len(outputs) == 1
        return outputs[0].detach().clone() if known else None


def unrecorded_part(
    rows: Rows,
    recorded: Mapping[str, Term],
    keys: Tensor,
    output: Tensor | None,
    parameters: Mapping[str, Tensor],
    ledger: Ledger,
    width: int,
) -> Unrecorded:
    """What a use gives through everything that is not among the recorded terms.

    Args:
        keys: (queries, width of the keys) as the use has them today.
        output: (queries, outputs), where it is known; in the precision of the model.
        parameters: all of the model's, as they are.
    """
    first = ledger.weights(0)
    found = Unrecorded.nothing(len(keys), width)
    given = torch.zeros_like(found.initial)
    for name, term in rows.site.terms.items():
        now = parameters[name].detach().cpu().double()
        part = _given(term, now, keys, width)
        given += part
        if name not in recorded:
            before = _given(term, first[name].double(), keys, width) if name in first else part
            found = Unrecorded(found.initial + before, found.by_step + part - before)
    if output is None:
        return found
    computed = output.double() - given
    size = given.abs().amax() + output.double().abs().amax()
    if bool(computed.abs().amax() <= ROUNDING * torch.finfo(output.dtype).eps * size):
        return found
    if _has_moved(rows, parameters, first):
        return Unrecorded(found.initial, found.by_step + computed)
    return Unrecorded(found.initial + computed, found.by_step)


def _given(term: Term, parameter: Tensor, keys: Tensor, width: int) -> Tensor:
    return term_output(term, as_matrix(parameter, term.view, term.groups), keys, width)


def _has_moved(rows: Rows, parameters: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> bool:
    """Whether training changed parameters of the same module that are not used as they are."""
    owner = rows.site.label.rpartition(".")[0]
    others = [n for n in first if n in parameters and n not in rows.site.terms]
    own = [name for name in others if not owner or name.startswith(f"{owner}.")]
    return any(not torch.equal(first[n], parameters[n].detach().cpu()) for n in own)
