"""Several steps of an optimizer at once, where none of them asks where the parameter is.

What Adam divides by are averages of gradients alone. So the averages of many steps are one product
of a small triangular matrix with their gradients, and so are the coefficients of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dualform.optimizers.operators import Coefficient
from dualform.optimizers.steps import Pair, Step, Value, added, plus, times


@dataclass(frozen=True)
class Stretch(Step):
    """`W ← kept W + from_b ∘ b + Σ_s on_W_s ∘ g_s`, `b ← keep b + Σ_s on_b_s g_s`.

    Its gradients come as (steps, *shape), and its coefficients too.

    >>> two = Stretch(1.0, torch.tensor([-0.1]), torch.tensor([[2.0], [1.0]]), 0.5, torch.ones(2))
    >>> two.forward(torch.ones(1), torch.ones(1), torch.tensor([[1.0], [3.0]]))
    (tensor([5.9000]), tensor([4.5000]))
    """

    kept: float
    from_b: Tensor
    """(*shape)."""
    on_W: Tensor
    """(steps, *shape)."""
    keep: float
    on_b: Tensor
    """(steps,)."""

    def forward(self, W: Tensor, b: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """What the steps make of a parameter and its buffer."""
        moved, carried = (self.kept * W).addcmul_(self.from_b, b), self.keep * b
        moved += (self.on_W * gradient).sum(0)
        carried += torch.tensordot(self.on_b, gradient, 1)
        return moved, carried

    def carry(self, W: Value, b: Value) -> tuple[Value, Value]:
        """What they would make of them without their gradients."""
        return added(added(0.0, self.kept, W), self.from_b, b), added(0.0, self.keep, b)

    def backward(self, r: Pair) -> tuple[Coefficient, Pair]:
        """The coefficients of the gradients, and `r` before the first step."""
        on_W, on_b = r
        shaped = self.on_b.reshape(-1, *[1] * self.from_b.ndim)
        found = plus(times(on_W, self.on_W), times(on_b, shaped))
        from_b = plus(times(on_W, self.from_b), times(on_b, self.keep))
        return found, (times(on_W, self.kept), from_b)

    def coefficients(self, r: Pair) -> tuple[Sequence[Coefficient], Pair]:
        """The coefficient of each gradient, and `r` before the first step."""
        found, before = self.backward(r)
        each = found.unbind() if isinstance(found, Tensor) else [found] * len(self.on_b)
        return list(each), before


@lru_cache(maxsize=64)
def products(rates: tuple[float, ...]) -> Tensor:
    """(steps + 1, steps): what is left after each step of what came in at one, or was there before.

    >>> products((0.5, 0.1))
    tensor([[0.5000, 0.0500],
            [1.0000, 0.1000],
            [0.0000, 1.0000]], dtype=torch.float64)
    """
    left = torch.zeros(len(rates) + 1, len(rates), dtype=torch.float64)
    column = torch.zeros(len(rates) + 1, dtype=torch.float64)
    column[0] = 1.0
    for t, rate in enumerate(rates):
        column *= rate
        column[t + 1] = 1.0
        left[:, t] = column
    return left


def running_means(before: Tensor, each: Tensor, rates: tuple[float, ...]) -> Tensor:
    """(steps, *shape): `x ← rate x + (1 - rate) y` after each step.

    >>> running_means(torch.ones(1).double(), torch.zeros(2, 1).double(), (0.5, 0.5)).flatten()
    tensor([0.5000, 0.2500], dtype=torch.float64)
    """
    left, taken = products(rates), 1 - torch.tensor(rates, dtype=torch.float64)
    weights = (left[1:] * taken[:, None]).T.to(each.device)
    begun = left[0, :, None].to(each.device) * before.reshape(1, -1)
    return begun.addmm_(weights, each.reshape(len(each), -1)).view(each.shape)


def descended(
    sizes: Tensor, inverse: Tensor, rates: tuple[float, ...], kept: Sequence[float], sign: float
) -> Stretch:
    """Steps `b ← rate b + (1 - rate) d`, `W ← kept W - size inverse ∘ b` with `d = ± g`.

    >>> numbers = torch.tensor([0.1, 0.1]).double(), torch.ones(2, 1).double()
    >>> descended(*numbers, (0.5, 0.5), (1.0, 1.0), 1.0).from_b
    tensor([-0.0750], dtype=torch.float64)
    """
    device, shape = inverse.device, inverse.shape[1:]
    left = products(rates)
    taken = sign * (1 - torch.tensor(rates, dtype=torch.float64))
    later = products(tuple(kept))[1:, -1]  # what the decay after each step leaves of it
    far = left * (-sizes.cpu() * later)
    far[1:] *= taken[:, None]
    found = (far.to(device) @ inverse.reshape(len(inverse), -1)).view(-1, *shape)
    on_b = (taken * left[1:, -1]).to(device)
    whole = float(products(tuple(kept))[0, -1])
    return Stretch(whole, found[0], found[1:], float(left[0, -1]), on_b)
