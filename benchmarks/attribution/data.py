"""The data of the tasks: 5,000 digits of MNIST, 2,000 windows of Shakespeare.

Files are looked for in the folder that DUALFORM_DATA names, `.data` if it names none:
`mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz` and `text/tinyshakespeare.txt`, 13 MB.
"""

from __future__ import annotations

import gzip
import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILES = (
    "mnist/train-images-idx3-ubyte.gz",
    "mnist/train-labels-idx1-ubyte.gz",
    "mnist/t10k-images-idx3-ubyte.gz",
    "mnist/t10k-labels-idx1-ubyte.gz",
    "text/tinyshakespeare.txt",
)
DIGITS, WINDOWS, QUERIES = 5000, 2000, 500
WINDOW, VOCABULARY = 16, 512


def folder() -> Path:
    """Where the files are."""
    return Path(os.environ.get("DUALFORM_DATA", ".data"))


def chosen(available: int, count: int, seed: int) -> Tensor:
    """The first `count` of a fixed permutation."""
    return torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:count]


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (n, 1, 28, 28) of mean 0 and deviation 1, and labels: to train on, then queries."""
    train, test = chosen(60000, DIGITS, 0), chosen(10000, QUERIES, 1)
    return (*_mnist("train", train), *_mnist("t10k", test))


def _mnist(part: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    images = idx(f"mnist/{part}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)[ids]
    labels = idx(f"mnist/{part}-labels-idx1-ubyte.gz", 8)[ids]
    return (images.float() / 255 - 0.1307) / 0.3081, labels.long()


def idx(name: str, header: int) -> Tensor:
    """The bytes of a compressed idx file, after its header."""
    with gzip.open(folder() / name) as file:
        return torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=header).copy())


@cache
def verses() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Windows of words and the words that follow each (n, 16): to train on, then queries.

    Words are the most frequent 511, and one for all others. Windows do not overlap.
    """
    text = (folder() / "text/tinyshakespeare.txt").read_text().lower()
    words = re.findall(r"[a-z']+|[^\sa-z]", text)
    names = [word for word, _ in Counter(words).most_common(VOCABULARY - 1)]
    place = {word: at for at, word in enumerate(names, 1)}
    tokens = torch.tensor([place.get(word, 0) for word in words])
    windows = tokens[: len(tokens) // (WINDOW + 1) * (WINDOW + 1)].reshape(-1, WINDOW + 1)
    picked = windows[chosen(len(windows), WINDOWS + QUERIES, 2)]
    train, queries = picked[:WINDOWS], picked[WINDOWS:]
    return train[:, :-1], train[:, 1:], queries[:, :-1], queries[:, 1:]
