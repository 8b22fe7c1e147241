"""Time series of the UEA archive: `.ts` files, padded to the longest, standardized by channel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dualform.studies.data import read_packed


@dataclass(frozen=True)
class Series:
    """x (samples, length, channels) with zeros after the end, which steps are real, and labels."""

    x: Tensor
    real: Tensor
    y: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: Tensor) -> Series:
        return Series(self.x[rows], self.real[rows], self.y[rows], self.classes)

    def to(self, device: str) -> Series:
        """The same on a device."""
        return Series(self.x.to(device), self.real.to(device), self.y.to(device), self.classes)


def load(data: Path, name: str) -> tuple[Series, Series]:
    """The training and test parts of a set, standardized by the training part's statistics."""
    folder = data / "uea" / name if (data / "uea").is_dir() else data / name
    texts = [read_packed(folder, f"{name}_{part}.ts").decode() for part in ("TRAIN", "TEST")]
    rows = [_parse(text) for text in texts]
    classes = tuple(sorted({label for _, label in rows[0]}))
    length = max(len(x) for part in rows for x, _ in part)
    train, test = (_padded(part, length, classes) for part in rows)
    seen = train.x[train.real]
    mean, deviation = seen.mean(0), seen.std(0).clamp(min=1e-8)
    parts = (
        Series((p.x - mean) / deviation * p.real[..., None], p.real, p.y, classes)
        for p in (train, test)
    )
    first, second = parts
    return first, second


def _parse(text: str) -> list[tuple[Tensor, str]]:
    """Samples (length, channels) and labels; channels are divided by colons, the label is last."""
    _, _, body = text.partition("@data")
    lines = [line.strip() for line in body.splitlines() if line.strip()]
    rows = []
    for line in lines:
        *channels, label = line.split(":")
        numbers = [[float(n) for n in channel.split(",")] for channel in channels]
        rows.append((torch.tensor(numbers).T, label))
    return rows


def _padded(rows: list[tuple[Tensor, str]], length: int, classes: tuple[str, ...]) -> Series:
    x = torch.zeros(len(rows), length, rows[0][0].shape[1])
    real = torch.zeros(len(rows), length, dtype=torch.bool)
    for at, (sample, _) in enumerate(rows):
        x[at, : len(sample)] = sample
        real[at, : len(sample)] = True
    y = torch.tensor([classes.index(label) for _, label in rows])
    return Series(x, real, y, classes)
