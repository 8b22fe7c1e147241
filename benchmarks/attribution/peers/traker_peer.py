"""TRAK with one model: projected gradients Φ of log p/(1 − p), scores (1 − p) Φ(ΦᵀΦ + λ)⁻¹φ."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset
from trak import TRAKer
from trak.modelout_functions import AbstractModelOutput
from trak.projectors import BasicProjector, ProjectionType

from benchmarks.attribution.tasks import loss
from benchmarks.attribution.trained import Trained

SETTINGS: list[dict[str, Any]] = [
    {"dimension": dimension, "ridge": ridge}
    for dimension in (2048, 8192)
    for ridge in (0.0, 100.0, 300.0, 1000.0, 3000.0)
]
BEST: dict[str, dict[str, Any]] = {
    "mlp": {"dimension": 8192, "ridge": 3000.0},
    "mlp-adamw": {"dimension": 8192, "ridge": 3000.0},
    "cnn": {"dimension": 8192, "ridge": 10000.0},
    "cnn-adamw": {"dimension": 8192, "ridge": 10000.0},
    "text": {"dimension": 8192, "ridge": 3.0},
}
BATCH = 1000  # the projection is drawn again for each
NAME = "queries"


class Odds(AbstractModelOutput):
    """TRAK's output, log p/(1 − p); a window's p is the geometric mean of its words'."""

    def __init__(self) -> None:
        super().__init__()

    @staticmethod
    def get_output(model: nn.Module, weights: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
        """The output of one sample."""
        out = functional_call(model, (weights, buffers), (x[None],))
        surprise = loss(out, y[None])[0]
        return -surprise - torch.log(-torch.expm1(-surprise))

    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Any, buffers: Any, batch: Iterable[Tensor]
    ) -> Tensor:
        """1 − p of each sample."""
        x, y = batch
        return -torch.expm1(-loss(functional_call(model, (weights, buffers), (x,)), y))[:, None]


def scores(trained: Trained, work: Path, dimension: int, ridge: float) -> NDArray[np.float64]:
    """The native output of digits is the one measured; that of text falls when the loss rises."""
    task, model, state = trained.task, trained.model(), trained.epochs()[-1]
    samples, queries = TensorDataset(*task.samples()), TensorDataset(*task.queries())
    size = sum(p.numel() for p in model.parameters())
    method = TRAKer(
        model,
        Odds() if task.name == "text" else "image_classification",
        len(samples),
        save_dir=str(work / f"trak-{dimension}"),
        device="cpu",
        projector=BasicProjector(size, dimension, 0, ProjectionType.normal, "cpu"),
        use_half_precision=False,
        lambda_reg=ridge,
        logging_level=logging.ERROR,
    )
    method.load_checkpoint(state, model_id=0)
    for batch in DataLoader(samples, batch_size=BATCH):
        method.featurize(batch=batch, num_samples=len(batch[0]))
    method.saver.model_ids[0]["is_finalized"] = 0  # with another λ, where features were kept
    method.finalize_features()
    method.start_scoring_checkpoint(NAME, state, model_id=0, num_targets=len(queries))
    for batch in DataLoader(queries, batch_size=BATCH):
        method.score(batch=batch, num_samples=len(batch[0]))
    found = np.array(method.finalize_scores(NAME), dtype=np.float64)
    return -found if task.name == "text" else found
