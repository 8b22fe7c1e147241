"""Attention layers as duals of regressions: derive one, use one, look inside one.

An attention layer is the support vector expansion of a regression whose primal is a layer of a
neural network (Nguyen et al., *A Primal-Dual Framework for Transformers and Neural Networks*, ICLR
2023). `Primal` states such a problem, solves it, and gives the layer; the layers are functions of
q, k, v on torch's fused kernels; `MultiheadAttention` is torch's module with a choice of layer.

>>> import torch
>>> from dualform import attention
>>> q, k, v = torch.randn(3, 2, 4, 10, 8).unbind()      # batch 2, 4 heads, 10 tokens, width 8
>>> attention.batch_norm(q, k, v, is_causal=True).shape
torch.Size([2, 4, 10, 8])
>>> attention.scaled_heads(q, k, v, factors=(1, 2, 4, 8)).shape
torch.Size([2, 4, 10, 8])
"""

from dualform.attention.batch_norm import batch_norm
from dualform.attention.cache import Cache
from dualform.attention.derived import Derived
from dualform.attention.entmax import entmax
from dualform.attention.hyper import hyper, latent_codes
from dualform.attention.inspection import Inspection, Support, inspect
from dualform.attention.kinds import kind, register_kind, with_weights
from dualform.attention.linear import linear
from dualform.attention.local import local
from dualform.attention.losses import Huber, Loss, Squared
from dualform.attention.memories import memory
from dualform.attention.multihead import MultiheadAttention
from dualform.attention.primal import Primal, Solution
from dualform.attention.pursuit import Pursuit, principal_component_pursuit
from dualform.attention.replace import replace
from dualform.attention.ridge import ridge
from dualform.attention.robust import CleanKeys, clean_keys, robust
from dualform.attention.scaled_heads import batch_norm_scaled_heads, scaled_heads
from dualform.attention.softmax import softmax
from dualform.attention.transforms import BatchNorm, RmsNorm, Shorten, Transform, UnitLength

__all__ = [
    "BatchNorm",
    "Cache",
    "CleanKeys",
    "Derived",
    "Huber",
    "Inspection",
    "Loss",
    "MultiheadAttention",
    "Primal",
    "Pursuit",
    "RmsNorm",
    "Shorten",
    "Solution",
    "Squared",
    "Support",
    "Transform",
    "UnitLength",
    "batch_norm",
    "batch_norm_scaled_heads",
    "clean_keys",
    "entmax",
    "hyper",
    "inspect",
    "kind",
    "latent_codes",
    "linear",
    "local",
    "memory",
    "principal_component_pursuit",
    "register_kind",
    "replace",
    "ridge",
    "robust",
    "scaled_heads",
    "softmax",
    "with_weights",
]
