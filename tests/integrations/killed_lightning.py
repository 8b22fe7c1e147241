"""A training that is killed around a checkpoint; `test_killed.py` goes on from what it left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from tests.integrations.one_hot import Net, Pairs, sgd
from torch.utils.data import DataLoader

from dualform.integrations import lightning


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Files(TorchCheckpointIO):
    """Writes checkpoints; the second is the last, before or after it is written."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.count = how, 0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        if self.count == 2 and self.how == "before":
            die()
        super().save_checkpoint(*args, **kwargs)
        if self.count == 2 and self.how == "after":
            die()


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def train_lightning(folder: Path, how: str, resume: Path | None = None) -> None:
    saves = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[Files(how)],
        callbacks=[saves, lightning.LightningCallback(folder / "run")],
    )
    trainer.fit(Module(), DataLoader(Pairs(), batch_size=4), ckpt_path=resume)
