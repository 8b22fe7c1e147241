"""Attention as an exponential family: G(η) = log ∫ exp(η·x) h(dx), and attention is ∇G.

A base measure h and one function give energies (−G), attention (∇G), its Jacobian (∇²G, a
covariance), entropies and divergences (by its conjugate), and layers: over points softmax
attention, over bits sigmoids, over the sphere contrastive similarity.

>>> import torch
>>> from dualform.families import Empirical, LogNormalizer
>>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
>>> G = LogNormalizer(Empirical(x), temperature=0.5)
>>> G.mean(torch.tensor([2.0, 0.0]))
tensor([0.9814, 0.0180])
>>> torch.linalg.eigvalsh(G.jacobian(torch.tensor([2.0, 0.0]))) >= 0
tensor([True, True])

`families.layers` builds on it, `families.fixed_points` iterates it.
"""

from dualform.families.fenchel_young import Tsallis, entmax, sparsemax
from dualform.families.measures import (
    Chain,
    Empirical,
    Gaussian,
    Hypercube,
    Interval,
    Laplace,
    Measure,
    Mixture,
    Poisson,
    Product,
    Pushforward,
    Sphere,
)
from dualform.families.normalizer import LogNormalizer

__all__ = [
    "Chain",
    "Empirical",
    "Gaussian",
    "Hypercube",
    "Interval",
    "Laplace",
    "LogNormalizer",
    "Measure",
    "Mixture",
    "Poisson",
    "Product",
    "Pushforward",
    "Sphere",
    "Tsallis",
    "entmax",
    "sparsemax",
]
