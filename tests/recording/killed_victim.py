"""Trains, saves, and is killed at one exact moment; `test_killed.py` goes on from what it left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dualform

X, Y = torch.randn(12, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(12) % 3


def fresh(optimizer: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    if optimizer == "adam":
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int, recorder: dualform.Recorder
) -> None:
    for _ in range(count):
        recorder.samples(range(12))
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One file, there as a whole or not at all."""
    draft = folder / "draft.pt"
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(states, draft)
    draft.replace(folder / "saved.pt")


def main(folder: Path, order: str, kill_at: int, optimizer_name: str) -> None:
    """Saves three times, three moments each; the moment `kill_at` is its last."""
    model, optimizer = fresh(optimizer_name)
    moment = 0

    def reached() -> None:
        nonlocal moment
        if moment == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        moment += 1

    with dualform.record(model, optimizer, folder / "run") as recorder:
        actions: dict[str, Callable[[], Any]] = {
            "save": lambda: save(folder, model, optimizer, recorder.step),
            "mark": recorder.checkpoint,
        }
        for _ in range(3):
            steps(model, optimizer, 4, recorder)
            reached()
            for name in order.split():
                actions[name]()
                reached()
