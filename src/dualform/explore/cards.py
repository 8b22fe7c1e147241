"""Samples as a page shows them: name, label and preview, an image as inline PNG."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualform.errors import ReadingError
from dualform.explore.contract import EvidenceCard, ImagePreview, PreviewCard
from dualform.ledger.samples import Preview
from dualform.read import Run
from dualform.read.scores import Array

LONGEST_NAME = 80
LONGEST_TEXT = 600
CRISP = 64
"""Images up to this many pixels a side are shown with hard edges."""
MOST_NUMBERS = 64


def sample_cards(run: Run, chosen: Iterable[int], amounts: Array) -> list[EvidenceCard]:
    """What to show of some training samples, by their places, and their amounts."""
    ids, samples, labels = run.source.ids, run.samples, run.samples.labels
    cards: list[EvidenceCard] = []
    for at in chosen:
        name = ids[at]
        preview = preview_card(samples.preview(name), f"sample {shorten(name, LONGEST_NAME)}")
        label, value = plain_label(labels.get(name)), float(amounts[at])
        cards.append({"id": name, "label": label, "value": value, "preview": preview})
    return cards


def preview_card(preview: Preview | None, whose: str) -> PreviewCard | None:
    """What to show of a preview, as JSON; None where there is nothing.

    >>> preview_card(Preview("text", "a film I liked"), "review 3")
    {'kind': 'text', 'text': 'a film I liked'}
    """
    if preview is None:
        return None
    if preview.kind == "image":
        return _image(preview.data, whose)
    if preview.kind == "numbers":
        values = torch.as_tensor(preview.data).double().flatten()
        if not len(values):
            return None
        chosen = np.linspace(0, len(values) - 1, min(len(values), MOST_NUMBERS)).round()
        return {"kind": "numbers", "values": values.nan_to_num()[chosen.astype(int)].tolist()}
    if preview.kind == "text":
        return {"kind": "text", "text": shorten(preview.data, LONGEST_TEXT)}
    raise ReadingError(
        f"the preview of {whose} is of kind {preview.kind!r}; previews are of kind 'image', "
        "'text' or 'numbers'."
    )


def _image(data: Any, whose: str) -> ImagePreview:
    tensor = isinstance(data, Tensor)
    pixels = tensor and data.dtype == torch.uint8 and data.numel() > 0
    if not pixels or not (data.ndim == 2 or (data.ndim == 3 and data.shape[2] == 3)):
        given = f"{data.dtype} {tuple(data.shape)}" if tensor else type(data).__name__
        raise ReadingError(
            f"the image preview of {whose} is {given}; expected a torch.uint8 tensor of shape "
            "(height, width) or (height, width, 3): scale to 0..255 and call .to(torch.uint8)."
        )
    height, width = data.shape[:2]
    source = "data:image/png;base64," + b64encode(png(data)).decode()
    crisp = max(height, width) <= CRISP
    return {"kind": "image", "source": source, "crisp": crisp, "width": width, "height": height}


def plain_label(label: Any) -> Any:
    """A label out of a tensor or an array as an ordinary number; a text without line breaks."""
    found = label.item() if hasattr(label, "item") else label
    return shorten(found, LONGEST_NAME) if isinstance(found, str) else found


def shorten(text: object, length: int) -> str:
    """At most `length` characters of it, on one line, and none that cannot be written as UTF-8.

    >>> shorten("a stranger's label", 10)
    'a strange…'
    """
    line = " ".join(str(text).split()).encode("utf-8", "replace").decode()
    return line if len(line) <= length else line[: length - 1] + "…"


def png(pixels: Tensor) -> bytes:
    """A PNG file of uint8 pixels: (height, width) gray, or (height, width, 3) color.

    >>> png(torch.zeros(8, 8, dtype=torch.uint8))[:4]
    b'\\x89PNG'
    """
    height, width = pixels.shape[:2]
    lines = pixels.cpu().reshape(height, -1).numpy()
    unfiltered = np.insert(lines, 0, 0, axis=1).tobytes()  # each line says first how it is filtered
    color = 2 if pixels.ndim == 3 else 0
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(unfiltered, 9), b"IEND": b""}
    parts = [b"\x89PNG\r\n\x1a\n"]
    for name, data in chunks.items():
        checksum = struct.pack(">I", zlib.crc32(name + data))
        parts += [struct.pack(">I", len(data)), name, data, checksum]
    return b"".join(parts)
