"""The data of studies: pictures and texts, in the folder of `--data` or DUALFORM_DATA."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dualform.errors import ReadingError
from dualform.ledger.tensors import raw

DIGITS = tuple("0123456789")
GARMENTS = (
    "T-shirt",
    "trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
CIFAR = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DEBIAN = Path("/usr/share/datasets")
"""Where Debian's package dataset-fashion-mnist puts its files."""
CIFAR_RECORD = 1 + 3 * 32 * 32
CIFAR_ARCHIVE = "cifar-10-batches-bin"
"""The folder in the archive of CIFAR-10's binary version."""


@dataclass(frozen=True)
class Images:
    """Pictures (n, height, width) or (n, height, width, 3) of bytes, and their classes.

    It is a data set as `record(dataset=…)` takes it: a picture and its label for each sample.
    """

    pixels: Tensor
    y: Tensor
    classes: tuple[str, ...]
    center: Tensor | float = 127.5
    spread: Tensor | float = 127.5
    """A network sees `(pixels − center) / spread`: one number for all pixels, or for each color."""

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pixels[index], int(self.y[index])

    def some(self, rows: Tensor) -> Images:
        """Some of the samples, in this order."""
        return replace(self, pixels=self.pixels[rows], y=self.y[rows])

    def standardized(self, train: Images) -> Images:
        """The same, seen with the mean 0 and the deviation 1 that training images then have.

        >>> images = Images(torch.tensor([[[0, 100]]]).byte(), torch.tensor([3]), DIGITS)
        >>> images.standardized(images).inputs()
        tensor([[-1.,  1.]])
        """
        colors = train.pixels.shape[3:]
        pixels = train.pixels.double().reshape(-1, *colors)
        center, spread = pixels.mean(0).float(), pixels.std(0, correction=0).float()
        return replace(self, center=center, spread=spread)

    def inputs(self) -> Tensor:
        """(n, numbers): all pixels of a sample in a row, by default from −1 to 1.

        >>> Images(torch.tensor([[[0, 255]]]).byte(), torch.tensor([3]), DIGITS).inputs()
        tensor([[-1.,  1.]])
        """
        return ((self.pixels.float() - self.center) / self.spread).flatten(1)


def check_count(images: Images, name: str, batch: int) -> None:
    """Makes sure that there are training images enough for a batch."""
    if len(images) < batch:
        raise ReadingError(
            f"there are {len(images)} training images of {name}, fewer than the {batch} of a "
            "batch; is --data right?"
        )


def first_of_each(groups: Tensor, count: int) -> Tensor:
    """The first so many images of each class, class by class.

    >>> first_of_each(torch.tensor([1, 0, 1, 1, 0]), 2).tolist()
    [1, 4, 0, 2]
    """
    classes = sorted(set(groups.tolist()))
    return torch.cat([torch.nonzero(groups == one).flatten()[:count] for one in classes])


def fingerprint(*data: Tensor | str) -> str:
    """A checksum of a study's data: what it keeps of its parts holds for these data only.

    >>> fingerprint(torch.zeros(2), torch.ones(1)), fingerprint(torch.zeros(3))
    ('f6307319', '7bd5c66f')
    """
    found = 0
    for part in data:
        found = zlib.crc32(part.encode() if isinstance(part, str) else raw(part), found)
    return f"{found:08x}"


def data_folder(given: Path | None) -> Path:
    """The folder of `--data`, or of the environment variable DUALFORM_DATA."""
    named = given or os.environ.get("DUALFORM_DATA")
    if not named:
        raise ReadingError("say where the data are: --data DIR, or DUALFORM_DATA=DIR.")
    return Path(named)


def read_packed(folder: Path, name: str) -> bytes:
    """The bytes of a file that may be compressed: `name`, or `name.gz`."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            raw = path.read_bytes()
            return gzip.decompress(raw) if path.suffix == ".gz" else raw
    raise ReadingError(f"'{folder}' has neither {name} nor {name}.gz; is --data right?")


def read_text(data: Path, name: str) -> str:
    """A text of the folder `text`, such as "aesop.txt"."""
    return read_packed(data / "text", name).decode("utf-8")


def load_images(data: Path, name: str) -> tuple[Images, Images]:
    """The training and test parts of "mnist", "fashion-mnist" or "cifar10"."""
    if name == "cifar10":
        return _cifar(_cifar_folder(data))
    classes = {"mnist": DIGITS, "fashion-mnist": GARMENTS}
    if name not in classes:
        known = ", ".join(f"'{one}'" for one in [*classes, "cifar10"])
        raise ReadingError(f"images '{name}' are not known; there are {known}.")
    folder = data / name
    if not folder.is_dir() and (DEBIAN / name).is_dir():
        folder = DEBIAN / name
    if not folder.is_dir():
        debian = ", or install Debian's package dataset-fashion-mnist"
        raise ReadingError(
            f"'{data}' has no folder '{name}' with the four idx files of {name}; put them there"
            f"{debian if name == 'fashion-mnist' else ''}."
        )
    train, test = (_idx_pair(folder, part, classes[name]) for part in ("train", "t10k"))
    return train, test


def _idx_pair(folder: Path, part: str, classes: tuple[str, ...]) -> Images:
    pixels = _idx(folder, f"{part}-images-idx3-ubyte")
    return Images(pixels, _idx(folder, f"{part}-labels-idx1-ubyte").long(), classes)


def _idx(folder: Path, name: str) -> Tensor:
    """An idx file of bytes: two zeros, the type 8, the number of dimensions, their sizes."""
    raw = read_packed(folder, name)
    dims = raw[3] if len(raw) > 3 else 0
    shape = struct.unpack(f">{dims}I", raw[4 : 4 + 4 * dims]) if len(raw) >= 4 + 4 * dims else ()
    body = torch.frombuffer(bytearray(raw[4 + 4 * dims :]), dtype=torch.uint8) if dims else None
    if raw[:3] != b"\0\0\x08" or body is None or body.numel() != torch.Size(shape).numel():
        raise ReadingError(f"'{folder / name}' is no idx file of bytes, or it was cut off.")
    return body.reshape(shape)


def _cifar_folder(data: Path) -> Path:
    """Where the files are: in a folder of the study's own name, or as the archive unpacks."""
    own = data / "cifar10"
    known = (own, own / CIFAR_ARCHIVE, data / CIFAR_ARCHIVE)
    return next((one for one in known if any(one.glob("test_batch.bin*"))), own)


def _cifar(folder: Path) -> tuple[Images, Images]:
    """The binary version: records of a label and 3 × 32 × 32 bytes."""
    train = torch.cat([_cifar_records(folder, f"data_batch_{at}.bin") for at in range(1, 6)])
    parts = (train, _cifar_records(folder, "test_batch.bin"))
    train_part, test = (
        Images(raw[:, 1:].reshape(-1, 3, 32, 32).permute(0, 2, 3, 1), raw[:, 0].long(), CIFAR)
        for raw in parts
    )
    return train_part, test


def _cifar_records(folder: Path, name: str) -> Tensor:
    raw = read_packed(folder, name)
    if len(raw) % CIFAR_RECORD:
        raise ReadingError(
            f"'{folder / name}' has {len(raw):,} bytes, which are no records of "
            f"{CIFAR_RECORD:,}; give CIFAR-10's binary version."
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(-1, CIFAR_RECORD)
