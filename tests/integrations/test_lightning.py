"""A Lightning `Trainer` with one callback more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.integrations.one_hot import Net, Pairs, X, Y, check_run, same_weights, sgd
from torch.utils.data import DataLoader, IterableDataset

import dualform
from dualform.errors import RecordingError
from dualform.integrations.lightning import LightningCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
]


class Module(LightningModule):
    """Calls its network in `training_step`, never itself."""

    def __init__(self, breaks_at: int = -1) -> None:
        super().__init__()
        self.net, self.breaks_at = Net(), breaks_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.breaks_at:
            raise KeyError("a batch gone wrong")
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


class Validated(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


def trainer_of(folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    usual: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    settings = usual | settings
    return Trainer(default_root_dir=folder, callbacks=list(callbacks), **settings)


def loader_of(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Pairs(), batch_size=4, shuffle=True, **settings)


@pytest.mark.parametrize(
    ("accumulate", "settings"),
    [
        (1, {}),
        (2, {"num_workers": 2}),
        (3, {"num_workers": 2, "persistent_workers": True}),
    ],
)
def test_rows_have_their_ids_and_training_is_the_same(
    accumulate: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    modules = []
    for callbacks in ([LightningCallback(tmp_path / "run")], []):
        seed_everything(3, workers=True, verbose=False)
        module = Validated()
        trainer = trainer_of(tmp_path, *callbacks, accumulate_grad_batches=accumulate)
        trainer.fit(module, loader_of(**settings), DataLoader(Pairs(), batch_size=8))
        modules.append(module)
    assert same_weights(*modules)
    check_run(tmp_path / "run", modules[0].net, accumulate, "net.first")


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of()


def test_loaders_made_anew_and_steps_that_end_early(tmp_path: Path) -> None:
    module = Module()
    trainer = trainer_of(
        tmp_path,
        LightningCallback(tmp_path / "run"),
        max_epochs=20,
        max_steps=11,
        limit_train_batches=3,
        gradient_clip_val=0.3,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(module, datamodule=Data())
    assert check_run(tmp_path / "run", module.net, 1, "net.first").steps == 11
    assert "process_dataloader" not in vars(trainer.strategy)


def test_an_exception_leaves_the_run_and_checkpoints_go_on(tmp_path: Path) -> None:
    def train(module: Module, **settings: Any) -> None:
        saves = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
        callbacks = LightningCallback(tmp_path / "run"), saves
        trainer_of(tmp_path, *callbacks, enable_checkpointing=True).fit(
            module, DataLoader(Pairs(), batch_size=4), **settings
        )

    broken, resumed, path = Module(breaks_at=14), Module(), tmp_path / "run"
    with pytest.raises(KeyError):
        train(broken)
    run = check_run(path, broken.net, 1, "net.first")
    assert (run.steps, run.kept_steps) == (14, [0, 5, 10, 14])
    train(resumed, ckpt_path=tmp_path / "step=10.ckpt")
    resumed.net.diary = broken.net.diary[:10] + resumed.net.diary
    assert check_run(path, resumed.net, 1, "net.first").steps == resumed.global_step
    assert {10, 15} <= set(dualform.open(path).kept_steps)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(X, Y, strict=True)


def test_ids_of_a_stream(tmp_path: Path) -> None:
    module, loader = Module(), DataLoader(Stream(), batch_size=4)
    with pytest.raises(RecordingError, match=r"a Stream, .* ids_of=lambda batch"):
        trainer_of(tmp_path, LightningCallback(tmp_path / "run")).fit(module, loader)
    callback = LightningCallback(tmp_path / "run", ids_of=lambda batch: batch[0].argmax(1))
    trainer_of(tmp_path, callback).fit(module, loader)
    check_run(tmp_path / "run", module.net, 1, "net.first")


class Two(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [sgd(self.net.first), sgd(self.net.last)]


def test_what_cannot_be_recorded_yet(tmp_path: Path) -> None:
    callback = LightningCallback(tmp_path / "run")
    with pytest.raises(RecordingError, match="gave 2 optimizers"):
        trainer_of(tmp_path, callback).fit(Two(), loader_of())
    with pytest.raises(RecordingError, match="was given a dict; give one DataLoader"):
        trainer_of(tmp_path, callback).fit(Module(), {"a": loader_of(), "b": loader_of()})
    with pytest.raises(RecordingError, match=r"trainer\.fit"):
        _ = callback.recorder
    assert not (tmp_path / "run").exists()


def test_other_stages_are_left_alone(tmp_path: Path) -> None:
    callback = LightningCallback(tmp_path / "run")
    trainer_of(tmp_path, callback).validate(
        Validated(), DataLoader(Pairs(), batch_size=8), verbose=False
    )
    assert not (tmp_path / "run").exists()
    module = Module()
    trainer_of(tmp_path, callback).fit(module, loader_of())
    assert dualform.open(tmp_path / "run").steps == 18


def test_samples_are_described(tmp_path: Path) -> None:
    callback = LightningCallback(tmp_path / "run", dataset=Pairs())
    trainer_of(tmp_path, callback, max_epochs=1).fit(Module(), loader_of())
    assert callback.recorder.step == 6
    assert dualform.open(tmp_path / "run").samples.labels == {i: int(Y[i]) for i in range(len(Y))}
    dualform.describe(tmp_path / "run", ids=[3], labels=["renamed"])
    assert dualform.open(tmp_path / "run").samples.labels[3] == "renamed"
