"""Where the iteration starts: samples of distributions, and token embeddings of real text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Start = Callable[[int, int, torch.Generator], Tensor]


def gaussian(count: int, width: int, generator: torch.Generator) -> Tensor:
    """Independent standard normals."""
    return torch.randn(count, width, generator=generator)


def uniform(count: int, width: int, generator: torch.Generator) -> Tensor:
    """A cube of variance 1: lighter tails than a Gaussian's."""
    return (torch.rand(count, width, generator=generator) - 0.5) * 12**0.5


def student(count: int, width: int, generator: torch.Generator) -> Tensor:
    """Student's t with 5 degrees of freedom, coordinate by coordinate: heavy tails."""
    normal = torch.randn(6, count, width, generator=generator)
    return normal[0] / (normal[1:].square().mean(0) * 5 / 3).sqrt()


def mixture(count: int, width: int, generator: torch.Generator) -> Tensor:
    """Four Gaussians at random places, standardized."""
    centers = 2 * torch.randn(4, width, generator=generator)
    chosen = torch.randint(4, (count,), generator=generator)
    x = centers[chosen] + torch.randn(count, width, generator=generator)
    return (x - x.mean(0)) / x.std(0)


def tokens(count: int, width: int, generator: torch.Generator) -> Tensor:
    """Embeddings of words of Python's documentation, `count` drawn by frequency, standardized."""
    table, frequencies = _embeddings()
    x = table[:, :width][torch.multinomial(frequencies, count, True, generator=generator)]
    x = x + 0.01 * torch.randn(x.shape, generator=generator)  # the same word is not the same token
    return (x - x.mean(0)) / x.std(0)


STARTS: dict[str, Start] = {
    "gaussian": gaussian,
    "uniform": uniform,
    "student": student,
    "mixture": mixture,
    "tokens": tokens,
}


@cache
def _embeddings(vocabulary: int = 2000, window: int = 4) -> tuple[Tensor, Tensor]:
    """Positive pointwise mutual information of neighboring words, its leading singular vectors.

    (Levy and Goldberg, NeurIPS 2014: what skip-gram with negative sampling factorizes.)
    """
    from pydoc_data.topics import topics

    words = re.findall(r"[a-z_]+|[^\sa-z_]", "\n".join(topics.values()).lower())
    common = Counter(words).most_common(vocabulary)
    index = {word: i for i, (word, _) in enumerate(common)}
    ids = torch.tensor([index.get(word, -1) for word in words])
    U, S, _ = torch.linalg.svd(_ppmi(ids, len(common), window))
    frequencies = torch.tensor([float(n) for _, n in common])
    return U * S.sqrt(), frequencies**0.75


def _ppmi(ids: Tensor, size: int, window: int) -> Tensor:
    counts = torch.zeros(size * size)
    for gap in range(1, window + 1):
        left, right = ids[:-gap], ids[gap:]
        known = (left >= 0) & (right >= 0)
        pairs = left[known] * size + right[known]
        counts += torch.bincount(pairs, minlength=size * size)
    counts = counts.reshape(size, size)
    counts = counts + counts.T
    expected = counts.sum(0) * counts.sum(1, keepdim=True) / counts.sum()
    return (counts / expected.clamp(min=1e-12)).clamp(min=1e-12).log().clamp(min=0)
