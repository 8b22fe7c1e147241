"""What cuDNN leaves of a recurrent call: read where it is what is computed, and nowhere else.

There is no cuDNN here. Another operation's result stands in for its memory: autograd keeps it for
the backward pass as it keeps a reserve, and it is filled as cuDNN was seen to fill one on a GPU
(`benchmarks.device`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.layers.test_unroll import MAKERS, Watching, normal
from torch import Tensor, nn

from dualform.layers import unroll
from dualform.layers.recurrence import Recurrence
from dualform.layers.reserve import Reserve
from dualform.layers.unroll import WeightRows, rows_of

TIME, BATCH, WIDTH = 5, 4, 3


def memory_of(rows: Sequence[WeightRows], layers: int, directions: int, is_lstm: bool) -> Tensor:
    """Hidden states of all layers but the last, an LSTM's cells, errors, and some room."""
    each = 2 * directions
    below = [rows[at * each].keys for at in range(1, layers)]
    cells = torch.randn(layers * directions * is_lstm, BATCH, TIME, WIDTH).double()
    found = [*below, *cells]
    for ih, hh in zip(rows[::2], rows[1::2], strict=True):
        assert ih.values is not None
        assert hh.values is not None
        is_gru = ih.values.shape[-1] == 3 * WIDTH
        found.append(torch.cat([ih.values, hh.values], -1) if is_gru else ih.values)
    return torch.cat([*(part.transpose(0, 1).flatten() for part in found), torch.zeros(32)])


def after_backward(memory: Tensor, call: Recurrence, retain_graph: bool = False) -> Any:
    """What is left of a call whose backward pass writes this into what autograd keeps."""
    held = torch.zeros_like(memory).requires_grad_().exp()
    node, found = held.grad_fn, list[Any]()
    assert node is not None
    reserve = Reserve(node, node._raw_saved_result, torch.float64)  # type: ignore[attr-defined]

    def write(_: Any) -> None:
        held.data.copy_(memory)

    def look(errors: Sequence[Tensor | None]) -> None:
        found.extend([reserve.left(call), [rows_of(call, GRADS[:1], reserve) for _ in range(2)]])

    handles = [node.register_prehook(write), reserve.await_errors(look)]
    held.sum().backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    assert reserve.left(call) is None  # it is looked at once
    for handle in handles:
        handle.remove()
    return found


GRADS: list[Tensor | None] = []


@pytest.fixture(params=["lstm", "gru", "rnn tanh", "rnn relu"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(unroll, "_as_left", {})
    name: str = request.param
    return name


def called(
    mode: str, layers: int, bidirectional: bool
) -> tuple[Recurrence, list[WeightRows], Tensor]:
    """A call, the rows that are computed of it, and what cuDNN would leave."""
    net: nn.RNNBase = MAKERS[mode](2, WIDTH, layers, bidirectional=bidirectional).double()
    x = normal(net, TIME, BATCH, 2).requires_grad_()
    with Watching() as watching:
        out = net(x)[0]
    GRADS[:] = [torch.randn_like(out)]
    call = watching.calls[-1].returned(out)
    rows = rows_of(call, GRADS)
    return call, rows, memory_of(rows, layers, 1 + bidirectional, mode == "lstm")


@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (3, False), (2, True)])
def test_what_is_left_is_what_is_computed(mode: str, layers: int, bidirectional: bool) -> None:
    call, rows, memory = called(mode, layers, bidirectional)
    left, (first, again) = after_backward(memory, call)
    assert left is not None
    for found in (first, again):
        for one, other in zip(found, rows, strict=True):
            assert one.weight is other.weight
            assert torch.equal(one.keys, other.keys)
            assert one.values is not None
            assert other.values is not None
            assert torch.equal(one.values, other.values)


def test_it_is_taken_only_where_it_was_what_is_computed(mode: str) -> None:
    call, rows, memory = called(mode, 2, False)
    marked = memory * (1 + 1e-9)  # so that it can be told which was taken
    _, (first, again) = after_backward(marked, call)
    assert torch.equal(first[0].values, rows[0].values)
    assert torch.equal(again[0].values, rows[0].values * (1 + 1e-9))
    unroll._as_left.clear()
    _, (first, again) = after_backward(memory.roll(1), call)
    assert torch.equal(again[0].values, rows[0].values)
    _, (again, _) = after_backward(memory, call)  # nor later, where it was once another
    assert torch.equal(again[0].values, rows[0].values)


def test_nothing_is_left_where_it_cannot_be_told(mode: str) -> None:
    call, _, memory = called(mode, 2, False)
    left, _ = after_backward(memory, call, retain_graph=True)  # cuDNN is given a copy then
    assert left is None
    left, _ = after_backward(memory[:-40], call)
    assert left is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        out = torch.ones(2, requires_grad=True).exp()
    assert Reserve.of(out) is None
