"""Iterated attention: steps with a contraction, their fixed points, and gradients through them.

>>> import torch
>>> from dualform.families import Empirical, LogNormalizer
>>> from dualform.families.fixed_points import AttentionStep, Project, solve
>>> x = torch.nn.functional.normalize(torch.randn(20, 3), dim=-1)
>>> step = AttentionStep(LogNormalizer(Empirical(x), temperature=0.5), Project())
>>> solve(step, x, method="plain", tolerance=1e-4).converged
True
"""

from dualform.families.fixed_points.certificates import (
    Basins,
    Certificate,
    basins,
    certify,
    lipschitz,
    stability,
)
from dualform.families.fixed_points.implicit import implicit
from dualform.families.fixed_points.layers import Equilibrium, EquilibriumAttention
from dualform.families.fixed_points.linear import conjugate_gradients
from dualform.families.fixed_points.solve import FixedPoint, solve
from dualform.families.fixed_points.steps import (
    AttentionStep,
    Contraction,
    Decay,
    Normalize,
    Project,
)

__all__ = [
    "AttentionStep",
    "Basins",
    "Certificate",
    "Contraction",
    "Decay",
    "Equilibrium",
    "EquilibriumAttention",
    "FixedPoint",
    "Normalize",
    "Project",
    "basins",
    "certify",
    "conjugate_gradients",
    "implicit",
    "lipschitz",
    "solve",
    "stability",
]
