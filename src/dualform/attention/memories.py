"""Every layer as a `Memory`: its context's keys and values, read by a kernel that is the layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dualform.attention.kinds import (
    Layer,
    averages,
    described,
    options_of,
    record_of,
    with_weights,
)
from dualform.attention.kinds import kind as kind_of
from dualform.attention.linear import ELU_PLUS_ONE
from dualform.attention.primal import Primal
from dualform.errors import AttentionError
from dualform.memory import EluPlusOne, Exponential, FeatureMap, Kernel, Memory


@dataclass(frozen=True)
class LayerKernel(Kernel):
    """κ(q, k_j): the weight of each key in an attention layer of this kind.

    >>> kernel = LayerKernel("batch_norm")
    >>> kernel(torch.randn(5, 3), torch.randn(7, 3)).sum(-1)
    tensor([1.0000, 1.0000, 1.0000, 1.0000, 1.0000])
    """

    kind: str | Primal | Layer
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def normalized(self) -> bool:
        """Whether the layer averages its values."""
        return averages(self.kind, self.options)

    def _weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        layer = kind_of(self.kind, **self.options)
        nothing = torch.zeros_like(keys[..., :1])
        return with_weights(layer, queries, keys, nothing)[1]


@dataclass(frozen=True)
class Averaging(FeatureMap):
    """κ(q, k_j) = φ(q)·φ(k_j) / Σ_i φ(q)·φ(k_i) for features of one's own: linear attention.

    >>> from dualform.memory import Relu
    >>> Averaging(Relu())(torch.ones(1, 2), torch.tensor([[1.0, -5.0], [1.0, 2.0]]))
    tensor([[0.2500, 0.7500]])
    """

    of: FeatureMap

    @property
    def normalized(self) -> bool:
        """Always."""
        return True

    def features(self, x: Tensor) -> Tensor:
        """φ(x)."""
        return self.of.features(x)


def memory(kind: str | Primal | Layer, k: Tensor, v: Tensor, **options: Any) -> Memory:
    """The context of a layer as a memory: `read(q)` is the layer, `scores(q)` its weights.

    Where features are finite, `primal()` is the weights that a decoder carries.

    >>> q, k, v = torch.randn(3, 2, 5, 4).unbind()
    >>> context = memory("linear", k, v)
    >>> context.primal()
    PrimalMemory(W=(2, 4, 4), kernel=EluPlusOne(normalized=True))
    >>> from dualform import attention
    >>> torch.allclose(context.read(q), attention.linear(q, k, v), atol=1e-5)
    True
    """
    return Memory(k, v, _kernel(kind, options))


def _kernel(kind: str | Primal | Layer, options: dict[str, Any]) -> Kernel:
    options_of(kind, options)
    if not record_of(kind).is_linear:
        raise AttentionError(
            f"kind={described(kind)} is not linear in its values, so that no kernel of queries and "
            "keys is it; a memory can be any other kind."
        )
    if kind == "softmax" and not options.keys() - {"scale"}:
        return Exponential(options.get("scale"))
    if kind == "linear" and not options.keys() - {"features", "normalized"}:
        features: FeatureMap = options.get("features", ELU_PLUS_ONE)
        if not options.get("normalized", True):
            return features
        return EluPlusOne(normalized=True) if features == ELU_PLUS_ONE else Averaging(features)
    return LayerKernel(kind, options)
