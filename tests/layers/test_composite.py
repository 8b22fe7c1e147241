"""Functions made of others: the calls inside them are seen, and come to the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.overrides import has_torch_function as somebody_watches

from dualform.layers.composite import undelegated


class Calls(TorchFunctionMode):
    """Notes every function that is called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def composed(x: Tensor, weight: Tensor, *, times: int = 2) -> Tensor:
    """As those of torch are, but the question has another name here."""
    if somebody_watches((x, weight)):
        return handle_torch_function(composed, (x, weight), x, weight, times=times)
    for _ in range(times):
        x = F.linear(x, weight)
    return x


def unasked(x: Tensor) -> Tensor:
    return x + 1


def test_calls_inside_are_seen() -> None:
    x, weight = torch.randn(2, 3), torch.randn(3, 3)
    inside = undelegated(composed)
    assert inside is not None
    with Calls() as calls:
        y = inside(x, weight)
    assert calls.seen == [F.linear, F.linear]
    with Calls() as calls:
        z = composed(x, weight)
    assert calls.seen == [composed]
    assert torch.equal(y, z)


def test_attention_makes_the_same_numbers_call_by_call() -> None:
    layer, x = nn.MultiheadAttention(4, 2, dropout=0.5).train(), torch.randn(5, 3, 4)
    weights = (layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.5)
    given = (x, x, x, 4, 2, *weights, layer.out_proj.weight, layer.out_proj.bias)
    inside = undelegated(F.multi_head_attention_forward)
    assert inside is not None
    results = []
    for forward in (F.multi_head_attention_forward, inside):
        torch.manual_seed(0)
        y, weights_of_keys = forward(*given)
        layer.zero_grad()
        y.square().sum().backward()
        results.append([y, weights_of_keys, *(p.grad.clone() for p in layer.parameters())])
    assert all(map(torch.equal, *results))
    with Calls() as calls:
        inside(*given)
    assert calls.seen.count(F.linear) == 2
    assert F.multi_head_attention_forward not in calls.seen


def test_what_cannot_be_looked_into_is_left_as_it_is() -> None:
    assert undelegated(unasked) is None
    assert undelegated(torch.add) is None
