"""Questions in turned bases are what `asked` makes of them, one step at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualform.memory.blocks import BilinearFunctional, Functional, Sides
from dualform.memory.views import View
from dualform.optimizers import Operator, Turned, apply
from dualform.optimizers.operators import Basis, Memo
from dualform.optimizers.operators.turned import can_turn
from dualform.read.samples_matrix.shared_tails import Later, share_of


def wide(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def basis(shape: tuple[int, ...], free: int | None) -> Basis:
    """Orthogonal up to what float32 rounds, as the package has them."""
    found = [torch.linalg.qr(wide(size, size))[0].float().double() for size in shape]
    return tuple(None if at == free else Q for at, Q in enumerate(found))


def walked_back(shape: tuple[int, ...], free: int | None, lengths: list[int]) -> list[Operator]:
    """Coefficients as a walk back finds them, for bases that stay for so many steps each."""
    found: list[Operator] = []
    sum_: Operator | None = None
    for length in lengths:
        Q = basis(shape, free)
        for _ in range(length):
            one = Turned.of(Q, torch.rand(shape, dtype=torch.float64))
            found.append(one if sum_ is None else one + sum_ * 0.3)
            sum_ = found[-1] * 0.9
    return found[::-1]


def sides(shape: tuple[int, ...], form: str, rows: int) -> Sides:
    """Rows of a parameter; of matrices, those of a part of it, or of a table."""
    if len(shape) == 1:
        return Sides(wide(rows, shape[0]), None)
    if form == "lookup":
        return Sides(torch.randint(0, shape[0] - 1, (rows,)), wide(rows, shape[1]), (1, 0))
    at = (1, 1) if len(shape) == 2 else (0, 0)
    width = torch.Size(shape[1:]).numel() - at[1]
    return Sides(wide(rows, shape[0] - at[0]), wide(rows, width), at)


@given(
    shape=st.sampled_from([(4, 5), (5, 3), (6,), (3, 2, 4)]),
    form=st.sampled_from(["outer", "lookup"]),
    free=st.sampled_from([None, 0, 1]),
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    order=st.sampled_from(["forward", "backward", "any"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_turned_questions(
    shape: tuple[int, ...],
    form: str,
    free: int | None,
    lengths: list[int],
    order: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    free = None if len(shape) == 1 else free
    operators = walked_back(shape, free, lengths)
    numbers = {"forward": range(len(operators)), "backward": range(len(operators))[::-1]}
    asked = numbers.get(order) or torch.randperm(len(operators)).tolist()
    rows = sides(shape, form if len(shape) == 2 else "outer", 5)
    view = View(shape, "rows" if len(shape) > 1 else "flat")
    width = torch.Size(shape[1:]).numel()
    units = Functional(torch.randint(0, shape[0], (3,)), wide(3, width))
    for question in (units, units.dense(shape[0]), BilinearFunctional(wide(2, shape[0], width))):
        assert can_turn(question, rows, view)
        memo: Memo = {}
        for at in asked:
            expected = operators[at].asked(question, view).of(rows)
            found = operators[at].answers(question, rows, view, memo)
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("view", "at"),
    [
        (View((4, 3), "swapped"), (0, 0)),
        (View((4, 3), groups=2), (0, 0)),
        (View((4, 3, 2)), (0, 2)),
        (View((1 << 14, 1 << 12)), (0, 0)),
    ],
    ids=str,
)
def test_what_cannot_be_turned(view: View, at: tuple[int, int]) -> None:
    """Sides that are not the parameter's dimensions, and more numbers than are kept."""
    question = Functional(torch.zeros(2, dtype=torch.long), torch.zeros(2, 3))
    assert not can_turn(question, Sides(torch.zeros(1, 4), None, at), view)


@given(
    shape=st.sampled_from([(4, 3), (5,), (2, 3, 2)]),
    runs=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=2),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_each_basis_once(shape: tuple[int, ...], runs: list[list[int]], seed: int) -> None:
    """Own parts, and each basis on all that came before it, are what the operators make."""
    torch.manual_seed(seed)
    operators = [operator for lengths in runs for operator in walked_back(shape, None, lengths)]
    gradients = [wide(*shape) for _ in operators]
    later = Later()
    total, bases = torch.zeros(shape, dtype=torch.float64), 0
    for step, (operator, gradient) in enumerate(zip(operators, gradients, strict=True)):
        total += apply(later.own(step, operator), gradient)
    for chain in later.chains():
        sums = torch.zeros(shape, dtype=torch.float64)
        for tail, numbers in chain:
            sums += sum(
                (share * gradients[step] for step, share in numbers.items()), start=0 * sums
            )
            total += tail.own.apply(sums)
            sums *= share_of(tail)
            bases += 1
    expected = torch.stack([apply(H, g) for H, g in zip(operators, gradients, strict=True)]).sum(0)
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-12)
    assert bases == sum(len(lengths) - 1 for lengths in runs)
