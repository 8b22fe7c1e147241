"""x ← C(x + ∇G(x)): a residual attention step and what keeps it from running away."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.normalizer import LogNormalizer
from dualform.memory.kernels import nonzero


class Contraction(ABC):
    """What a step ends with, and the penalty that makes the step descend an energy.

    >>> import torch
    >>> Decay(0.5)(torch.tensor([2.0, 4.0]))
    tensor([1., 2.])
    """

    symmetric: bool = False
    """Whether the step's Jacobian is symmetric, so that conjugate gradients apply."""

    @abstractmethod
    def __call__(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """C(y)."""

    @abstractmethod
    def penalty(
        self, x: Float[Tensor, "*batch d"], residual: bool
    ) -> Float[Tensor, "*batch"] | float:
        """What is added to −G(x) to give the energy."""


@dataclass(frozen=True)
class Decay(Contraction):
    """C(y) = λ y, λ ≤ 1: the energy is (1 − λ)/2λ ‖x‖² − G(x), or ‖x‖²/2λ − G(x) without residual.

    >>> import torch
    >>> Decay(0.5).penalty(torch.tensor([2.0]), residual=True)
    tensor(2.)
    """

    rate: float
    symmetric = True

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise FamilyError(f"rate={self.rate} does not contract; it must lie in (0, 1].")

    def __call__(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """λ y."""
        return self.rate * y

    def penalty(self, x: Float[Tensor, "*batch d"], residual: bool) -> Float[Tensor, "*batch"]:
        """Half a curvature times ‖x‖²."""
        curvature = (1 - self.rate) / self.rate if residual else 1 / self.rate
        return curvature * x.square().sum(-1) / 2


@dataclass(frozen=True)
class Project(Contraction):
    """C(y) = r y/‖y‖: to the sphere of radius r, as cosine similarity does.

    G is convex, so among the points of the sphere C(∇G) is where its tangent is highest: from a
    point of the sphere on, −G never rises.

    >>> import torch
    >>> Project(radius=5.0)(torch.tensor([3.0, 4.0]))
    tensor([3., 4.])
    """

    radius: float = 1.0

    def __call__(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """r y/‖y‖; 0 stays 0."""
        return self.radius * y / nonzero(y.square().sum(-1, keepdim=True)).sqrt()

    def penalty(self, x: Float[Tensor, "*batch d"], residual: bool) -> float:
        """None."""
        return 0.0


@dataclass(frozen=True)
class Normalize(Contraction):
    """C(y) = (y − mean y)/std y, row by row: layer normalization, without scale and shift.

    It is a projection to a sphere of radius √d in the plane of mean 0: from a point of that sphere
    on, −G never rises.

    >>> import torch
    >>> Normalize()(torch.tensor([1.0, 3.0]))
    tensor([-1.,  1.])
    """

    def __call__(self, y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """(y − mean)/std, of the d numbers of a row."""
        centered = y - y.mean(-1, keepdim=True)
        return centered / nonzero(centered.square().mean(-1, keepdim=True)).sqrt()

    def penalty(self, x: Float[Tensor, "*batch d"], residual: bool) -> float:
        """None."""
        return 0.0


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """x ← C(x + ∇G(x)), or C(∇G(x)) without residual: a step up G, and a contraction.

    Without a contraction x runs away, as ∇G is what attention adds. With one, `energy` never rises
    (where it ends on a sphere: from a start on that sphere).

    >>> import torch
    >>> from dualform.families import Empirical
    >>> step = AttentionStep(LogNormalizer(Empirical(torch.eye(2)), 0.1), Decay(0.5))
    >>> x = torch.tensor([0.6, 0.4])
    >>> for _ in range(50):
    ...     x = step(x)
    >>> x.round(decimals=3)
    tensor([1., 0.])
    """

    G: LogNormalizer
    contraction: Contraction
    residual: bool = True

    @property
    def symmetric(self) -> bool:
        """Whether the step's Jacobian is symmetric."""
        return self.contraction.symmetric

    def __call__(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """One step."""
        read = self.G.mean(x)
        return self.contraction(x + read if self.residual else read)

    def energy(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """What no step raises: the contraction's penalty minus G(x)."""
        return self.contraction.penalty(x, self.residual) - self.G.value(x)
