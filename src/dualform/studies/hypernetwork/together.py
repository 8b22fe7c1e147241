"""All networks of a task are trained at once, and kept until each is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file

from dualform.studies.hypernetwork.network import RuleReader
from dualform.studies.hypernetwork.problems import Task
from dualform.studies.hypernetwork.setting import TrainingSetting
from dualform.studies.hypernetwork.training import train


def task_of(training: TrainingSetting[Any], seed: int) -> Task:
    """The task with a seed's held-out rules and problems.

    >>> from dualform.studies.hypernetwork.setting import SETTINGS
    >>> task_of(SETTINGS["tiny"].raven, 3).seed
    3
    """
    task: Task = replace(training.task, seed=seed)
    return task


def make_network(
    training: TrainingSetting[Any], layer: str, seed: int, device: str = "cpu"
) -> RuleReader:
    """A network before training: layers of a seed begin with the same weights."""
    torch.manual_seed(seed)
    shape, has_places = training.task.shape, training.task.has_places
    return RuleReader(shape, layer, training.width, training.heads, training.depth, has_places).to(
        device
    )


@dataclass(frozen=True)
class TrainedTogether:
    """The trained networks of a task, as files of a folder; who asks first has them trained.

    >>> import tempfile
    >>> from dualform.studies.hypernetwork.setting import SETTINGS
    >>> training = SETTINGS["tiny"].raven
    >>> networks = TrainedTogether(Path(tempfile.mkdtemp()), training, seeds=2, device="cpu")
    >>> 1 < networks.load(make_network(training, "HYLA", 0), "HYLA", 0) < 4
    True
    """

    folder: Path
    training: TrainingSetting[Any]
    seeds: int
    device: str

    def load(self, model: RuleReader, layer: str, seed: int) -> float:
        """Gives a network its trained weights; its training loss."""
        file = self._file(layer, seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / f"{self.training.task.name}.lock"):
            if not file.exists():
                self._train()
        with safe_open(file, "pt") as kept:
            model.load_state_dict({name: kept.get_tensor(name) for name in model.state_dict()})
            return float(kept.metadata()["loss"])

    def _train(self) -> None:
        """Trains all layers with each seed that lacks one."""
        layers = self.training.layers
        seeds = [
            seed
            for seed in range(self.seeds)
            if not all(self._file(layer, seed).exists() for layer in layers)
        ]
        networks = {
            layer: [make_network(self.training, layer, seed, self.device) for seed in seeds]
            for layer in layers
        }
        tasks = [task_of(self.training, seed) for seed in seeds]
        state = self.folder / f"{self.training.task.name}.state.safetensors"
        losses = train(networks, tasks, self.training, self.device, state)
        for layer, models in networks.items():
            for seed, model, loss in zip(seeds, models, losses[layer], strict=True):
                draft = self._file(layer, seed).with_suffix(".draft")
                save_file(model.state_dict(), draft, {"loss": repr(loss)})
                draft.replace(self._file(layer, seed))
        state.unlink(missing_ok=True)

    def _file(self, layer: str, seed: int) -> Path:
        name = f"{self.training.task.name} {layer} seed {seed}".replace(" ", "-")
        return self.folder / f"{name}.safetensors"
