"""Pictures of 4 × 4 pixels for the tests of studies, in the files that studies read."""

from __future__ import annotations

import struct
from pathlib import Path

import torch


def write_images(folder: Path, seed: int, count: int) -> None:
    """Pictures of 4 × 4 pixels: one pattern a class, and noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 200, (10, 4, 4), generator=generator)
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        y = torch.arange(count) % 10
        pixels = patterns[y] + torch.randint(0, 56, (count, 4, 4), generator=generator)
        images = b"\0\0\x08\x03" + struct.pack(">3I", count, 4, 4)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images + bytes(pixels.flatten()))
        labels = b"\0\0\x08\x01" + struct.pack(">I", count) + bytes(y)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
