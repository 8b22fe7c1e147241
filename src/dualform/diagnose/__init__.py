"""What a transformer does: do tokens collapse, what do masks imply, are values principal axes?

>>> import torch
>>> from dualform import diagnose
>>> print(diagnose.mask_graph(torch.ones(8, 8).tril().bool()))
token 0 reaches all 8 tokens within 1 layers
"""

from dualform.diagnose.collapse import Collapse, LayerSpread, Spread, collapse, spread
from dualform.diagnose.kernel_pca import (
    KernelPCA,
    ValueAudit,
    audit_layer,
    audit_values,
    kernel_pca,
    kpca_values,
)
from dualform.diagnose.mask_graph import MaskGraph, dobrushin, mask_graph

__all__ = [
    "Collapse",
    "KernelPCA",
    "LayerSpread",
    "MaskGraph",
    "Spread",
    "ValueAudit",
    "audit_layer",
    "audit_values",
    "collapse",
    "dobrushin",
    "kernel_pca",
    "kpca_values",
    "mask_graph",
    "spread",
]
