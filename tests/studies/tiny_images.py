"""Tiny pictures for studies, what a plain loop makes of training on them, and interruptions."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dualform.read import Run
from dualform.studies.classifiers import Training
from dualform.studies.parts import Found


def write_images(folder: Path, seed: int, count: int, noise: int = 56) -> None:
    """Idx files of pictures of 4 × 4 pixels: one pattern a class, and noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 200, (10, 4, 4), generator=generator)
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        y = torch.arange(count) % 10
        drawn = torch.randint(0, noise, (count, 4, 4), generator=generator)
        pixels = (patterns[y] + drawn).clamp(max=255)
        images = b"\0\0\x08\x03" + struct.pack(">3I", count, 4, 4)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images + bytes(pixels.flatten()))
        labels = b"\0\0\x08\x01" + struct.pack(">I", count) + bytes(y)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)


def with_ones(x: Tensor) -> Tensor:
    """Inputs with a last column of ones, for the bias, in float64."""
    return torch.cat([x, torch.ones(len(x), 1)], 1).double()


def first_weights(run: Run) -> Tensor:
    """(outputs, inputs + 1): weight and bias of the first layer before training, in float64."""
    first = run.at(0).state_dict()
    return torch.cat([first["0.weight"], first["0.bias"][:, None]], 1).double()


def plain_parts(
    x: Tensor,
    y: Tensor,
    groups: Tensor,
    first: Tensor,
    batches: Iterable[Tensor],
    training: Training,
    steps: Collection[int],
) -> dict[int, Tensor]:
    """(groups, outputs, inputs + 1) after some steps, for one linear layer with a bias.

    What the samples of a group have added to the weights has a velocity of its own, since momentum
    is linear in the gradient.

    Args:
        x: see `with_ones`.
        first: see `first_weights`.
    """
    parts = torch.zeros(int(groups.max()) + 1, *first.shape, dtype=torch.float64)
    speed, found = torch.zeros_like(parts), {0: parts.clone()}
    for step, ids in enumerate(batches, 1):
        weights = first + parts.sum(0)
        errors = (x[ids] @ weights.T).softmax(1) - one_hot(y[ids], len(first))
        rows = errors[:, :, None] * x[ids][:, None] / len(ids)
        gradient = torch.zeros_like(parts).index_add_(0, groups[ids], rows)
        clipped = min(1.0, training.clip / float(gradient.sum(0).norm()))
        speed = training.momentum * speed + clipped * gradient
        parts = parts - training.rate * speed
        if step in steps:
            found[step] = parts.clone()
    return found


def interrupted_at(seed: int, part: Callable[[Any, int], Found]) -> Callable[[Any, int], Found]:
    """A part of a study that is interrupted with one of its seeds."""

    def fails(study: Any, own: int) -> Found:
        if own == seed:
            raise KeyboardInterrupt
        return part(study, own)

    return fails
