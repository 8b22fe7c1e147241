"""Records as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dualform.ledger.codecs.codec import Codec, Column, Records


@dataclass(frozen=True)
class Exact(Codec):
    """Every number is kept in the type it was recorded in; nothing is left to a residual.

    Under autocast a kernel sees numbers of 16 bits. These are the rows, and they are kept as such.

    >>> Exact("float32", "bfloat16").bytes_per_row(keys=3, values=2)
    16
    """

    name: ClassVar[str] = "exact"
    policy: ClassVar[str] = "rows"
    keys: str = "float32"
    values: str = "float32"

    def arrays(self, keys: int, values: int) -> dict[str, Column]:
        """Keys and values."""
        of_keys, of_values = self.recorded
        return {"keys": Column(keys, of_keys), "values": Column(values, of_values)}

    def encode(self, records: Records) -> dict[str, Tensor]:
        """The rows themselves, without a copy."""
        return {"keys": records.keys, "values": records.values}

    def decode(self, arrays: Mapping[str, Tensor], start: int, stop: int) -> Records:
        """The same numbers."""
        values = arrays["values"][start:stop]
        keys = arrays["keys"][start:stop] if "keys" in arrays else values[:, :0]
        return self.computed(keys, values)

    @property
    def leaves_residual(self) -> bool:
        """Never."""
        return False
