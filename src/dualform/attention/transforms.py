"""What a primal problem does to its inputs before the features: normalize them, or use fewer.

A transform of one's own has `apply`, and `formula` for the derivation. It is a frozen dataclass, or
an `nn.Module` where it learns; one that looks at `keys` says so by `depends_on_keys = True`:

>>> from dataclasses import dataclass
>>> from dualform.attention import Primal
>>> @dataclass(frozen=True)
... class Halved(Transform):
...     formula = r"x / 2"
...     def apply(self, x, keys):
...         return x / 2
>>> layer = Primal(keys=(Halved(),)).attention()
>>> layer(*torch.randn(3, 2, 5, 8).unbind()).shape
torch.Size([2, 5, 8])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dualform.attention.batch_norm import statistics
from dualform.attention.shapes import for_each_query_head
from dualform.attention.shorten import Pool, shorten
from dualform.memory import Cosine


class Transform(ABC):
    """x → T(x), of queries and keys alike; it may depend on all keys.

    >>> UnitLength().apply(torch.tensor([[3.0, 4.0]]), torch.ones(1, 2))
    tensor([[0.6000, 0.8000]])
    """

    formula: ClassVar[str]
    """T(x) in LaTeX."""
    depends_on_keys: ClassVar[bool] = False
    """Whether T changes with the keys that are seen; only then are any shown to `apply`."""

    @abstractmethod
    def apply(self, x: Tensor, keys: Tensor) -> Tensor:
        """T of rows (…, n, d), given the keys (…, S, d) that are seen, all by the same queries."""

    def shorten(self, k: Tensor, v: Tensor, open_end: bool) -> tuple[Tensor, Tensor]:
        """The data that are left; `open_end` keeps an incomplete block as it is."""
        return k, v


@dataclass(frozen=True)
class BatchNorm(Transform):
    """x → (x − βμ)/√(σ² + ε), μ and σ² of the keys: Attention-BN; or only x → x − βμ.

    >>> keys = torch.tensor([[1.0], [3.0]])
    >>> BatchNorm(eps=0.0).apply(torch.tensor([[4.0]]), keys)
    tensor([[2.]])
    >>> BatchNorm(beta=0.5, variance=False).apply(torch.tensor([[4.0]]), keys)
    tensor([[3.]])
    """

    beta: float | Tensor = 1.0
    eps: float = 1e-5
    variance: bool = True
    depends_on_keys = True

    @property
    def formula(self) -> str:  # type: ignore[override]
        """T(x) in LaTeX."""
        divisor = r" \oslash \sqrt{\sigma^2 + \epsilon}" if self.variance else ""
        return rf"(x - \beta\mu){divisor}"

    def apply(self, x: Tensor, keys: Tensor) -> Tensor:
        """(x − βμ)/√(σ² + ε), or x − βμ."""
        mean, variance, _ = statistics(x, keys)
        centered = x - self.beta * for_each_query_head(mean, x)
        if not self.variance:
            return centered
        return centered / for_each_query_head((variance + self.eps).sqrt(), x)


@dataclass(frozen=True)
class RmsNorm(Transform):
    """x → x / √(mean x² + ε): every query and key by itself.

    >>> RmsNorm(eps=0.0).apply(torch.tensor([[1.0, 7.0]]), torch.ones(1, 2))
    tensor([[0.2000, 1.4000]])
    """

    eps: float = 1e-5
    formula = r"x / \sqrt{\tfrac1D \lVert x \rVert^2 + \epsilon}"

    def apply(self, x: Tensor, keys: Tensor) -> Tensor:
        """x / √(mean x² + ε)."""
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


@dataclass(frozen=True)
class UnitLength(Transform):
    """x → x / ‖x‖: cosine attention.

    >>> UnitLength().apply(torch.tensor([[0.0, 5.0]]), torch.ones(1, 2))
    tensor([[0., 1.]])
    """

    formula = r"x / \lVert x \rVert"

    def apply(self, x: Tensor, keys: Tensor) -> Tensor:
        """x / ‖x‖."""
        return Cosine().features(x)


@dataclass(frozen=True)
class Shorten(Transform):
    """Blocks of `factor` keys and values become one each: less data to fit, Attention-SH.

    >>> k = torch.tensor([[1.0], [3.0], [8.0]])
    >>> Shorten(2).shorten(k, k, open_end=True)[0]
    tensor([[2.],
            [8.]])
    """

    factor: int = 2
    pool: Pool = "mean"
    formula = "x"
    depends_on_keys = True

    def apply(self, x: Tensor, keys: Tensor) -> Tensor:
        """x: queries stay as they are."""
        return x

    def shorten(self, k: Tensor, v: Tensor, open_end: bool) -> tuple[Tensor, Tensor]:
        """One row a block; an incomplete last block is pooled, or kept as it is."""
        n = k.shape[-2]
        whole = n // self.factor * self.factor if open_end else n
        short = shorten(k[..., :whole, :], v[..., :whole, :], self.factor, self.pool)
        k, v = (torch.cat([s, x[..., whole:, :]], -2) for s, x in ((short.k, k), (short.v, v)))
        return k, v

    def lengthen(self, x: Tensor, rows: int, open_end: bool) -> Tensor:
        """Each block's row repeated for all of its keys, so that pooling gives it back.

        >>> Shorten(2).lengthen(torch.tensor([[5.0], [7.0]]), 3, open_end=False).flatten()
        tensor([5., 5., 7.])
        """
        whole = rows // self.factor * self.factor if open_end else rows
        blocks = -(-whole // self.factor)
        repeated = x[:blocks].repeat_interleave(self.factor, 0)[:whole]
        return torch.cat([repeated, x[blocks:]])
