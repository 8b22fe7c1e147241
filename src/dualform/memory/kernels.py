"""κ(q, k): how much each stored key answers to each query.

    Kernel
    ├── Exponential     exp(scale q·k) / Σ_j exp(scale q·k_j): softmax attention
    └── FeatureMap      φ(q)·φ(k), with finite φ: the memory can also be read as weights
        ├── Dot         q·k: training of a linear map
        ├── Cosine      q·k / ‖q‖‖k‖
        ├── Polynomial  (q·k + offset)^degree
        ├── EluPlusOne  φ = elu + 1 ┐ divided by Σ_j φ(q)·φ(k_j) on request:
        └── Relu        φ = relu    ┘ linear attention

A new kernel is a frozen dataclass with one method: `features` of a `FeatureMap`, otherwise
`_weights`. Its plain twin is registered in `reference.py`.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from itertools import combinations_with_replacement
from operator import mul

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import ReadingError


class Kernel(ABC):
    """weights[i, j] = κ(q_i, k_j): a similarity of queries and keys.

    >>> import torch
    >>> kernel = Polynomial(degree=2)
    >>> kernel(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0], [0.0, -1.0]]))
    tensor([[16., 1.]])
    """

    @property
    def normalized(self) -> bool:
        """Whether the weights of one query sum to 1, so that its read is an average of values.

        >>> Exponential().normalized, Dot().normalized, Relu(normalized=True).normalized
        (True, False, True)
        """
        return False

    def __call__(
        self, queries: Float[Tensor, "*#batch q d"], keys: Float[Tensor, "*#batch n d"]
    ) -> Float[Tensor, "*batch q n"]:
        """The weight of every key for every query; leading dimensions broadcast.

        >>> Dot()(torch.ones(8, 5, 3), torch.ones(7, 3)).shape
        torch.Size([8, 5, 7])
        """
        require_same_space(queries, keys)
        return self._weights(queries, keys)

    @abstractmethod
    def _weights(
        self, queries: Float[Tensor, "*#batch q d"], keys: Float[Tensor, "*#batch n d"]
    ) -> Float[Tensor, "*batch q n"]: ...

    def features(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch f"]:
        """φ(x), where κ(q, k) ∝ φ(q)·φ(k) with finite φ; an error where there is none.

        >>> Exponential().features(torch.ones(2))
        Traceback (most recent call last):
        dualform.errors.ReadingError: Exponential(scale=None) has no finite features; ...
        """
        raise ReadingError(
            f"{self} has no finite features; read it in dual form with Memory.read, or choose a "
            "kernel that has them: Dot, Cosine, Polynomial, EluPlusOne, Relu."
        )


@dataclass(frozen=True)
class Exponential(Kernel):
    """κ(q, k_j) = exp(scale q·k_j) / Σ_i exp(scale q·k_i): softmax attention.

    `scale` is 1/√d unless given. Its features are those of the exponential series: infinitely many.

    >>> kernel = Exponential(scale=1.0)
    >>> kernel(torch.tensor([[1.0]]), torch.tensor([[0.0], [0.0]]) + 1000)
    tensor([[0.5000, 0.5000]])
    """

    scale: float | None = None

    @property
    def normalized(self) -> bool:
        """Always.

        >>> Exponential().normalized
        True
        """
        return True

    def _weights(
        self, queries: Float[Tensor, "*#batch q d"], keys: Float[Tensor, "*#batch n d"]
    ) -> Float[Tensor, "*batch q n"]:
        scale = queries.shape[-1] ** -0.5 if self.scale is None else self.scale
        # Scaled before the product, which then overflows later; softmax subtracts the maximum.
        return ((queries * scale) @ keys.mT).softmax(-1)


class FeatureMap(Kernel):
    """κ(q, k) = φ(q)·φ(k), divided by Σ_j φ(q)·φ(k_j) where `normalized`.

    A query to which no key answers (the sum is 0, possible under `Relu`) reads 0.

    >>> class Square(FeatureMap):
    ...     def features(self, x):
    ...         return x**2
    >>> Square()(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0]]))
    tensor([[13.]])
    """

    @abstractmethod
    def features(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch f"]:
        """φ(x), applied to each row.

        >>> Relu().features(torch.tensor([[-1.0, 2.0]]))
        tensor([[0., 2.]])
        """

    def _weights(
        self, queries: Float[Tensor, "*#batch q d"], keys: Float[Tensor, "*#batch n d"]
    ) -> Float[Tensor, "*batch q n"]:
        weights = self.features(queries) @ self.features(keys).mT
        return weights / nonzero(weights.sum(-1, keepdim=True)) if self.normalized else weights


@dataclass(frozen=True)
class Dot(FeatureMap):
    """κ(q, k) = q·k: the memory that training leaves in a linear map.

    >>> Dot()(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, -1.0]]))
    tensor([[11., -2.]])
    """

    def features(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """φ(x) = x.

        >>> Dot().features(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
        """
        return x


@dataclass(frozen=True)
class Cosine(FeatureMap):
    """κ(q, k) = q·k / ‖q‖‖k‖, at every scale of q and k; 0 where either is 0.

    >>> Cosine()(torch.tensor([[3e30, 4e30]]), torch.tensor([[1e-30, 0.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.0000]])
    """

    def features(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """φ(x) = x / ‖x‖.

        >>> Cosine().features(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
        """
        # Squares overflow and vanish long before their numbers do. Dividing by a constant first
        # changes neither x/‖x‖ nor any of its derivatives, so it may be detached.
        x = x / nonzero(x.detach().abs().amax(-1, keepdim=True))
        return x / nonzero(x.square().sum(-1, keepdim=True)).sqrt()


@dataclass(frozen=True)
class Polynomial(FeatureMap):
    """κ(q, k) = (q·k + offset)^degree.

    >>> kernel = Polynomial(degree=2, offset=1.0)
    >>> q, k = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    >>> kernel(q, k)
    tensor([[144.]])
    >>> kernel.features(q) @ kernel.features(k).mT
    tensor([[144.]])
    """

    degree: int = 2
    offset: float = 1.0

    def __post_init__(self) -> None:
        if self.degree < 1 or self.offset < 0:
            raise ReadingError(
                f"{self} is no kernel with features; degree must be a whole number from 1 and "
                "offset must not be negative."
            )

    def features(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch f"]:
        """All monomials of (x, √offset) of this degree, each times √(its number of orderings).

        That is C(d + degree, degree) of them (C(d + degree - 1, degree) where offset is 0).

        >>> Polynomial(degree=2, offset=0.0).features(torch.tensor([1.0, 3.0]))  # x², √2 xy, y²
        tensor([1.0000, 4.2426, 9.0000])
        """
        if self.offset:
            x = torch.nn.functional.pad(x, (0, 1), value=math.sqrt(self.offset))
        monomials = list(combinations_with_replacement(range(x.shape[-1]), self.degree))
        factors = torch.tensor(monomials, device=x.device).unbind(-1)
        sizes = x.new_tensor([math.sqrt(_orderings(monomial)) for monomial in monomials])
        return sizes * reduce(mul, (x[..., factor] for factor in factors))

    def _weights(
        self, queries: Float[Tensor, "*#batch q d"], keys: Float[Tensor, "*#batch n d"]
    ) -> Float[Tensor, "*batch q n"]:
        return (queries @ keys.mT + self.offset) ** self.degree


@dataclass(frozen=True)
class EluPlusOne(FeatureMap):
    """κ(q, k) = φ(q)·φ(k) with φ = elu + 1; with `normalized`, linear attention.

    >>> EluPlusOne(normalized=True)(torch.zeros(1, 2), torch.tensor([[2.0, 0.0], [0.0, 11.0]]))
    tensor([[0.2353, 0.7647]])
    """

    normalized: bool = False

    def features(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """φ(x) = x + 1 where x > 0, else exp(x).

        >>> EluPlusOne().features(torch.tensor([2.0, 0.0]))
        tensor([3., 1.])
        """
        # Not elu(x) + 1: adding 1 to expm1(x) rounds every x below -17 (float32) to 0.
        return x.clamp(max=0).exp() + x.relu()


@dataclass(frozen=True)
class Relu(FeatureMap):
    """κ(q, k) = φ(q)·φ(k) with φ = relu; with `normalized`, linear attention.

    >>> Relu(normalized=True)(torch.ones(1, 2), torch.tensor([[1.0, -5.0], [1.0, 2.0]]))
    tensor([[0.2500, 0.7500]])
    """

    normalized: bool = False

    def features(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """φ(x) = max(x, 0).

        >>> Relu().features(torch.tensor([2.0, -1.0]))
        tensor([2., 0.])
        """
        return x.relu()


def nonzero(divisor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1 where the divisor is 0, so that 0/0 reads 0, in values and in gradients.

    >>> torch.tensor([6.0, 0.0]) / nonzero(torch.tensor([2.0, 0.0]))
    tensor([3., 0.])
    """
    return divisor.masked_fill(divisor == 0, 1)


def require_rows(name: str, x: Tensor) -> None:
    """Raise unless x is (…, rows, columns).

    >>> require_rows("queries", torch.ones(3))
    Traceback (most recent call last):
    dualform.errors.ReadingError: queries have shape (3,), but rows (…, q, d) were expected; ...
    """
    if x.ndim < 2:
        rows = {"queries": "q, d", "keys": "n, d", "values": "n, m"}[name]
        raise ReadingError(
            f"{name} have shape {tuple(x.shape)}, but rows (…, {rows}) were expected; "
            f"for a single row write {name}[None]."
        )


def require_broadcast(queries: Tensor, name: str, stored: Tensor) -> None:
    """Raise unless the leading dimensions of the queries fit those of what is stored.

    >>> require_broadcast(torch.ones(2, 5, 3), "keys", torch.ones(4, 7, 3))
    Traceback (most recent call last):
    dualform.errors.ReadingError: queries of shape (2, 5, 3) do not fit keys of shape (4, 7, 3); ...
    """
    mine, theirs = queries.shape[:-2], stored.shape[:-2]
    pairs = zip(reversed(mine), reversed(theirs), strict=False)
    if any(a != b and 1 not in (a, b) for a, b in pairs):
        raise ReadingError(
            f"queries of shape {tuple(queries.shape)} do not fit {name} of shape "
            f"{tuple(stored.shape)}; their leading dimensions {tuple(mine)} and {tuple(theirs)} "
            "must be equal, 1 or absent."
        )


def require_same_space(queries: Tensor, keys: Tensor) -> None:
    """Raise unless every query can be compared with every key.

    >>> require_same_space(torch.ones(5, 3), torch.ones(7, 4))
    Traceback (most recent call last):
    dualform.errors.ReadingError: queries of shape (5, 3) have 3 columns, but keys of shape ...
    """
    require_rows("queries", queries)
    require_rows("keys", keys)
    if queries.shape[-1] != keys.shape[-1]:
        raise ReadingError(
            f"queries of shape {tuple(queries.shape)} have {queries.shape[-1]} columns, but keys "
            f"of shape {tuple(keys.shape)} have {keys.shape[-1]}; ask with queries of shape "
            f"(…, q, {keys.shape[-1]})."
        )
    require_broadcast(queries, "keys", keys)


def _orderings(monomial: tuple[int, ...]) -> int:
    """degree! / Π multiplicity!: how often expanding (q·k)^degree produces this monomial."""
    repeats = map(math.factorial, Counter(monomial).values())
    return math.factorial(len(monomial)) // math.prod(repeats)
