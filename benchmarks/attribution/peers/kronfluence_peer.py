"""kronfluence: −∇output(query)ᵀ (H + λ)⁻¹ ∇loss(sample), H the EK-FAC of the Fisher matrix.

It covers linear layers and convolutions; embeddings and normalizations are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task as Attributed
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.attribution.tasks import Task, loss
from benchmarks.attribution.trained import Trained

SETTINGS: list[dict[str, Any]] = [
    {"damping": damping} for damping in (None, 1e-8, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
]
BEST: dict[str, dict[str, Any]] = {
    "mlp": {"damping": 1e-4},
    "mlp-adamw": {"damping": None},
    "cnn": {"damping": 1e-2},
    "cnn-adamw": {"damping": 1e-2},
    "text": {"damping": 1e-4},
}
BATCH = 250


class Measured(Attributed):
    """The task as kronfluence asks for it: sums over the batch, labels drawn by the model."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def compute_train_loss(
        self, batch: tuple[Tensor, Tensor], model: nn.Module, sample: bool = False
    ) -> Tensor:
        """Σ loss, of labels drawn from the model where `sample`."""
        x, y = batch
        out = model(x)
        if sample:
            y = torch.distributions.Categorical(logits=out.detach()).sample()
        return loss(out, y).sum()

    def compute_measurement(self, batch: tuple[Tensor, Tensor], model: nn.Module) -> Tensor:
        """−Σ output: what training on a helpful sample lowers."""
        x, y = batch
        return -self.task.output(model(x), y).sum()


def scores(trained: Trained, work: Path, damping: float | None) -> NDArray[np.float64]:
    """Factors of all samples, then every pair; `None` is 0.1 × the mean eigenvalue, by layer."""
    task, measured = trained.task, Measured(trained.task)
    samples, queries = TensorDataset(*task.samples()), TensorDataset(*task.queries())
    method = Analyzer(
        task.name,
        prepare_model(trained.model(), measured),
        measured,
        cpu=True,
        disable_tqdm=True,
        output_dir=str(work),
    )
    method.fit_all_factors(
        "factors",
        dataset=samples,
        per_device_batch_size=BATCH,
        factor_args=FactorArguments(strategy="ekfac"),
    )
    method.compute_pairwise_scores(
        "scores",
        factors_name="factors",
        query_dataset=queries,
        train_dataset=samples,
        per_device_query_batch_size=BATCH,
        per_device_train_batch_size=BATCH,
        score_args=ScoreArguments(damping_factor=damping),
        overwrite_output_dir=True,
    )
    return method.load_pairwise_scores("scores")["all_modules"].double().numpy().T
