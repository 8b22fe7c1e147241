"""From what a person draws, uploads or types to what the model is called with, and back."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dualform.errors import ReadingError
from dualform.ledger.samples import Preview

Encode: TypeAlias = Callable[[Preview], Any]
"""What the model is called with, a batch of one, for a picture or a text."""

LONGEST_TEXT = 20_000


@dataclass(frozen=True)
class Pixels:
    """Images whose inputs are `scale · pixel + shift`, in the order of the model's dimensions.

    >>> x = torch.linspace(-1, 1, 12).reshape(3, 1, 2, 2)
    >>> pixels = Pixels.stretched(x, (2, 2))
    >>> shown = pixels.shown(x[2])
    >>> float((pixels(Preview("image", shown)) - x[2:]).abs().max()) < 0.01
    True
    """

    image: tuple[int, ...]
    """(height, width) or (height, width, 3)."""
    shape: tuple[int, ...]
    """One input, without its batch."""
    scale: float
    shift: float

    @classmethod
    def stretched(cls, x: Tensor, image: tuple[int, ...]) -> Pixels:
        """So that the smallest number of all inputs is black, and the largest white."""
        low, high = float(x.min()), float(x.max())
        return cls(image, tuple(x.shape[1:]), max(high - low, 1e-12) / 255, low)

    @classmethod
    def fitted(cls, x: Tensor, previews: Sequence[Tensor]) -> Pixels | None:
        """As some inputs and their pictures show it; None where inputs are made otherwise."""
        image, shape = tuple(previews[0].shape), tuple(x.shape[1:])
        shown = torch.stack([_ordered(p, shape) for p in previews]).double().flatten()
        given = x[: len(previews)].double().flatten()
        design = torch.stack([shown, torch.ones_like(shown)], 1)
        scale, shift = torch.linalg.lstsq(design, given[:, None]).solution[:, 0].tolist()
        if float((design @ torch.tensor([scale, shift]).double() - given).abs().max()) > abs(scale):
            return None
        return cls(image, shape, scale, shift)

    def __call__(self, preview: Preview) -> Tensor:
        """(1, *shape): the input that a picture stands for."""
        return _ordered(preview.data, self.shape).float()[None] * self.scale + self.shift

    def shown(self, x: Tensor) -> Tensor:
        """The picture of one input."""
        levels = ((x.double() - self.shift) / self.scale).round().clamp(0, 255).to(torch.uint8)
        if len(self.image) == 2:
            return levels.reshape(self.image)
        return levels.reshape(3, *self.image[:2]).movedim(0, -1)


def _ordered(pixels: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pixels in the shape of an input: color goes first in it."""
    return (pixels.movedim(-1, 0) if pixels.ndim == 3 else pixels).reshape(shape)


def decoded_image(text: str, image: tuple[int, ...]) -> Preview:
    """The picture whose bytes a page sends, row by row.

    >>> decoded_image("AAECAw", (2, 2)).data.tolist()
    [[0, 1], [2, 3]]
    """
    size = torch.Size(image).numel()
    try:
        if len(text) > 2 * size:
            raise ValueError("too long")
        data = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        if len(data) != size:
            raise ValueError(f"{len(data)} bytes")
    except ValueError as error:
        form = " × ".join(map(str, image))
        raise ReadingError(
            f"the image is {error}; expected base64url of {size:,} bytes, {form}, 0 to 255 each."
        ) from error
    return Preview("image", torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(image))


def typed_text(text: str) -> Preview:
    """A text that somebody typed."""
    if not text.strip() or len(text) > LONGEST_TEXT:
        raise ReadingError(
            f"the text has {len(text):,} characters; expected 1 to {LONGEST_TEXT:,}."
        )
    return Preview("text", text)


def pieces(preview: Preview | None, count: int) -> list[str] | None:
    """A text in so many pieces, where words or characters are as many; otherwise None.

    Characters are counted in the text itself: what a page shows of it is shorter, and on one line.

    >>> pieces(Preview("text", "to be or"), 3), pieces(Preview("text", "a\\nb"), 3)
    (['to', 'be', 'or'], ['a', '\\n', 'b'])
    >>> pieces(Preview("text", "to be"), 7) is None
    True
    """
    if preview is None or preview.kind != "text":
        return None
    text = str(preview.data)
    return next((list(p) for p in (text.split(), text) if len(p) == count), None)
