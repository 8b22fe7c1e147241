"""What a codec is: how the rows of a stream become arrays, and how they come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
"""What rows may be recorded in, by the name that a declaration has for it."""
PLACES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""What keys may be that are places in a table."""


class Records(NamedTuple):
    """Records of a stream: keys (records, width) and values (records, width).

    >>> Records(torch.ones(2, 3), torch.ones(2, 1)).values.shape
    torch.Size([2, 1])
    """

    keys: Tensor
    values: Tensor


class Column(NamedTuple):
    """What one record takes of an array: so many numbers of a type."""

    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Codec(ABC):
    """Keeps the rows of a stream as arrays; its fields are the parameters that a log declares.

    A row is a key and a value, as a backward pass left them: in the types `keys` and `values`. To
    write a codec, write the four methods, and put the class into `dualform.ledger.codecs.CODECS`;
    `dualform.testing.CodecContract` tests it.

    >>> from dualform.ledger.codecs import BFloat16
    >>> codec = BFloat16.for_records(Records(torch.ones(2, 3), torch.ones(2, 1)))
    >>> codec.to_json()
    {'name': 'bfloat16', 'keys': 'float32', 'values': 'float32'}
    """

    name: ClassVar[str]
    policy: ClassVar[str]
    """What `dualform.record(keep=…)` calls it."""
    value_arrays: ClassVar[tuple[str, ...]] = ("values",)
    """The arrays that suffice to decode values alone."""

    keys: str
    """What keys were recorded in: "float32", or "int64" where they are places in a table."""
    values: str
    """What values were recorded in."""

    @classmethod
    def for_records(cls, records: Records) -> Codec:
        """The codec for records of these types."""
        return cls(*(str(side.dtype).removeprefix("torch.") for side in records))

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Codec:
        """The codec that a log declares, or a ValueError that says what cannot be."""
        known = [field.name for field in fields(cls)]
        if sorted(parameters) != sorted(known):
            raise ValueError(
                f"the codec '{cls.name}' has the parameters {known}, not {sorted(parameters)}"
            )
        codec = cls(**parameters)
        codec.check()
        return codec

    def to_json(self) -> dict[str, Any]:
        """How a log declares it."""
        return {"name": self.name, **asdict(self)}

    def check(self) -> None:
        """Raises a ValueError where a parameter cannot be."""
        for side, known in (("keys", FLOATS | PLACES), ("values", FLOATS)):
            given = getattr(self, side)
            if not isinstance(given, str) or given not in known:
                raise ValueError(f"{side}={given!r} is none of the types {', '.join(known)}")

    @property
    def recorded(self) -> tuple[torch.dtype, torch.dtype]:
        """The types in which keys and values were recorded."""
        return (FLOATS | PLACES)[self.keys], FLOATS[self.values]

    @abstractmethod
    def arrays(self, keys: int, values: int) -> dict[str, Column]:
        """What one record takes of each array, for a key and a value of so many numbers."""

    @property
    def key_arrays(self) -> tuple[str, ...]:
        """The arrays that keys are decoded from, and values are not."""
        return tuple(name for name in self.arrays(1, 1) if name not in self.value_arrays)

    @abstractmethod
    def encode(self, records: Records) -> dict[str, Tensor]:
        """The arrays of some records, each (records, width)."""

    @abstractmethod
    def decode(self, arrays: Mapping[str, Tensor], start: int, stop: int) -> Records:
        """Some records again, in the types to compute with (`computed`).

        Where only `value_arrays` are given, keys have no width.
        """

    @property
    @abstractmethod
    def leaves_residual(self) -> bool:
        """Whether decoded rows may differ from the encoded ones.

        If so, a recorder keeps for each step and book what the decoded rows miss of the gradient.
        """

    def computed(self, keys: Tensor, values: Tensor) -> Records:
        """Numbers in the types to compute with: as recorded, but of at least 32 bits.

        Places in a table are int64.
        """
        of_keys, of_values = (_computed(dtype) for dtype in self.recorded)
        return Records(keys.to(of_keys), values.to(of_values))

    def bytes_per_row(self, keys: int, values: int) -> int:
        """What a record with a key and a value of so many numbers takes on disk."""
        columns = self.arrays(keys, values).values()
        return sum(column.width * column.dtype.itemsize for column in columns)


def _computed(recorded: torch.dtype) -> torch.dtype:
    if not recorded.is_floating_point:
        return torch.int64
    return torch.float64 if recorded == torch.float64 else torch.float32
