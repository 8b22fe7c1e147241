"""Records in half the space, rounded to 8 significant bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dualform.ledger.codecs.codec import Codec, Column, Records


@dataclass(frozen=True)
class BFloat16(Codec):
    """Numbers of 32 or 64 bits are rounded to bfloat16; others are kept as they are.

    Places in a table are never rounded.

    >>> codec = BFloat16("float32", "float32")
    >>> codec.bytes_per_row(keys=3, values=2), codec.leaves_residual
    (10, True)
    """

    name: ClassVar[str] = "bfloat16"
    policy: ClassVar[str] = "half"
    keys: str = "float32"
    values: str = "float32"

    def arrays(self, keys: int, values: int) -> dict[str, Column]:
        """Keys and values."""
        of_keys, of_values = map(_stored, self.recorded)
        return {"keys": Column(keys, of_keys), "values": Column(values, of_values)}

    def encode(self, records: Records) -> dict[str, Tensor]:
        """Each number, rounded to the nearest."""
        return {
            "keys": records.keys.to(_stored(records.keys.dtype)),
            "values": records.values.to(_stored(records.values.dtype)),
        }

    def decode(self, arrays: Mapping[str, Tensor], start: int, stop: int) -> Records:
        """The rounded numbers."""
        values = arrays["values"][start:stop]
        keys = arrays["keys"][start:stop] if "keys" in arrays else values[:, :0]
        return self.computed(keys, values)

    @property
    def leaves_residual(self) -> bool:
        """Where anything is rounded."""
        return any(_stored(dtype) != dtype for dtype in self.recorded)


def _stored(dtype: torch.dtype) -> torch.dtype:
    wide = dtype in (torch.float32, torch.float64)
    return torch.bfloat16 if wide else dtype
