"""Changes of parameters that are kept by step, wherever the loop puts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dualform.recording.plan import Plan
from dualform.recording.weight_copies import MOST_JOINED, StepCopies


def turned(p: nn.Parameter) -> Tensor:
    """Other numbers, whose last dimension does not lie in one piece."""
    return torch.randn(p.shape[::-1]).double().permute(tuple(reversed(range(p.ndim))))


MOVES: dict[str, Callable[[nn.Parameter], None]] = {
    "in place": lambda p: p.data.add_(torch.randn_like(p)),
    "other memory": lambda p: setattr(p, "data", torch.randn_like(p)),
    "other order": lambda p: setattr(p, "data", turned(p)),
    "not at all": lambda p: None,
}


def made() -> dict[str, nn.Parameter]:
    shapes = {"a": (3,), "b": (2, 5), "c": (MOST_JOINED + 1,), "d": (4, 1), "e": ()}
    return {name: nn.Parameter(torch.randn(shape).double()) for name, shape in shapes.items()}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("moved", ["abcde", "b", "ae", "c"])
def test_changes_are_differences(move: str, moved: str) -> None:
    torch.manual_seed(0)
    parameters = made()
    copies = StepCopies(Plan(parameters, (), {}))
    last = {name: p.detach().clone() for name, p in parameters.items()}
    for name in "abcd":
        copies.hold(name)
    for step, books in enumerate(("abcd", "abcd", "abc", "abcd", "abcde", "abcde")):
        if step == 4:
            copies.hold("e")
            last["e"] = parameters["e"].detach().clone()
        for name in moved:
            MOVES[move if step % 2 else "in place"](parameters[name])
        found = copies.changes(books)
        assert list(found) == list(books)
        for name in books:
            now = parameters[name].detach()
            assert found[name].shape == now.shape
            assert torch.equal(found[name], now - last[name])
            last[name] = now.clone()
