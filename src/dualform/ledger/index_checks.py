"""Whether the index of a shard makes sense: how many rows there are, and where they lie.

A reader takes memory by these numbers. So they are compared with each other and with the size of
the file before anything relies on them: a run may come from somebody who forged them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from dualform.errors import CorruptError
from dualform.ledger.tensors import ArrayPlace, TensorFile

FORMS = {
    "hyper": (torch.float64, 3),
    "groups": (torch.int16, 2),
    "states": (torch.uint8, 2),
    "factors": (torch.float64, 2),
    "samples": (torch.int64, 1),
    "batches": (torch.int64, 2),
    "ids": (torch.uint8, 1),
}
"""The small arrays: what their numbers are, and how many dimensions they have."""
BY_STEP = ("hyper", "groups", "states", "factors")
"""Those that have a line for each step."""
WIDTHS = {"batches": 2, "segments": 3}
"""How many numbers a line of these has."""


def check_index(file: TensorFile, first: int, last: int) -> None:
    """Refuses a shard of these steps whose index cannot be.

    >>> import tempfile; from dualform.ledger.tensor_writing import write_tensors
    >>> path = Path(tempfile.mkdtemp()) / "x.safetensors"
    >>> _ = write_tensors(path, {"states": [torch.zeros(2, 1, dtype=torch.uint8)]})
    >>> check_index(TensorFile(path), 1, 2)
    >>> check_index(TensorFile(path), 1, 9)
    Traceback (most recent call last):
    dualform.errors.CorruptError: '...x.safetensors' has an index that cannot be: 'states' has 2
    lines for 9 steps; restore the file from a copy of the run.
    """
    segments = [name for name in file.arrays if name.endswith("/segments")]
    counted = [name for name in file.arrays if name.endswith("_steps") and "/" in name]
    forms = {
        **FORMS,
        **dict.fromkeys(segments, (torch.int64, 2)),
        **dict.fromkeys(counted, (torch.int64, 1)),
    }
    for name, form in forms.items():
        if name in file:
            _check_form(file, name, *form)
    for name in BY_STEP:
        if name in file and file.rows(name) != last - first + 1:
            _refuse(file.path, f"'{name}' has {file.rows(name)} lines for {last - first + 1} steps")
    if (
        "groups" in file
        and "hyper" in file
        and bool((file.read("groups") >= file.arrays["hyper"].shape[1]).any())
    ):
        _refuse(file.path, "a book is in a parameter group that 'hyper' does not have")
    sizes = _batches(file) if "batches" in file else {}
    for name in segments:
        _check_segments(file, name, sizes, first, last)
    for name in counted:
        _check_steps(file.path, name, file.read(name), first, last)


def _check_form(file: TensorFile, name: str, dtype: torch.dtype, dimensions: int) -> None:
    place, width = file.arrays[name], WIDTHS.get(name.rpartition("/")[2])
    fits = place.dtype == dtype and len(place.shape) == dimensions
    if not fits or (width is not None and place.shape[1] != width):
        _refuse(file.path, f"'{name}' is {_described(place)}")


def _batches(file: TensorFile) -> dict[int, int]:
    """How many samples each batch has, by its number."""
    table = file.read("batches")
    sizes: list[int] = table[:, 1].tolist()
    samples = file.rows("samples")
    if min(sizes, default=0) < 0 or sum(sizes) != samples:
        _refuse(file.path, f"its batches have {sum(sizes):,} samples, and it names {samples:,}")
    found: dict[int, int] = {}
    for batch, size in zip(table[:, 0].tolist(), sizes, strict=True):
        found[batch] = max(size, found.get(batch, 0))
    return found


def _check_segments(
    file: TensorFile, name: str, sizes: dict[int, int], first: int, last: int
) -> None:
    """Each segment is of a batch that is there, and together they have no more than a file can."""
    table = file.read(name)
    _check_steps(file.path, name, table[:, 0], first, last)
    if len(table) and bool((table[:, 0].diff() < 0).any()):
        _refuse(file.path, f"'{name}' is not in the order of steps")
    records = 0
    for batch, each in table[:, 1:].tolist():
        if batch not in sizes or each < 0:
            _refuse(file.path, f"'{name}' counts {each} records a sample of the batch {batch}")
        records += sizes[batch] * each
    if records > file.nbytes:  # of which each takes a byte at least
        _refuse(file.path, f"'{name}' counts {records:,} records in {file.nbytes:,} bytes")


def _check_steps(path: Path, name: str, steps: Tensor, first: int, last: int) -> None:
    if len(steps) and not first <= int(steps.min()) <= int(steps.max()) <= last:
        found = f"{int(steps.min())} to {int(steps.max())}"
        _refuse(path, f"'{name}' is of steps {found}, and the file of {first} to {last}")


def _described(place: ArrayPlace) -> str:
    return f"{str(place.dtype).removeprefix('torch.')} of shape {_listed(place.shape)}"


def _listed(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _refuse(path: Path, problem: str) -> NoReturn:
    raise CorruptError(
        f"'{path}' has an index that cannot be: {problem}; restore the file from a copy of the run."
    )
