"""dattri's influence by conjugate gradients: −∇output(query)ᵀ (H + λ)⁻¹ ∇loss(sample)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from dattri.algorithm.influence_function import IFAttributorCG
from dattri.task import AttributionTask
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from torch.utils.data import DataLoader, Subset, TensorDataset

from benchmarks.attribution.tasks import loss
from benchmarks.attribution.trained import Trained

SETTINGS: list[dict[str, Any]] = [
    {"ridge": ridge, "rows": rows} for rows in (1000, 5000) for ridge in (1e-3, 1e-2, 1e-1, 1.0)
]
BEST: dict[str, dict[str, Any]] = {
    "mlp": {"ridge": 0.1, "rows": 1000},
    "mlp-adamw": {"ridge": 0.1, "rows": 1000},
    "cnn": {"ridge": 0.1, "rows": 1000},
    "cnn-adamw": {"ridge": 0.1, "rows": 1000},
    "text": {"ridge": 0.01, "rows": 500},
}
BATCH = 4  # queries whose products with the Hessian are held at once


def scores(trained: Trained, work: Path, ridge: float, rows: int) -> NDArray[np.float64]:
    """The Hessian is that of the first samples as one batch: batches are inverted one by one."""
    task, model = trained.task, trained.model()

    def mean_loss(parameters: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return loss(functional_call(model, parameters, (x,)), y).mean()

    def output(parameters: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return -task.output(functional_call(model, parameters, (x,)), y).mean()

    attributed = AttributionTask(mean_loss, model, trained.epochs()[-1], target_func=output)
    method = IFAttributorCG(attributed, max_iter=10, regularization=ridge)
    samples = TensorDataset(*task.samples())
    method.cache(DataLoader(Subset(samples, range(min(rows, len(samples)))), batch_size=rows))
    with torch.no_grad():  # or else the graph of every iteration is kept
        found: Tensor = method.attribute(
            DataLoader(samples, batch_size=len(samples)),
            DataLoader(TensorDataset(*task.queries()), batch_size=BATCH),
        )
    return found.double().numpy()
