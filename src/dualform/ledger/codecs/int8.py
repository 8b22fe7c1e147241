"""Records in a quarter of the space: each number as a multiple of its row's scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dualform.ledger.codecs.codec import Codec, Column, Records

LEVELS = 127
"""The largest number of a row is stored as so much."""


@dataclass(frozen=True)
class Int8(Codec):
    """A row `x` is stored as integers `round(x / s)` with the scale `s = max|x| / 127`.

    Keys and values have scales of their own. Places in a table and numbers of 8 bits stay as they
    are, with a scale of 1.

    >>> codec = Int8("float32", "float32")
    >>> codec.bytes_per_row(keys=300, values=200), codec.leaves_residual
    (508, True)
    >>> row = Records(torch.tensor([[1.0, -0.5, 0.0]]), torch.tensor([[2.0]]))
    >>> codec.encode(row)["keys"]
    tensor([[127, -64,   0]], dtype=torch.int8)
    """

    name: ClassVar[str] = "int8"
    policy: ClassVar[str] = "int8"
    value_arrays: ClassVar[tuple[str, ...]] = ("values", "value_scales")
    keys: str = "float32"
    values: str = "float32"

    def arrays(self, keys: int, values: int) -> dict[str, Column]:
        """Keys and values, and the scale of each."""
        of_keys, of_values = self.recorded
        return {
            "keys": Column(keys, _stored(of_keys)),
            "values": Column(values, _stored(of_values)),
            "key_scales": Column(1, _scale(of_keys)),
            "value_scales": Column(1, _scale(of_values)),
        }

    def encode(self, records: Records) -> dict[str, Tensor]:
        """Each number in units of its row's scale, rounded to the nearest integer."""
        (keys, key_scales), (values, value_scales) = map(_encode, records)
        return {
            "keys": keys,
            "values": values,
            "key_scales": key_scales,
            "value_scales": value_scales,
        }

    def decode(self, arrays: Mapping[str, Tensor], start: int, stop: int) -> Records:
        """Integers times the scales of their rows."""
        values = arrays["values"][start:stop]
        keys = arrays["keys"][start:stop] if "keys" in arrays else values[:, :0]
        found = self.computed(keys, values)
        if "keys" in arrays and _is_scaled(self.recorded[0]):
            found.keys.mul_(arrays["key_scales"][start:stop])
        if _is_scaled(self.recorded[1]):
            found.values.mul_(arrays["value_scales"][start:stop])
        return found

    @property
    def leaves_residual(self) -> bool:
        """Where anything is rounded."""
        return any(map(_is_scaled, self.recorded))


def _is_scaled(recorded: torch.dtype) -> bool:
    return recorded.is_floating_point and recorded.itemsize > 1


def _stored(recorded: torch.dtype) -> torch.dtype:
    return torch.int8 if _is_scaled(recorded) else recorded


def _scale(recorded: torch.dtype) -> torch.dtype:
    return torch.float64 if recorded == torch.float64 else torch.float32


def _encode(side: Tensor) -> tuple[Tensor, Tensor]:
    """Some keys or values as integers, and the scale of each row."""
    dtype = _scale(side.dtype)
    if not _is_scaled(side.dtype):
        return side, torch.ones(len(side), 1, dtype=dtype, device=side.device)
    wide = side.to(dtype)
    largest = wide.abs().amax(1, keepdim=True) if side.shape[1] else wide.new_zeros(len(side), 1)
    scales = largest / LEVELS
    whole = torch.where(scales > 0, wide / scales, 0.0).round_()
    return whole.clamp_(-LEVELS, LEVELS).to(torch.int8), scales
