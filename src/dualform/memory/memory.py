"""A memory in two forms: `Memory` keeps the pairs, `PrimalMemory` the weights they add up to."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import ReadingError
from dualform.memory.kernels import Dot, Kernel, nonzero, require_broadcast, require_rows


@dataclass(frozen=True, eq=False, repr=False)
class Memory:
    """y(q) = Σ_t κ(q, k_t) v_t: one value per key, read by similarity.

    >>> import torch
    >>> from dualform.memory import Exponential, Memory
    >>> k, v = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[10.0], [20.0]])
    >>> memory = Memory(k, v)
    >>> memory
    Memory(keys=(2, 2), values=(2, 1), kernel=Dot())
    >>> memory.read(torch.tensor([[2.0, 0.5]]))
    tensor([[30.]])

    Leading dimensions are a batch of memories, over which queries broadcast: here one set of keys
    and values for each of 8 sequences, shared by 4 heads.

    >>> heads = Memory(torch.randn(8, 1, 7, 3), torch.randn(8, 1, 7, 2), Exponential())
    >>> heads.read(torch.randn(8, 4, 5, 3)).shape
    torch.Size([8, 4, 5, 2])
    """

    keys: Float[Tensor, "*batch n d"]
    values: Float[Tensor, "*batch n m"]
    kernel: Kernel = field(default_factory=Dot)

    def __post_init__(self) -> None:
        require_rows("keys", self.keys)
        require_rows("values", self.values)
        if self.keys.shape[:-1] != self.values.shape[:-1]:
            raise ReadingError(
                f"keys of shape {tuple(self.keys.shape)} and values of shape "
                f"{tuple(self.values.shape)} do not pair up; every key needs one value: give "
                f"values of shape {(*self.keys.shape[:-1], self.values.shape[-1])}."
            )

    def __repr__(self) -> str:
        keys, values = tuple(self.keys.shape), tuple(self.values.shape)
        return f"Memory(keys={keys}, values={values}, kernel={self.kernel})"

    def __len__(self) -> int:
        """n, the number of pairs (in each memory of a batch).

        >>> len(Memory(torch.ones(8, 7, 3), torch.ones(8, 7, 2)))
        7
        """
        return self.keys.shape[-2]

    def __add__(self, other: "Memory") -> "Memory":
        """The memory of both sets of pairs.

        Where the kernel is not normalized reads add: (a + b).read(q) = a.read(q) + b.read(q).
        A normalized kernel divides by a sum over *all* keys, so there the read of a + b is the
        average of both reads, each weighed by its own share of that sum.

        >>> from dualform.memory import Exponential
        >>> k, v, q = torch.tensor([[1.0]]), torch.tensor([[2.0]]), torch.tensor([[3.0]])
        >>> (Memory(k, v) + Memory(k, v)).read(q)
        tensor([[12.]])
        >>> (Memory(k, v, Exponential()) + Memory(k, v, Exponential())).read(q)
        tensor([[2.]])
        """
        self._require_addable(other)
        keys = torch.cat([self.keys, other.keys], dim=-2)
        return Memory(keys, torch.cat([self.values, other.values], dim=-2), self.kernel)

    def scores(self, queries: Float[Tensor, "... q d"]) -> Float[Tensor, "... q n"]:
        """κ(q_i, k_t): the weight of every pair in the read of every query.

        >>> memory = Memory(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2, 1))
        >>> memory.scores(torch.tensor([[1.0, -1.0]]))
        tensor([[-1., -1.]])
        """
        return self.kernel(queries, self.keys)

    def read(self, queries: Float[Tensor, "... q d"]) -> Float[Tensor, "... q m"]:
        """Σ_t κ(q_i, k_t) v_t, in dual form: attention over the stored pairs.

        >>> memory = Memory(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> memory.read(torch.tensor([[1.0], [10.0]]))
        tensor([[ 1.,  2.],
                [10., 20.]])
        """
        return self.scores(queries) @ self.values

    def weights(self) -> Float[Tensor, "*batch m f"]:
        """W = Σ_t v_t φ(k_t)ᵀ: the weights a linear map has after storing every pair.

        >>> memory = Memory(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
        >>> memory.weights()
        tensor([[3., 6.]])
        """
        return self.values.mT @ self.kernel.features(self.keys)

    def primal(self) -> "PrimalMemory":
        """The same memory as weights W = Σ_t v_t φ(k_t)ᵀ, whatever the number of pairs.

        >>> from dualform.memory import EluPlusOne
        >>> memory = Memory(torch.randn(100, 3), torch.randn(100, 2), EluPlusOne(normalized=True))
        >>> q = torch.randn(5, 3)
        >>> torch.allclose(memory.primal().read(q), memory.read(q), atol=1e-5)
        True
        """
        z = self.kernel.features(self.keys).sum(-2) if self.kernel.normalized else None
        return PrimalMemory(self.weights(), self.kernel, z)

    def _require_addable(self, other: "Memory") -> None:
        if self.kernel != other.kernel:
            raise ReadingError(
                f"a memory read by {self.kernel} cannot be added to one read by {other.kernel}; "
                "give both the same kernel, or add what they read."
            )
        for name, mine, theirs in (
            ("keys", self.keys.shape, other.keys.shape),
            ("values", self.values.shape, other.values.shape),
        ):
            if (*mine[:-2], mine[-1]) != (*theirs[:-2], theirs[-1]):
                raise ReadingError(
                    f"{name} of shape {tuple(mine)} and {tuple(theirs)} cannot be added; "
                    "only the number of pairs, the last dimension but one, may differ."
                )


@dataclass(frozen=True, eq=False, repr=False)
class PrimalMemory:
    """y(q) = W φ(q), divided by z·φ(q) where the kernel is normalized: a memory as weights.

    W = Σ_t v_t φ(k_t)ᵀ and z = Σ_t φ(k_t); both add when memories do.

    >>> import torch
    >>> from dualform.memory import Memory
    >>> k, v = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
    >>> primal = Memory(k, v).primal()
    >>> primal
    PrimalMemory(W=(1, 2), kernel=Dot())
    >>> primal.W
    tensor([[3., 6.]])
    """

    W: Float[Tensor, "*batch m f"]
    kernel: Kernel
    z: Float[Tensor, "*batch f"] | None = None

    def __repr__(self) -> str:
        return f"PrimalMemory(W={tuple(self.W.shape)}, kernel={self.kernel})"

    def read(self, queries: Float[Tensor, "... q d"]) -> Float[Tensor, "... q m"]:
        """W φ(q_i) for every query (over z·φ(q_i) where normalized).

        >>> from dualform.memory import Polynomial
        >>> k, v, q = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]), torch.tensor([[1.0, 1.0]])
        >>> Memory(k, v, Polynomial(degree=2, offset=0.0)).primal().read(q)  # 3·(1 + 2)²
        tensor([[27.]])
        """
        phi = self._features(queries)
        y = phi @ self.W.mT
        return y if self.z is None else y / nonzero(phi @ self.z.unsqueeze(-1))

    def _features(self, queries: Tensor) -> Tensor:
        require_rows("queries", queries)
        require_broadcast(queries, "W", self.W)
        phi = self.kernel.features(queries)
        if phi.shape[-1] != self.W.shape[-1]:
            raise ReadingError(
                f"queries of shape {tuple(queries.shape)} have {phi.shape[-1]} features under "
                f"{self.kernel}, but W of shape {tuple(self.W.shape)} weighs {self.W.shape[-1]}; "
                "ask with queries as wide as the keys it was made of."
            )
        return phi
