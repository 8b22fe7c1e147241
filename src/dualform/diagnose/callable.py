"""A subpackage that can be called: `dualform.diagnose(model, batch)`."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from dualform.diagnose.report import Diagnosis, diagnose


class DiagnosePackage(ModuleType):
    """The type of `dualform.diagnose`: a module like any other, and a call of it is `diagnose`.

    Python lets a package choose the class of its module. So one name is both, whoever imports it
    first, and however: the function needs no name that hides the package.

    >>> import dualform.diagnose
    >>> isinstance(dualform.diagnose, DiagnosePackage), dualform.diagnose.mask_graph.__name__
    (True, 'mask_graph')
    """

    def __call__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        layers: str | Sequence[str] | None = None,
        targets: Tensor | None = None,
        ablate: bool = False,
    ) -> Diagnosis:
        """`diagnose(model, batch, …)`, which says what it takes."""
        return diagnose(model, batch, layers=layers, targets=targets, ablate=ablate)
