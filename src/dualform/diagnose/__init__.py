"""What a transformer does: do its tokens collapse, and what do its masks imply?

>>> import torch
>>> from dualform import diagnose
>>> print(diagnose.mask_graph(torch.ones(8, 8).tril().bool()))
token 0 reaches all 8 tokens within 1 layers
"""

from dualform.diagnose.collapse import Collapse, LayerSpread, Spread, collapse, spread
from dualform.diagnose.mask_graph import MaskGraph, dobrushin, mask_graph

__all__ = [
    "Collapse",
    "LayerSpread",
    "MaskGraph",
    "Spread",
    "collapse",
    "dobrushin",
    "mask_graph",
    "spread",
]
