"""The state of a training, kept once a minute: an interrupted one goes on from there."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SECONDS = 60.0
"""So often the state is kept."""


@dataclass
class Checkpoint:
    """One file with weights, what the optimizer remembers, the schedule, and losses so far.

    >>> import tempfile
    >>> weights, losses = torch.nn.Parameter(torch.ones(2)), torch.zeros(2)
    >>> optimizer = torch.optim.AdamW([weights])
    >>> schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9)
    >>> file = Path(tempfile.mkdtemp()) / "training.safetensors"
    >>> kept = Checkpoint(file, "HYLA", weights, losses, optimizer, schedule)
    >>> kept.load()                                # nothing is kept yet
    0
    >>> weights.grad = torch.ones(2)
    >>> optimizer.step()
    >>> schedule.step()
    >>> kept.save(1)
    >>> kept.load()
    1
    """

    file: Path
    networks: str
    """Which networks are trained: the state of others is of no use."""
    weights: torch.nn.Parameter
    losses: Tensor
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    _last: float = field(default_factory=time.monotonic)

    def load(self) -> int:
        """Makes everything what it was; how many steps were made, 0 where nothing is kept."""
        if not self.file.exists():
            return 0
        with safe_open(self.file, "pt") as kept:
            marks: dict[str, Any] = json.loads(kept.metadata()["marks"])
            state = {name: kept.get_tensor(name) for name in marks["tensors"]}
        if marks["networks"] != self.networks:
            return 0
        with torch.no_grad():
            self.weights.copy_(state.pop("weights"))
            self.losses.copy_(state.pop("losses"))
        self.optimizer.load_state_dict({"state": {0: state}, "param_groups": marks["groups"]})
        self.schedule.load_state_dict(marks["schedule"])
        return int(marks["steps"])

    def save_now_and_then(self, steps: int) -> None:
        """Keeps the state after so many steps, if a minute has gone by since the last time."""
        if time.monotonic() - self._last >= SECONDS:
            self.save(steps)
            self._last = time.monotonic()

    def save(self, steps: int) -> None:
        """Keeps the state after so many steps."""
        found = self.optimizer.state_dict()
        state = {"weights": self.weights.data, "losses": self.losses, **found["state"][0]}
        marks = {
            "networks": self.networks,
            "steps": steps,
            "tensors": [*state],
            "groups": found["param_groups"],
            "schedule": self.schedule.state_dict(),
        }
        draft = self.file.with_suffix(".draft")
        save_file(state, draft, {"marks": json.dumps(marks)})
        draft.replace(self.file)
