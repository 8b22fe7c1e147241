"""What a transformer does: do tokens collapse, what do masks imply, which heads are needed?

The package can be called: `dualform.diagnose(model, batch)` runs every instrument that applies.

>>> import torch
>>> from dualform import diagnose
>>> print(diagnose.mask_graph(torch.ones(8, 8).tril().bool()))
token 0 reaches all 8 tokens within 1 layers
"""

import sys

from dualform.diagnose.callable import DiagnosePackage
from dualform.diagnose.codes import pair_codes
from dualform.diagnose.collapse import Collapse, LayerSpread, collapse
from dualform.diagnose.heads import AttentionHead, Heads, heads
from dualform.diagnose.kernel_pca import (
    KernelPCA,
    ValueAudit,
    audit_layer,
    audit_values,
    kernel_pca,
    kpca_values,
)
from dualform.diagnose.mask_graph import MaskGraph, dobrushin, mask_graph
from dualform.diagnose.over_training import OverTraining, over_training
from dualform.diagnose.path_kernels import (
    PathKernel,
    PathPrior,
    fit_paths,
    head_scores,
    path_features,
)
from dualform.diagnose.paths import Paths, paths
from dualform.diagnose.probe import Probe, ridge_probe
from dualform.diagnose.report import Diagnosis, LayerMask, Statement, diagnose
from dualform.diagnose.token_spread import Spread, spread

__all__ = [
    "AttentionHead",
    "Collapse",
    "Diagnosis",
    "Heads",
    "KernelPCA",
    "LayerMask",
    "LayerSpread",
    "MaskGraph",
    "OverTraining",
    "PathKernel",
    "PathPrior",
    "Paths",
    "Probe",
    "Spread",
    "Statement",
    "ValueAudit",
    "audit_layer",
    "audit_values",
    "collapse",
    "diagnose",
    "dobrushin",
    "fit_paths",
    "head_scores",
    "heads",
    "kernel_pca",
    "kpca_values",
    "mask_graph",
    "over_training",
    "pair_codes",
    "path_features",
    "paths",
    "ridge_probe",
    "spread",
]

sys.modules[__name__].__class__ = DiagnosePackage
