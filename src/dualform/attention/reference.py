"""Every layer one query at a time, in float64, by the definition: the text of the fast ones' tests.

A reference takes one head, (L, D), (S, D) and (S, M), and which keys each query sees (L, S). It
shares no code with the layers. Batch normalization normalizes queries and keys, as the derivation
says.

>>> import torch
>>> q, k, v = torch.zeros(1, 2), torch.eye(2), torch.tensor([[1.0], [3.0]])
>>> softmax(q, k, v, torch.ones(1, 2, dtype=torch.bool))
tensor([[2.]], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dualform.families.reference import entmax as by_halving

Read = Callable[[Tensor, Tensor, Tensor], Tensor]


def softmax(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float | None = None) -> Tensor:
    """Σ_j exp(scale q·k_j) v_j / Σ_j exp(scale q·k_j) over the keys that are seen.

    >>> sees = torch.tensor([[True, False]])
    >>> softmax(torch.ones(1, 1), torch.ones(2, 1), torch.tensor([[5.0], [7.0]]), sees)
    tensor([[5.]], dtype=torch.float64)
    """
    return _each(q, k, v, sees, lambda q, k, v: _average(q, k, v, scale))


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Tensor,
    features: Callable[[Tensor], Tensor],
    normalized: bool = True,
) -> Tensor:
    """Σ_j φ(q)·φ(k_j) v_j, over Σ_j φ(q)·φ(k_j) where normalized.

    >>> sees = torch.ones(1, 2, dtype=torch.bool)
    >>> linear(torch.ones(1, 1), torch.ones(2, 1), torch.tensor([[5.0], [7.0]]), sees, torch.relu)
    tensor([[6.]], dtype=torch.float64)
    """

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = [(features(q) * features(k_j)).sum() for k_j in k]
        total = sum(weights) if normalized else 1
        y = sum((w * v_j for w, v_j in zip(weights, v, strict=True)), torch.zeros_like(v[0]))
        return y if total == 0 else y / total

    return _each(q, k, v, sees, read)


def batch_norm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Tensor,
    scale: float | None = None,
    beta: float = 1.0,
    eps: float = 1e-5,
    variance: bool = True,
) -> Tensor:
    """Softmax attention of (q − βμ)/s to (k − βμ)/s, μ and s² = σ² + ε over the keys that are seen.

    Without the variance s is 1.

    >>> q, k, v = torch.randn(3, 4, 2).unbind()
    >>> sees = torch.ones(4, 4, dtype=torch.bool)
    >>> y = batch_norm(q, k, v, sees)
    >>> torch.allclose(batch_norm(q + 1, k + 1, v, sees), y)
    True
    """

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mu = sum(k, torch.zeros_like(q)) / len(k)
        squares = sum(((k_j - mu) ** 2 for k_j in k), torch.zeros_like(q)) / len(k)
        s = (squares + eps).sqrt() if variance else 1.0
        return _average((q - beta * mu) / s, (k - beta * mu) / s, v, scale)

    return _each(q, k, v, sees, read)


def entmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Tensor,
    scale: float | None = None,
    alpha: float = 1.5,
) -> Tensor:
    """Σ_j p_j v_j with p the entmax of the logits of the keys that are seen, found by halving.

    >>> sees = torch.ones(1, 2, dtype=torch.bool)
    >>> entmax(torch.ones(1, 1), torch.tensor([[4.0], [0.0]]), torch.tensor([[5.0], [7.0]]), sees)
    tensor([[5.]], dtype=torch.float64)
    """

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = 1 / len(q) ** 0.5 if scale is None else scale
        p = by_halving([float((q * k_j).sum()) * size for k_j in k], alpha)
        return sum((w * v_j for w, v_j in zip(p, v, strict=True)), torch.zeros_like(v[0]))

    return _each(q, k, v, sees, read)


def robust(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Tensor,
    rounds: int = 2,
    sparsity: float | None = None,
    published_heads: int | None = None,
    symmetric: bool = False,
) -> Tensor:
    """Softmax attention to keys that went through rounds of principal component pursuit.

    `sees` says which keys a key sees, and so does a query at its place. With `published_heads`, the
    number of heads, it is the published variant.

    >>> q, k, v = torch.zeros(2, 2), torch.eye(2), torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    >>> robust(q, k, v, torch.ones(2, 2, dtype=torch.bool), rounds=1)[0]
    tensor([2., 0.], dtype=torch.float64)
    """
    q, K, v = q.double(), k.double(), v.double()
    n, D = K.shape
    S, L, Y, cleaned = (torch.zeros_like(K) for _ in range(4))
    cleaned += K
    for made in range(rounds):
        if made:
            L = softmax(cleaned, cleaned, v, sees)
        for j in range(n):
            number = int(sees[j].sum())
            norm = float(K[sees[j]].abs().sum())
            mu = number * D / (4 * norm) if norm else float("inf")
            weight = max(number, D) ** -0.5 if sparsity is None else sparsity
            bound, sign = weight / mu, 1
            if published_heads is not None:
                mu, sign = mu * published_heads, -1
                bound = (4.0 if sparsity is None else sparsity) * mu
            for d in range(D):
                if made:
                    Y[j, d] += mu * (K[j, d] - L[j, d] - S[j, d])
                x = float(K[j, d] - L[j, d] + Y[j, d] / mu)
                S[j, d] = max(abs(x) - bound, 0.0) * (1 if x > 0 else -1)
                cleaned[j, d] = K[j, d] - S[j, d] + sign * Y[j, d] / mu
    return softmax(cleaned if symmetric else q, cleaned, v, sees)


def shortened(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: int,
    lead: int,
    causal: bool,
    inner: Callable[..., Tensor],
) -> Tensor:
    """One head of scaled heads: each query reads the shortened keys of its past by `inner`.

    >>> q, k, v = torch.randn(3, 4, 2).unbind()
    >>> sees = torch.ones(4, 4, dtype=torch.bool)
    >>> torch.equal(shortened(q, k, v, 1, 0, False, softmax), softmax(q, k, v, sees))
    True
    """
    rows = []
    for i, q_i in enumerate(q.double()):
        until = min(i + 1, len(k)) if causal else len(k)
        short_k, short_v = (_shorten(x.double()[:until], factor, lead, causal) for x in (k, v))
        sees = torch.ones(1, len(short_k), dtype=torch.bool)
        rows.append(inner(q_i[None], short_k, short_v, sees)[0])
    return torch.stack(rows)


def _shorten(x: Tensor, factor: int, lead: int, causal: bool) -> Tensor:
    """Means of blocks; under causality the last block stays as it is until it is complete."""
    rows = list(x[:lead])
    for start in range(lead, len(x), factor):
        block = x[start : start + factor]
        rows += list(block) if causal and len(block) < factor else [block.mean(0)]
    return torch.stack(rows)


def _each(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, read: Read) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    rows = [
        read(q_i, k[seen], v[seen]) if seen.any() else v.new_zeros(v.shape[1])
        for q_i, seen in zip(q, sees, strict=True)
    ]
    return torch.stack(rows)


def _average(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    scale = 1 / len(q) ** 0.5 if scale is None else scale
    logits = [(q * k_j).sum() * scale for k_j in k]
    weights = torch.stack([(logit - max(logits)).exp() for logit in logits])
    return (
        sum((w * v_j for w, v_j in zip(weights, v, strict=True)), torch.zeros_like(v[0]))
        / weights.sum()
    )
