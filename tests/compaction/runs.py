"""Small runs for compactions: a few layers and optimizers, with clipping and a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform
from dualform.recording.keep import Keep

STEPS = 9


@dataclass(frozen=True)
class Layer:
    """A model around one kind of layer, and its inputs."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


LAYERS = {
    "linear": Layer(
        lambda: nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3)),
        lambda: torch.randn(80, 20),
    ),
    "tokens": Layer(
        lambda: nn.Sequential(nn.Linear(20, 24), nn.LayerNorm(24), nn.Linear(24, 3)),
        lambda: torch.randn(12, 10, 20),
    ),
    "conv": Layer(
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Tanh(), nn.Conv2d(8, 6, 4)),
        lambda: torch.randn(16, 4, 9, 9),
    ),
    "embedding": Layer(
        lambda: nn.Sequential(nn.Embedding(30, 20), nn.LayerNorm(20), nn.Linear(20, 3)),
        lambda: torch.randint(30, (20, 8)),
    ),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def recorded(
    path: Path,
    layer: str = "linear",
    optimizer: str = "momentum",
    keep: Keep = "rows",
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, Tensor]:
    """The same training each time; the model, and the last inputs."""
    torch.manual_seed(0)
    case = LAYERS[layer]
    model = case.make().to(dtype)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    with dualform.record(model, stepper, path, keep=keep, strict=True) as recorder:
        for step in range(STEPS):
            x = case.inputs()
            x = x.to(dtype) if x.is_floating_point() else x
            recorder.samples([f"s{(7 * step + at) % 90}" for at in range(len(x))])
            (model(x).flatten(1) - 1).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            stepper.step()
            stepper.zero_grad()
            if step == 5:
                recorder.checkpoint()
        recorder.describe(["s1", "s2"], labels=[4, 5])
    return model, x


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file in a folder, but locks, which mean nothing."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.suffix != ".lock"
    }
