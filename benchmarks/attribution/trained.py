"""The one training run that every method explains: its ledger, and its weights after each epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.attribution.tasks import Task

SEED = 0


@dataclass(frozen=True)
class Trained:
    """A task trained on all its samples, kept in a folder."""

    task: Task
    folder: Path

    @classmethod
    def of(cls, task: Task, folder: Path) -> Trained:
        """Trains, unless the folder holds it already."""
        trained = cls(task, folder / task.name)
        if not trained._kept.exists():
            trained._train()
        return trained

    def asking(self, queries: int) -> Trained:
        """The same run, asked about the first queries only."""
        return replace(self, task=replace(self.task, asked=queries))

    @property
    def ledger(self) -> Path:
        """The recorded run."""
        return self.folder / "ledger"

    @property
    def _kept(self) -> Path:
        return self.folder / "epochs.pt"

    def epochs(self) -> list[dict[str, Tensor]]:
        """The weights after each epoch."""
        states: list[dict[str, Tensor]] = torch.load(self._kept, weights_only=True)
        return states

    def model(self) -> nn.Module:
        """The trained model."""
        model = self.task.start(SEED)
        model.load_state_dict(self.epochs()[-1])
        return model.eval()

    def _train(self) -> None:
        states: list[dict[str, Tensor]] = []

        def show(_: int, model: nn.Module) -> None:
            states.append({name: value.clone() for name, value in model.state_dict().items()})

        self.folder.mkdir(parents=True, exist_ok=True)
        ids = range(len(self.task.samples()[0]))
        self.task.train(ids, SEED, self.ledger, show=show)
        torch.save(states, self._kept)
