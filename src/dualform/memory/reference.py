"""y(q) = Σ_t κ(q, k_t) v_t, one number at a time, in float64.

Slow and plain on purpose: the text against which `Memory.read` is tested, values and gradients.
It takes one memory (no batch) and shares no code with the kernels: `kappa` restates each formula.

>>> import torch
>>> from dualform.memory import Memory, reference
>>> memory = Memory(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]))
>>> reference.read(memory, torch.tensor([[1.0, 1.0]]))
tensor([[9.]], dtype=torch.float64)
"""

from functools import singledispatch

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.memory.kernels import (
    Cosine,
    Dot,
    EluPlusOne,
    Exponential,
    Kernel,
    Polynomial,
    Relu,
)
from dualform.memory.memory import Memory


def read(memory: Memory, queries: Float[Tensor, "q d"]) -> Float[Tensor, "q m"]:
    """Σ_t κ(q, k_t) v_t for each query, by a loop over the pairs.

    >>> memory = Memory(torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [4.0]]), Exponential())
    >>> read(memory, torch.tensor([[5.0]]))
    tensor([[3.]], dtype=torch.float64)
    """
    return torch.stack([_read_one(memory, q) for q in queries.double()])


def _read_one(memory: Memory, q: Float[Tensor, " d"]) -> Float[Tensor, " m"]:
    weights = [kappa(memory.kernel, q, k) for k in memory.keys.double()]
    total = sum(weights) if memory.kernel.normalized else 1
    if total == 0:
        total = 1  # a query that no key answers reads 0
    y = q.new_zeros(memory.values.shape[-1])
    for weight, v in zip(weights, memory.values.double(), strict=True):
        y = y + weight / total * v
    return y


@singledispatch
def kappa(kernel: Kernel, q: Float[Tensor, " d"], k: Float[Tensor, " d"]) -> Float[Tensor, ""]:
    """κ(q, k) of two single vectors, before any normalization.

    >>> kappa(Polynomial(degree=2, offset=1.0), torch.tensor([1.0]), torch.tensor([2.0]))
    tensor(9.)
    """
    raise NotImplementedError(f"register the plain formula of {kernel} with kappa.register")


def _dot(a: Float[Tensor, " d"], b: Float[Tensor, " d"]) -> Float[Tensor, ""]:
    total = a.new_zeros(())
    for a_i, b_i in zip(a, b, strict=True):
        total = total + a_i * b_i
    return total


@kappa.register(Dot)
def _(kernel: Dot, q: Tensor, k: Tensor) -> Tensor:
    return _dot(q, k)


@kappa.register(Exponential)
def _(kernel: Exponential, q: Tensor, k: Tensor) -> Tensor:
    scale = 1 / len(q) ** 0.5 if kernel.scale is None else kernel.scale
    return torch.exp(scale * _dot(q, k))


@kappa.register(Cosine)
def _(kernel: Cosine, q: Tensor, k: Tensor) -> Tensor:
    lengths = (_dot(q, q) * _dot(k, k)).sqrt()
    return _dot(q, k) / lengths if lengths > 0 else lengths


@kappa.register(Polynomial)
def _(kernel: Polynomial, q: Tensor, k: Tensor) -> Tensor:
    power = q.new_ones(())
    for _ in range(kernel.degree):
        power = power * (_dot(q, k) + kernel.offset)
    return power


@kappa.register(EluPlusOne)
def _(kernel: EluPlusOne, q: Tensor, k: Tensor) -> Tensor:
    def phi(x: Tensor) -> Tensor:
        return torch.stack([x_i + 1 if x_i > 0 else x_i.exp() for x_i in x])

    return _dot(phi(q), phi(k))


@kappa.register(Relu)
def _(kernel: Relu, q: Tensor, k: Tensor) -> Tensor:
    def phi(x: Tensor) -> Tensor:
        return torch.stack([x_i if x_i > 0 else 0 * x_i for x_i in x])

    return _dot(phi(q), phi(k))
