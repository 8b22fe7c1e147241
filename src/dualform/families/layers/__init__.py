"""Layers that are means of families: attention, energies, Hopfield networks, fields, contrasts.

>>> import torch
>>> from dualform.families.layers import Attention
>>> Attention(width=8, heads=2, alpha=1.5)(torch.randn(3, 5, 8)).shape
torch.Size([3, 5, 8])
"""

from dualform.families.layers.annealing import LogPartition, annealed
from dualform.families.layers.attention import Attention, Block, attend
from dualform.families.layers.contrastive import InfoNCE
from dualform.families.layers.energy import Descent, EnergyAttention
from dualform.families.layers.fields import Field, contrastive_divergence
from dualform.families.layers.hopfield import Capacity, Hopfield, Retrieval, capacity
from dualform.families.layers.machines import Boltzmann, Conditional, ConditionalRandomField

__all__ = [
    "Attention",
    "Block",
    "Boltzmann",
    "Capacity",
    "Conditional",
    "ConditionalRandomField",
    "Descent",
    "EnergyAttention",
    "Field",
    "Hopfield",
    "InfoNCE",
    "LogPartition",
    "Retrieval",
    "annealed",
    "attend",
    "capacity",
    "contrastive_divergence",
]
