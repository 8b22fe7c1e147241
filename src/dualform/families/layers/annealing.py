"""Annealed importance sampling: what a field's probabilities sum to before they are divided."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.layers.fields import Field


@dataclass(frozen=True)
class LogPartition:
    """log Z by annealed importance sampling, with a range of ± three standard errors of Z.

    >>> LogPartition(10.0, 9.9, 10.1)
    LogPartition(value=10.0, low=9.9, high=10.1)
    """

    value: float
    low: float
    high: float


@torch.no_grad()
def annealed(
    field: Field,
    *,
    chains: int = 256,
    temperatures: int = 2000,
    generator: torch.Generator | None = None,
) -> LogPartition:
    """log Z of a field, by importance weights from independent units to W in equal steps.

    (Neal 2001; Salakhutdinov and Murray 2008.)

    >>> from dualform.families import Hypercube
    >>> from dualform.families.layers import Boltzmann
    >>> machine = Boltzmann(Hypercube(4), Hypercube(3), scale=0.0)
    >>> round(annealed(machine.field(), chains=8, temperatures=10).value / math.log(2), 4)  # 2⁷
    7.0
    """
    if chains < 2 or temperatures < 1:
        raise FamilyError(
            f"{chains=} and {temperatures=} give no estimate with a range; give 2 chains or more, "
            "and 1 temperature or more."
        )
    v = field.visible.sample(field.b, chains, generator)
    weight = torch.zeros(chains, dtype=torch.float64, device=v.device)
    for step in range(1, temperatures + 1):
        before, after = (field.tempered(s / temperatures) for s in (step - 1, step))
        weight += (before.free_energy(v) - after.free_energy(v)).double()
        v = after.gibbs(v, 1, generator)
    base = field.visible.log_normalizer(field.b) + field.hidden.log_normalizer(field.c)
    return _partition(weight + float(base))


def _partition(weight: Tensor) -> LogPartition:
    value = float(weight.logsumexp(0)) - math.log(len(weight))
    ratios = (weight - value).exp()
    error = 3 * float(ratios.std()) / math.sqrt(len(weight))
    low = value + math.log(1 - error) if error < 1 else -math.inf
    return LogPartition(value, low, value + math.log1p(error))
