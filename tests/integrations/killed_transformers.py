"""A Trainer that is killed around a checkpoint; `test_killed.py` goes on from what it left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.integrations.one_hot import Columns, Net, sgd
from transformers import Trainer, TrainerCallback, TrainingArguments

from dualform.integrations import transformers


class Late(TrainerCallback):
    """Decides to save when other callbacks have had their say."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save = state.global_step % 2 == 0
        return control


class Killer(TrainerCallback):
    """Comes before the recorder's callback, when the second checkpoint has just been written."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


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
