"""Unrolled recurrent calls: the rows sum to autograd's gradients, each at its own time step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from dualform.layers.recurrence import Recurrence, is_recurrent
from dualform.layers.unroll import WeightRows, rows_of

INPUT, HIDDEN, TIME = 3, 4, 5
LENGTHS = (2, 5, 1, 5)
BATCH = len(LENGTHS)
MAKERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "lstm projected": partial(nn.LSTM, proj_size=2),
    "gru": nn.GRU,
    "rnn tanh": nn.RNN,
    "rnn relu": partial(nn.RNN, nonlinearity="relu"),
}
CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn tanh": nn.RNNCell,
    "rnn relu": partial(nn.RNNCell, nonlinearity="relu"),
}

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Watching(TorchFunctionMode):
    """Keeps the recurrent calls, and the rows made in the midst of the backward.

    They are made twice: with the hidden states that the call returned, and without knowing them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recurrence] = []
        self.outputs: tuple[Tensor, ...] = ()
        self.rows: list[WeightRows] = []
        self.without_output: list[WeightRows] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not is_recurrent(func):
            return func(*args, **(kwargs or {}))
        self.calls.append(Recurrence.of(func, args, kwargs))
        result = func(*args, **(kwargs or {}))
        self.outputs = (result,) if isinstance(result, Tensor) else result
        if torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(self.outputs, self.recompute, mode="all")
        return result

    def recompute(self, grads: Sequence[Tensor | None]) -> None:
        self.rows = rows_of(self.calls[-1].returned(self.outputs[0]), grads)
        self.without_output = rows_of(self.calls[-1], grads)


class Case(NamedTuple):
    """A call that was trained on: what was given, and what the recorder would keep."""

    x: Tensor
    call: Recurrence
    rows: list[WeightRows]


def state(net: nn.RNNBase, batch: tuple[int, ...] = (BATCH,)) -> Any:
    count = net.num_layers * (2 if net.bidirectional else 1)
    h0 = normal(net, count, *batch, net.proj_size or net.hidden_size)
    c0 = normal(net, count, *batch, net.hidden_size)
    return (h0, c0) if net.mode == "LSTM" else h0


def normal(net: nn.Module, *shape: int) -> Tensor:
    """Random numbers of the net's type."""
    return torch.randn(shape, dtype=next(net.parameters()).dtype)


def train(net: nn.Module, x: Tensor, given: Sequence[Any], carrying: str) -> Case:
    """One backward pass through the outputs that shall carry a gradient."""
    with Watching() as watching:
        net(*given)
    outputs = watching.outputs
    chosen = {"output": outputs[:1], "state": outputs[-1:], "all": outputs}[carrying]
    torch.autograd.backward([(y * torch.randn_like(y)).sum() for y in chosen])
    for rows, other in zip(watching.rows, watching.without_output, strict=True):
        assert_same(rows, other, 1e-12 if x.dtype == torch.float64 else 1e-5)
    return Case(x, watching.calls[-1], watching.rows)


def assert_same(rows: WeightRows, expected: WeightRows, tolerance: float) -> None:
    assert rows.weight is expected.weight
    assert rows.values is not None
    near(rows.keys, expected.keys, tolerance)
    near(rows.values, expected.values, tolerance)


def padded_input(layout: str, net: nn.Module, shape: Sequence[int]) -> tuple[Tensor, Any]:
    """A leaf, and how the net is given it."""
    x = normal(net, *shape).requires_grad_()
    if layout != "packed":
        return x, x
    return x, pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False)


def assert_exact(net: nn.Module, rows: Sequence[WeightRows], tolerance: float) -> None:
    """Σ value ⊗ key and Σ value, for every parameter, by identity."""
    found: dict[int, Tensor] = {}
    for row in rows:
        assert row.values is not None
        found[id(row.weight)] = torch.einsum("bto,bti->oi", row.values, row.keys)
        if row.bias is not None:
            found[id(row.bias)] = row.values.sum((0, 1))
    assert found.keys() == {id(parameter) for parameter in net.parameters()}
    for name, parameter in net.named_parameters():
        near(found[id(parameter)], parameter.grad, tolerance, name)


def near(found: Tensor, expected: Tensor | None, tolerance: float, what: str = "") -> None:
    assert expected is not None
    assert found.shape == expected.shape, what
    scale = max(1.0, float(expected.abs().sum()))
    assert (found - expected).abs().sum() <= tolerance * scale, what


def assert_in_place(net: nn.RNNBase, case: Case, tolerance: float) -> None:
    """Each step's error, sent back through W, is the gradient of what was read at that step."""
    first = [rows for rows in case.rows if id(rows.weight) in reading_input(net)]
    back = torch.stack([rows.values @ rows.weight for rows in first if rows.values is not None])
    assert case.x.grad is not None
    order = samples(case.call)
    near(back.sum(0), batch_first(net, case.x.grad)[order], tolerance)
    near(first[0].keys, read(net, case)[order], 0.0)


def reading_input(net: nn.RNNBase) -> set[int]:
    return {id(w) for name, w in net.named_parameters() if name.startswith("weight_ih_l0")}


def batch_first(net: nn.RNNBase, x: Tensor) -> Tensor:
    return x if net.batch_first else x.transpose(0, 1)


def samples(call: Recurrence) -> list[int]:
    """The order of the samples within a call: packing sorts them, longest first."""
    if call.batch_sizes is None:
        return list(range(BATCH))
    return sorted(range(BATCH), key=lambda sample: -LENGTHS[sample])


def read(net: nn.RNNBase, case: Case) -> Tensor:
    """The inputs, batch first, with zeros where a sequence has ended."""
    x = batch_first(net, case.x.detach())
    if case.call.batch_sizes is None:
        return x
    return x * (torch.arange(TIME) < torch.tensor(LENGTHS)[:, None])[..., None]


def check(
    maker: str,
    layers: int,
    dropout: float,
    both: bool,
    bias: bool,
    layout: str,
    given_state: bool,
    carrying: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    options = {"batch_first": layout == "batch first", "dropout": dropout, "bidirectional": both}
    net = MAKERS[maker](INPUT, HIDDEN, layers, bias=bias, **options).to(dtype)
    shape = (BATCH, TIME, INPUT) if layout == "batch first" else (TIME, BATCH, INPUT)
    x, entered = padded_input(layout, net, shape)
    case = train(net, x, (entered, state(net)) if given_state else (entered,), carrying)
    assert_exact(net, case.rows, tolerance)
    assert_in_place(net, case, tolerance)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("layout", ["time first", "batch first", "packed"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("layers", "dropout"), [(1, 0.0), (2, 0.0), (2, 0.4)])
@pytest.mark.parametrize("maker", MAKERS)
def test_rows_sum_to_the_gradients(
    maker: str, layers: int, dropout: float, both: bool, bias: bool, layout: str
) -> None:
    for given_state, carrying in ((False, "output"), (True, "state"), (True, "all")):
        options = (layers, dropout, both, bias, layout, given_state, carrying)
        check(maker, *options, torch.float64, 1e-12)


@pytest.mark.parametrize("layout", ["time first", "batch first", "packed"])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    ("layers", "dropout", "carrying"), [(1, 0.0, "output"), (1, 0.0, "state"), (3, 0.4, "all")]
)
@pytest.mark.parametrize("maker", MAKERS)
def test_rows_sum_to_the_gradients_in_single_precision(
    maker: str, layers: int, dropout: float, carrying: str, both: bool, layout: str
) -> None:
    """Where the kernels are others: oneDNN's LSTM, with dropout between its layers."""
    options = (layers, dropout, both, True, layout, True, carrying)
    check(maker, *options, torch.float32, 1e-5)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("carrying", ["output", "state", "all"])
@pytest.mark.parametrize("maker", CELLS)
def test_cells(maker: str, carrying: str, bias: bool, batched: bool) -> None:
    cell = CELLS[maker](INPUT, HIDDEN, bias=bias).double()
    batch = (BATCH,) if batched else ()
    x, (h, c) = normal(cell, *batch, INPUT), normal(cell, 2, *batch, HIDDEN)
    case = train(cell, x, (x, (h, c) if maker == "lstm" else h), carrying)
    assert_exact(cell, case.rows, 1e-12)
    assert all(rows.keys.shape[:2] == (BATCH if batched else 1, 1) for rows in case.rows)


@pytest.mark.parametrize("maker", MAKERS)
def test_one_sequence_without_a_batch(maker: str) -> None:
    net = MAKERS[maker](INPUT, HIDDEN, bidirectional=True).double()
    x = normal(net, TIME, INPUT)
    case = train(net, x, (x, state(net, ())), "all")
    assert_exact(net, case.rows, 1e-12)
    assert all(rows.keys.shape[:2] == (1, TIME) for rows in case.rows)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_sequence_leaves_the_same_rows_alone_and_packed(maker: str) -> None:
    net = MAKERS[maker](INPUT, HIDDEN, 2, bidirectional=True).double()
    x, entered = padded_input("packed", net, (TIME, BATCH, INPUT))
    with Watching() as watching:
        output, _ = net(entered)
    grad = normal(net, TIME, BATCH, output.data.shape[-1])
    torch.autograd.backward(pad_packed_sequence(output)[0], grad)
    together = watching.rows
    for at, sample in enumerate(samples(watching.calls[-1])):
        length = LENGTHS[sample]
        with watching:
            alone, _ = net(x[:length, sample].detach())
        torch.autograd.backward(alone, grad[:length, sample])
        for one, rows in zip(watching.rows, together, strict=True):
            assert_alike(rows.keys[at], one.keys[0])
            assert one.values is not None
            assert rows.values is not None
            assert_alike(rows.values[at], one.values[0])


def assert_alike(padded: Tensor, alone: Tensor) -> None:
    near(padded[: len(alone)], alone, 1e-12)
    assert not padded[len(alone) :].any()


def test_reverse_rows_lie_where_their_input_was_read() -> None:
    net = nn.GRU(INPUT, HIDDEN, bidirectional=True).double()
    x, entered = padded_input("packed", net, (TIME, BATCH, INPUT))
    with Watching() as watching:
        output, _ = net(entered, h0 := state(net))
    made = pad_packed_sequence(output, batch_first=True)[0][..., HIDDEN:].detach()
    *_, reads, carries = rows_of(watching.calls[-1])
    assert reads.weight is net.weight_ih_l0_reverse
    assert reads.values is None
    for at, sample in enumerate(samples(watching.calls[-1])):
        length = LENGTHS[sample]
        assert torch.equal(reads.keys[at, :length], x[:length, sample])
        near(carries.keys[at, : length - 1], made[sample, 1:length], 1e-12)
        near(carries.keys[at, length - 1], h0[1, sample], 0.0)
        assert not carries.keys[at, length:].any()


@pytest.mark.parametrize("grads", [None, [None, None, None]])
def test_keys_without_gradients(grads: list[None] | None) -> None:
    net, x = nn.LSTM(INPUT, HIDDEN), torch.randn(TIME, BATCH, INPUT)
    with torch.no_grad(), Watching() as watching:
        output, _ = net(x)
    rows = rows_of(watching.calls[-1], grads)
    assert all(row.values is None and not row.keys.requires_grad for row in rows)
    assert torch.equal(rows[0].keys, x.transpose(0, 1))
    near(rows[1].keys[:, 1:], output[:-1].transpose(0, 1), 1e-6)


def test_dropout_is_replayed_and_leaves_no_trace() -> None:
    net, x = nn.LSTM(INPUT, HIDDEN, 3, dropout=0.5), torch.randn(TIME, BATCH, INPUT)
    with Watching() as watching:
        torch.manual_seed(7)
        net(x)
        net(x)
        net.eval()(x)
    first, second, evaluating = watching.calls
    grads = [torch.randn_like(y) for y in watching.outputs]
    before = torch.get_rng_state()
    once, again, other = rows_of(first, grads), rows_of(first, grads), rows_of(second, grads)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(once[-1].keys, again[-1].keys)
    assert not torch.equal(once[-1].keys, other[-1].keys)
    assert (once[-2].keys == 0).any()
    assert evaluating.rng is None
    assert evaluating.replayable


def test_an_output_that_was_changed_in_place_is_not_read() -> None:
    net, x = nn.GRU(INPUT, HIDDEN, 2).double(), torch.randn(TIME, BATCH, INPUT).double()
    with Watching() as watching:
        output, _ = net(x)
    call, grads = watching.calls[-1], [torch.randn_like(output)]
    known = call.returned(output)
    expected = rows_of(call, grads)
    output.detach().mul_(2)
    for rows, other in zip(rows_of(known, grads), expected, strict=True):
        assert_same(rows, other, 0.0)


@pytest.mark.parametrize("maker", MAKERS)
def test_layers_are_run_again_without_a_trace(maker: str) -> None:
    net, x = MAKERS[maker](INPUT, HIDDEN, 2), torch.randn(TIME, BATCH, INPUT)
    with Watching() as watching:
        output, _ = net(x)
    grads, before = [torch.ones_like(output)], torch.get_rng_state()
    given, weights = grads[0].clone(), [weight.clone() for weight in net.parameters()]
    with Watching() as seen:
        rows_of(watching.calls[-1].returned(output), grads)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(grads[0], given)
    assert all(map(torch.equal, net.parameters(), weights))
    used = {id(weight) for call in seen.calls for weight in call.weights}
    assert used.isdisjoint(map(id, net.parameters()))


def test_arguments_by_name() -> None:
    net, x, h0 = (
        nn.GRU(INPUT, HIDDEN, bias=False),
        torch.randn(2, TIME, INPUT),
        torch.zeros(1, 2, 4),
    )
    weights = list(net.parameters())
    named: dict[str, Any] = {"hx": h0, "params": weights, "has_biases": False, "num_layers": 1}
    named |= {"dropout": 0.0, "train": True, "bidirectional": False}
    with torch.no_grad(), Watching() as watching:
        torch.gru(input=x, batch_first=True, **named)
        torch.gru(data=x.flatten(0, 1), batch_sizes=torch.tensor([2] * TIME), **named)
        torch.gru_cell(x[:, 0], h0[0], w_ih=weights[0], w_hh=weights[1], b_ih=None)
    padded, packed, cell = watching.calls
    assert padded.sizes == packed.sizes == [2] * TIME
    assert cell.sizes == [2]
    assert not cell.has_biases


def test_autocast_changes_nothing() -> None:
    """Whoever runs the backward under autocast shall find rows in the precision of the weights."""
    net, x = nn.GRU(INPUT, HIDDEN), torch.randn(TIME, BATCH, INPUT)
    with torch.no_grad(), Watching() as watching:
        net(x)
    grads = [torch.randn_like(y) for y in watching.outputs]
    with torch.autocast("cpu", torch.bfloat16):
        under = rows_of(watching.calls[-1], grads)
    for rows, expected in zip(under, rows_of(watching.calls[-1], grads), strict=True):
        assert rows.values is not None
        assert expected.values is not None
        assert torch.equal(rows.keys, expected.keys)
        assert torch.equal(rows.values, expected.values)


def test_dropout_that_cannot_be_replayed_is_refused() -> None:
    net = nn.GRU(INPUT, HIDDEN, 2, dropout=0.5)
    with torch.no_grad(), Watching() as watching:
        net(torch.randn(TIME, BATCH, INPUT))
    with pytest.raises(ValueError, match=r"cudnn\.flags"):
        rows_of(replace(watching.calls[-1], rng=None))


def test_other_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="is_recurrent"):
        Recurrence.of(torch.relu, (torch.zeros(2),))
