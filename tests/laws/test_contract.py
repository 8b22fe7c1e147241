"""The contract that authors of a layer kind inherit, on modules of our own."""

from __future__ import annotations

import torch
from tests.cases import KINDS
from tests.cases.case import Case
from torch import Tensor, nn

from dualform.testing import LayerContract


def contract(case: Case) -> type[LayerContract]:
    """The test class that an author would write for the case."""

    class Contract(LayerContract):
        def make(self) -> nn.Module:
            return case.make()

        def inputs(self, count: int) -> Tensor:
            drawn: Tensor = case.batch(0, torch.float32)
            return drawn[:count]

    return Contract


for name, case in KINDS["uses"].items():
    if name.startswith("module, "):
        globals()[f"Test_{name}"] = contract(case)
