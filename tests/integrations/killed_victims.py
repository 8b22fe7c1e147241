"""Trainers that are killed around a checkpoint; `test_killed.py` goes on from what they left."""

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
from tests.integrations.one_hot import Columns, Net, Pairs, sgd
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from dualform.integrations import lightning, transformers


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Late(TrainerCallback):
    """Decides to save when other callbacks have had their say."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save = state.global_step % 2 == 0
        return control


class Killer(TrainerCallback):
    """Comes before the recorder's callback, when the second checkpoint has just been written."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            die()


def transformers_trainer(folder: Path, how: str, kill: bool) -> Trainer:
    os.environ["HF_HUB_OFFLINE"] = "1"
    net = Net()
    args = TrainingArguments(
        str(folder / "out"),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        save_strategy="no" if how == "late" else "steps",
        save_steps=2,
        save_only_model=how == "only the model",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    callbacks = [
        *([Killer()] if kill else []),
        transformers.TransformersCallback(folder / "run"),
        *([Late()] if how == "late" else []),
    ]
    data = Columns()
    return Trainer(net, args, train_dataset=data, optimizers=(sgd(net), None), callbacks=callbacks)


def train_transformers(folder: Path, how: str) -> None:
    transformers_trainer(folder, how, kill=True).train()


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
