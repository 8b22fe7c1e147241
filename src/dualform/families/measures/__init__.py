"""Base measures, one a file: where an exponential family begins."""

from dualform.families.measures.chain import Chain
from dualform.families.measures.composed import Mixture, Product, Pushforward
from dualform.families.measures.empirical import Empirical
from dualform.families.measures.gaussian import Gaussian
from dualform.families.measures.hypercube import Hypercube
from dualform.families.measures.interval import Interval
from dualform.families.measures.laplace import Laplace
from dualform.families.measures.measure import Measure
from dualform.families.measures.poisson import Poisson
from dualform.families.measures.sphere import Sphere

__all__ = [
    "Chain",
    "Empirical",
    "Gaussian",
    "Hypercube",
    "Interval",
    "Laplace",
    "Measure",
    "Mixture",
    "Poisson",
    "Product",
    "Pushforward",
    "Sphere",
]
