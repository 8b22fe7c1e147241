"""The samples of a run: their ids, and what a person may want to see of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from dualform.errors import CorruptError, SampleIdsError
from dualform.ledger.files import is_there, open_plain, parse_json, require, write_durably
from dualform.ledger.format import SAMPLES_FOLDER
from dualform.ledger.tensor_writing import write_tensors
from dualform.ledger.tensors import TensorFile

SampleId: TypeAlias = int | str
Label: TypeAlias = int | str
Previews: TypeAlias = Sequence[str] | Sequence[Tensor] | Tensor | NDArray[Any]
Columns: TypeAlias = Mapping[str, Sequence[Label] | Tensor]
LABEL = "label"
LARGEST_PREVIEW = 64


class SampleTable:
    """Gives each string id a number, in order of first appearance; integers stand for themselves.

    Samples without ids are counted. Of several ranks, each counts in strides, so that no number
    comes twice; `counted` is the first number that nobody has.

    >>> table = SampleTable()
    >>> table.numbers(["cat", "dog", "cat"]).tolist(), table.take_new()
    ([0, 1, 0], ['cat', 'dog'])
    >>> SampleTable(rank=1, of=3, counted=10).count(2).tolist()
    [11, 14]
    """

    def __init__(
        self,
        known: Iterable[str] = (),
        kind: type | None = None,
        rank: int = 0,
        of: int = 1,
        counted: int = 0,
    ) -> None:
        self._numbers = {name: number for number, name in enumerate(known)}
        self._new: list[str] = []
        self._kind = kind
        self._next, self._of = counted + rank, of

    def count(self, size: int) -> Tensor:
        """Numbers for so many samples without ids."""
        first, self._next = self._next, self._next + self._of * size
        return torch.arange(first, self._next, self._of)

    def numbers(self, ids: Tensor | Sequence[SampleId]) -> Tensor:
        """The ids as int64."""
        if not isinstance(ids, Tensor) and all(isinstance(name, str) for name in ids):
            self._be(str, ids)
            return torch.tensor([self._number(str(name)) for name in ids], dtype=torch.int64)
        self._be(int, ids)
        numbers = ids if isinstance(ids, Tensor) else torch.tensor([plain(i) for i in ids])
        return numbers.to("cpu", torch.int64)

    def take_new(self) -> list[str]:
        """The strings met since the last call."""
        new, self._new = self._new, []
        return new

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            self._new.append(name)
        return self._numbers[name]

    def _be(self, kind: type, ids: Tensor | Sequence[SampleId]) -> None:
        if self._kind not in (None, kind):
            given, before = ("integers", "strings") if kind is int else ("strings", "integers")
            raise SampleIdsError(
                f"recorder.samples got {given} ({list(ids[:3])}, …), but this run's ids are "
                f"{before}; use one kind throughout."
            )
        self._kind = kind


@dataclass(frozen=True)
class Preview:
    """What to show of a sample: `kind` is "image", "text" or "numbers".

    >>> Preview("text", "a fable").kind
    'text'
    """

    kind: str
    data: Any


class Samples:
    """Labels, other columns and previews of the samples of a run, as far as they were described.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> columns = {"voice": ["high", "low"]}
    >>> describe_samples(run.path, [0, 1], ["cat", "dog"], ["meow", "woof"], columns)
    >>> samples = Samples(run.path)
    >>> samples.labels[1], samples.preview(0), samples.columns["voice"][1]
    ('dog', Preview(kind='text', data='meow'), 'low')
    >>> samples
    Samples(label=2, voice=2, previews=2)
    """

    def __init__(self, path: Path) -> None:
        self._folder = path / SAMPLES_FOLDER
        self.columns: dict[str, dict[SampleId, Label]] = {LABEL: {}}
        """What is known of each sample, by the column's name; labels are one of them."""
        self._previews: dict[SampleId, tuple[str, Any]] = {}
        if is_there(self._folder):
            require(self._folder, "a folder")
        for page in sorted(self._folder.glob("*.json")):
            self._read(page)

    def __repr__(self) -> str:
        known: dict[str, Sized] = {**self.columns, "previews": self._previews}
        return f"Samples({', '.join(f'{name}={len(found)}' for name, found in known.items())})"

    @property
    def labels(self) -> dict[SampleId, Label]:
        """The column of labels."""
        return self.columns[LABEL]

    def preview(self, sample: SampleId) -> Preview | None:
        """The preview of a sample, or None where it has none."""
        kind, data = self._previews.get(sample, ("", None))
        return Preview(kind, data) if kind else None

    def _read(self, page: Path) -> None:
        with _describing(page):
            description = _parsed(page)
            ids, kind = description["ids"], description["kind"]
            columns = {LABEL: description["labels"], **description.get("columns", {})}
            for name, values in columns.items():
                self.columns.setdefault(name, {}).update(zip(ids, values, strict=False))
            for name, data in zip(ids, _previews(page, description), strict=False):
                self._previews[name] = (kind, data)


def described_ids(path: Path) -> list[SampleId]:
    """The first id of each description in a run folder.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> describe_samples(run.path, [0, 1], ["cat", "dog"])
    >>> described_ids(run.path)
    [0]
    """
    found: list[SampleId] = []
    for page in sorted((path / SAMPLES_FOLDER).glob("*.json")):
        with _describing(page):
            found += _parsed(page)["ids"][:1]
    return found


@contextmanager
def _describing(page: Path) -> Iterator[None]:
    """Says which page it is that cannot be read."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"'{page}' does not describe samples: {error!r}.") from error


def _parsed(page: Path) -> Any:
    with open_plain(page) as file:
        return parse_json(file.readall())


def _previews(page: Path, description: dict[str, Any]) -> Any:
    if description["kind"] == "text":
        return description["texts"]
    if description["kind"]:
        return TensorFile(page.with_suffix(".safetensors")).read("previews")
    return []


def describe_samples(
    path: Path,
    ids: Sequence[SampleId],
    labels: Sequence[Label] | Tensor | None = None,
    previews: Previews | None = None,
    columns: Columns | None = None,
    writer: tuple[int, int] = (0, 1),
) -> None:
    """Adds labels, columns and previews to samples; a later description of an id replaces it.

    `writer` is the rank of several that may describe samples at once: each has pages of its own.
    """
    check_ids(ids, "recorder.describe")
    columns = columns or {}
    if LABEL in columns:
        raise SampleIdsError(f"recorder.describe: the column '{LABEL}' is given as labels=….")
    for what, given in {"labels": labels, "previews": previews, **columns}.items():
        if given is not None and len(given) != len(ids):
            raise SampleIdsError(
                f"recorder.describe got {len(ids)} ids but {len(given)} {what}; give one each."
            )
    folder = path / SAMPLES_FOLDER
    folder.mkdir(exist_ok=True)
    require(folder, "a folder")
    taken = [int(entry.stem) for entry in folder.iterdir() if entry.stem.isdecimal()]
    rank, of = writer
    after = max(taken, default=0) + 1
    page = folder / f"{after + (rank - after) % of:04d}.json"
    description: dict[str, Any] = {"ids": plain_list(ids), "labels": plain_list(labels), "kind": ""}
    if columns:
        description["columns"] = {name: plain_list(values) for name, values in columns.items()}
    drawn = _drawn(previews)
    if isinstance(drawn, Tensor):
        description["kind"], array = _shrink(drawn)
        write_tensors(page.with_suffix(".safetensors"), {"previews": [array]})
    elif drawn is not None:
        description.update(kind="text", texts=drawn)
    write_durably(page, json.dumps(description))


def listed(ids: Any) -> list[Any]:
    """Ids as a list; anything that is not several things is refused.

    >>> listed(range(3))
    [0, 1, 2]
    """
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise SampleIdsError(
            f"recorder.samples got {ids!r}; give one id for each sample of the batch, in a list "
            "or a tensor."
        )
    return list(ids)


def check_ids(ids: Tensor | Sequence[Any], by: str = "recorder.samples") -> None:
    """Ids are integers of 64 bits or strings; others are refused before they are lost."""
    if isinstance(ids, Tensor):
        fine = not (ids.is_floating_point() or ids.is_complex()) and ids.ndim == 1
        fine = fine and ids.dtype != torch.bool
        if fine and ids.dtype == torch.uint64:  # torch does not compare these
            fine = bool((ids.view(torch.int64) >= 0).all())
    else:
        given = [plain(name) for name in ids]
        kinds = {type(name) for name in given}
        fine = kinds <= {str} or (kinds <= {int} and all(-(2**63) <= i < 2**63 for i in given))
    if not fine:
        shown = ids if isinstance(ids, Tensor) and not ids.ndim else list(ids[:3])
        raise SampleIdsError(
            f"{by} got {shown}; ids are integers or strings, all of one kind, in one flat list or "
            "tensor; integers fit into 64 bits, one of them the sign."
        )


def plain(value: Any) -> Any:
    """A number of numpy or torch as Python's own."""
    return value.item() if hasattr(value, "item") else value


def plain_list(values: Sequence[Any] | Tensor | None) -> list[Any]:
    """Numbers of numpy or torch in a list, as Python's own.

    >>> plain_list(torch.arange(2)), plain_list(None)
    ([0, 1], [])
    """
    if values is None:
        return []
    return [plain(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]


def _drawn(previews: Previews | None) -> list[str] | Tensor | None:
    """Texts as a list; images or numbers as one tensor."""
    if previews is None or isinstance(previews, Tensor):
        return previews
    if all(isinstance(text, str) for text in previews):
        return list(previews)
    try:
        return torch.stack([torch.as_tensor(one) for one in previews])
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(previews[0]).__name__
        raise SampleIdsError(
            f"recorder.describe got previews of type {kind}; give texts, or images or numbers of "
            "one shape, as one tensor or array."
        ) from error


def _shrink(previews: Tensor) -> tuple[str, Tensor]:
    """Images as uint8 (n, height, width[, 3]) of at most 64 pixels a side; the rest as numbers."""
    previews = previews.detach().cpu()
    if previews.ndim < 3:
        return "numbers", previews.reshape(len(previews), -1).float()
    if previews.ndim == 3:
        previews = previews[:, None]
    elif previews.shape[-1] in (1, 3) and previews.shape[1] not in (1, 3):
        previews = previews.movedim(-1, 1)
    if previews.ndim != 4 or previews.shape[1] not in (1, 3):
        return "numbers", previews.reshape(len(previews), -1).float()
    images = _bytes(previews)
    largest = max(images.shape[-2:])
    if largest > LARGEST_PREVIEW:
        scale = LARGEST_PREVIEW / largest
        images = torch.nn.functional.interpolate(images, scale_factor=scale, mode="area")
    images = images.round().to(torch.uint8).movedim(1, -1)
    return "image", images.squeeze(-1).contiguous()


def _bytes(images: Tensor) -> Tensor:
    """Pixel values stretched to 0..255 (over all images together), as float."""
    if images.dtype == torch.uint8:
        return images.float()
    low, high = images.min().float(), images.max().float()
    return (images.float() - low) / (high - low).clamp_min(1e-12) * 255
