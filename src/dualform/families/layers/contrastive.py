"""Contrastive similarity: a family of points on the sphere, whose limit is von Mises–Fisher."""

import math

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import FamilyError
from dualform.families.checks import require_temperature
from dualform.families.measures import Empirical, Sphere
from dualform.families.normalizer import LogNormalizer


class InfoNCE(nn.Module):
    """−log p(k_i | q_i), p ∝ exp(q·k / T) over all keys, q and k brought to the unit sphere.

    That is (G(q_i) − q_i·k_i) / T: the log-normalizer of the keys as a measure on the sphere. It is
    cross-entropy of cosines. (van den Oord, Li and Vinyals 2018.)

    >>> import torch
    >>> q, k = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    >>> InfoNCE(temperature=1.0)(q, k)  # log(1 + 1/e)
    tensor([0.3133, 0.3133])
    """

    def __init__(self, temperature: float = 0.1) -> None:
        super().__init__()
        require_temperature(temperature)
        self.temperature = temperature

    def forward(
        self, queries: Float[Tensor, "n d"], keys: Float[Tensor, "m d"]
    ) -> Float[Tensor, " n"]:
        """The loss of each query; key i belongs to query i, and all others are negatives."""
        if len(keys) < len(queries):
            raise FamilyError(
                f"{len(queries)} queries have {len(keys)} keys; give each its own, in the same "
                "order, and negatives after them."
            )
        q, k = F.normalize(queries, dim=-1), F.normalize(keys, dim=-1)
        G = LogNormalizer(Empirical(k), self.temperature)
        return (G.value(q) - (q * k[: len(q)]).sum(-1)) / self.temperature

    def limit(
        self, queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"], count: int
    ) -> Float[Tensor, " n"]:
        """The loss against `count` keys spread evenly over the sphere: von Mises–Fisher's G.

        >>> import torch
        >>> q, many = torch.randn(2, 3), torch.randn(100_000, 3)
        >>> loss, limit = InfoNCE(0.5)(q, many), InfoNCE(0.5).limit(q, many[:2], 100_000)
        >>> torch.allclose(loss, limit, atol=0.05)
        True
        """
        q, k = F.normalize(queries, dim=-1), F.normalize(keys, dim=-1)
        G = LogNormalizer(Sphere(q.shape[-1]), self.temperature)
        return (G.value(q) - (q * k).sum(-1)) / self.temperature + math.log(count)
