"""What people train with under torchrun: two processes, each with the same one line."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.integrations.one_hot import Columns, Net, Pairs, same_weights, sgd
from torch.utils.data import DataLoader

import dualform
from dualform.integrations import with_ids

Trained = Callable[[Path | None], Net]
"""Trains a model, and records it where a path is given."""


def as_torchrun_does(rank: int, of: int) -> None:
    """Sets what torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1]]
    if dist.is_initialized():
        dist.broadcast_object_list(ports, src=0)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(of),
        "LOCAL_WORLD_SIZE": str(of),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        "TORCHELASTIC_RUN_ID": "test",
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
    }


def check(train: Trained, rank: int, folder: Path) -> None:
    """Training is the same with and without a recording; the diary tells what was trained on."""
    recorded = train(folder / "run")
    (folder / f"diary-{rank}.json").write_text(json.dumps(recorded.diary))
    assert same_weights(recorded, train(None))


def accelerated(rank: int, of: int, folder: Path) -> None:
    from accelerate import Accelerator

    as_torchrun_does(rank, of)

    def train(path: Path | None) -> Net:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = Net()
        model, optimizer, loader = accelerator.prepare(
            net, sgd(net), DataLoader(Pairs(), 4, shuffle=True)
        )

        def epochs(loader: Any) -> None:
            torch.manual_seed(5 + rank)
            for _ in range(2):
                for x, y in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(F.cross_entropy(model(x), y))
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()

        if path is None:
            epochs(loader)
        else:
            with dualform.record(model, optimizer, path, strict=True) as recorder:
                epochs(with_ids(loader, recorder))
        return net

    check(train, rank, folder)


def by_sharding_trainer(rank: int, of: int, folder: Path) -> None:
    by_trainer(rank, of, folder, fsdp=True, fsdp_config={"version": 2})


def by_trainer(rank: int, of: int, folder: Path, **options: Any) -> None:
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import Trainer, TrainingArguments

    from dualform.integrations.transformers import TransformersCallback

    as_torchrun_does(rank, of)

    def train(path: Path | None) -> Net:
        net = Net()
        args = TrainingArguments(
            str(folder / "out"),
            num_train_epochs=2,
            per_device_train_batch_size=4,
            lr_scheduler_type="constant",
            save_strategy="no" if options else "steps",
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **options,
        )
        callbacks: list[Any] = [] if path is None else [TransformersCallback(path, strict=True)]
        optimizers: Any = (None, None) if options else (sgd(net), None)
        given: Any = {"train_dataset": Columns(), "optimizers": optimizers}
        trainer = Trainer(net, args, callbacks=callbacks, **given)
        if options:  # accelerate shards on GPUs only, unless its state says otherwise
            state: Any = trainer.accelerator.state
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="NO_WRAP")
            trainer.is_fsdp_enabled = True
        trainer.train()
        return net

    check(train, rank, folder)


def by_lightning(rank: int, of: int, folder: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from dualform.integrations.lightning import LightningCallback

    as_torchrun_does(rank, of)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return sgd(self.net)

    def train(path: Path | None) -> Net:
        module = Module()
        trainer = Trainer(
            max_epochs=2,
            accelerator="cpu",
            strategy="ddp",
            devices=of,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[] if path is None else [LightningCallback(path, strict=True)],
        )
        torch.manual_seed(5 + rank)
        trainer.fit(module, DataLoader(Pairs(), batch_size=4, shuffle=True))
        return module.net

    check(train, rank, folder)
