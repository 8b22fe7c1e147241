"""A fixed point as a function of what its step is made of, differentiable any number of times.

The output is one real step, y = f(z, θ) at the solution, so a first derivative goes through that
step as through any other: g becomes u = (I − Jᵀ)⁻¹ g, and then uᵀ ∂f/∂θ. Further derivatives must
know that z itself moves with θ. So z is a node of the graph that has every θ as its input:

    θ ──► z = x*(θ) ──► y = f(z, θ) ──► y + (I − J)⁻¹ [(y − y*) − J (z − z*)]

The bracket is 0 in value; its derivatives are those of x*(θ), since f(z, θ) = z for every θ. In a
first derivative nothing is left for z, which then costs nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dualform.errors import FamilyError
from dualform.families.fixed_points.linear import Linearized
from dualform.families.fixed_points.solve import Step


def attached(linear: Linearized) -> Tensor:
    """The fixed point of `linear.step` at `linear.x`, with derivatives of every order.

    >>> w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    >>> root = torch.full((1, 1), 2.0, dtype=torch.float64)  # of x = w x + 1: 1 / (1 − w)
    >>> z = attached(Linearized(lambda x: w * x + 1, root))
    >>> (first,) = torch.autograd.grad(z.sum(), w, create_graph=True)
    >>> first, torch.autograd.grad(first, w)[0]  # 1 / (1 − w)², 2 / (1 − w)³
    (tensor(4., dtype=torch.float64, grad_fn=...), tensor(16.0000, dtype=torch.float64))
    """
    return _attached(linear, known=False)


def _attached(linear: Linearized, known: bool) -> Tensor:
    point = _Point(linear, _used(linear.step, linear.x), known)
    z: Tensor = _Moving.apply(linear.x, point, *point.theta) if point.theta else linear.x  # type: ignore[no-untyped-call]
    # an alias: what the step gives back for z is added up before the correction cancels it
    y = linear.step(z.view_as(z))
    if not y.requires_grad:
        return y
    output: Tensor = _Corrected.apply(y, z, point)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, eq=False)
class _Point:
    """A fixed point and the tensors θ that its step uses, apart from x."""

    linear: Linearized
    theta: tuple[Tensor, ...]
    known: bool = False
    """Whether nothing else is used, by its making."""

    def pulled(self, z: Tensor, theta: Sequence[Tensor], w: Tensor) -> Sequence[Tensor | None]:
        """wᵀ ∂x*/∂θ, itself differentiable in z, θ and w where a graph is asked for."""
        keeps = torch.is_grad_enabled()
        u = self.linear.solved(w)[0]
        if keeps:
            u = _attached(replace(self.linear, step=self._adjoint(z, w), x=u), known=True)
        with torch.enable_grad():
            here, *own = (_alias(t, keeps) for t in (z, *theta))
            with _Handing(self.theta, own):
                y = self.linear.step(here)
        return torch.autograd.grad(y, own, u, create_graph=keeps, allow_unused=True)

    def _adjoint(self, z: Tensor, w: Tensor) -> Step:
        """u ↦ w + Jᵀu with J at z: its fixed point is (I − Jᵀ)⁻¹ w."""

        def step(u: Tensor) -> Tensor:
            keeps = torch.is_grad_enabled()
            with torch.enable_grad():
                here = z.view_as(z)  # a call that can be seen: z is one of the tensors it uses
                here = here if here.requires_grad else here.detach().requires_grad_()
                y = self.linear.step(here)
            (back,) = torch.autograd.grad(y, here, u, create_graph=keeps, allow_unused=True)
            return w + (torch.zeros_like(u) if back is None else back)

        return step

    def require_all_used_seen(self) -> None:
        """Raise where the step depends on a tensor that no torch function was handed."""
        if self.known:
            return
        with torch.enable_grad(), _Handing(self.theta, [t.detach() for t in self.theta]):
            hidden = self.linear.step(self.linear.x.detach()).requires_grad
        if hidden:
            raise FamilyError(
                "a second derivative of this fixed point is not known: its step uses a tensor that "
                "it hands to no torch function, but to an autograd.Function of its own. First "
                "derivatives are right (leave create_graph out); for more, hand that tensor to a "
                "torch function first, such as t.view_as(t)."
            )


class _Moving(torch.autograd.Function):
    """z = x*(θ): the solution, that moves with θ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, point: _Point, *theta: Tensor) -> Tensor:
        z = x.view_as(x)
        ctx.point = point
        ctx.save_for_backward(z, *theta)
        return z

    @staticmethod
    def backward(ctx: Any, w: Tensor) -> tuple[Tensor | None, ...]:
        z, *theta = ctx.saved_tensors
        # a last derivative of first order: all of it went through the step
        if not torch.is_grad_enabled() and not bool(w.any()):
            return (None, None, *(None for _ in theta))
        return (None, None, *ctx.point.pulled(z, theta, w))


class _Corrected(torch.autograd.Function):
    """y + (I − J)⁻¹ [(y − y*) − J (z − z*)], which is y."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, point: _Point) -> Tensor:
        ctx.point = point
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None]:
        linear: Linearized = ctx.point.linear
        if not torch.is_grad_enabled():
            u, moved = linear.solved(g)
            return u, -moved if ctx.needs_input_grad[1] else None, None
        ctx.point.require_all_used_seen()
        again: Tensor = _Solved.apply(g, linear, True)  # type: ignore[no-untyped-call]
        return again, g - again if ctx.needs_input_grad[1] else None, None


class _Solved(torch.autograd.Function):
    """(I − Jᵀ)⁻¹ g, or with J instead of Jᵀ: linear in g, with J as it is at the solution."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, linear: Linearized, transposed: bool) -> Tensor:
        ctx.linear, ctx.transposed = linear, transposed
        return linear.solved(g, transposed)[0]

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        return _Solved.apply(v, ctx.linear, not ctx.transposed), None, None  # type: ignore[no-untyped-call]


def _alias(t: Tensor, keeps: bool) -> Tensor:
    """The same numbers as an input of their own, so that no derivative passes through another."""
    return t.view_as(t) if keeps and t.requires_grad else t.detach().requires_grad_()


def _used(step: Step, x: Tensor) -> tuple[Tensor, ...]:
    """The tensors with a gradient that a step hands to torch, other than what it computed."""
    with torch.no_grad(), _Seeing() as seeing:
        step(x)
    return tuple(seeing.used.values())


class _Seeing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.used: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}  # kept, so that no other tensor gets their ids

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for t in _tensors((args, kwargs)):
            if t.requires_grad and id(t) not in self._made:
                self.used[id(t)] = t
        result = func(*args, **kwargs)
        self._made.update((id(t), t) for t in _tensors(result))
        return result


class _Handing(TorchFunctionMode):
    """Hands torch functions other tensors in the place of these."""

    def __init__(self, these: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        super().__init__()
        self._others = {id(t): other for t, other in zip(these, others, strict=True)}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _mapped(lambda t: self._others.get(id(t), t), (args, kwargs or {}))
        return func(*given[0], **given[1])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(change, one) for one in value)
    if type(value) is dict:
        return {name: _mapped(change, one) for name, one in value.items()}
    return value
