"""Where the keys of a stream's records lie: in the shard, or among all keys that its log has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dualform.errors import CorruptError
from dualform.ledger.codecs import Column
from dualform.ledger.sessions import Shard
from dualform.ledger.tensors import MappedFile, pieces

CACHED_BYTES = 512 << 10
"""How many bytes are copied on their way at a time, so that a processor's cache holds them."""


def key_places(
    shard: Shard, stream: str, columns: Mapping[str, Column], visits: Tensor, each: Tensor
) -> tuple[Tensor, KeyTable] | None:
    """(visits,): where in a table the keys of each visit begin; None if they lie in the shard.

    `columns` says what a record takes of each array. Each segment has so many `visits` of samples
    to the stream, of so many records `each`.
    """
    source = shard.keys_of(stream)
    name = f"{source}/places"
    if name not in shard.file:
        return None
    keys = {array: columns[array] for array in shard.codec(stream).key_arrays}
    table, places = KeyTable(shard, source, keys), shard.file.read(name)
    expected = (int(visits.sum()),)
    if places.shape != expected or places.dtype != torch.int64:
        raise CorruptError(
            f"'{shard.path}' has '{name}' as {places.dtype} of shape {tuple(places.shape)}; "
            f"there are {expected[0]:,} visits: int64 of {expected}."
        )
    counts = each.repeat_interleave(visits)
    if len(places) and (int(places.min()) < 0 or int((places + counts).max()) > len(table)):
        raise CorruptError(
            f"'{shard.path}': '{name}' reaches beyond the {len(table):,} keys that its log has; "
            "restore the run from a copy."
        )
    return places, table


class KeyTable:
    """The keys that a log has of a stream, shard behind shard, up to one of them."""

    def __init__(self, shard: Shard, stream: str, columns: Mapping[str, Column]) -> None:
        self._stream, self._columns = stream, columns
        held = [one for one in shard.in_one_table(stream) if f"{stream}/keys" in one.file]
        self._shards = held
        rows = torch.tensor([self._rows(one) for one in held], dtype=torch.long)
        self._ends = rows.cumsum(0)
        self._begins = self._ends - rows
        self._gathered: dict[str, Tensor] = {}
        self._mapped: dict[Path, MappedFile] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._shards else 0

    def parts(self, places: Tensor) -> Iterator[tuple[Shard, Tensor, Tensor]]:
        """The shards that have some places: which of them, and at which records they are there."""
        where = places.numpy()
        which = np.searchsorted(self._ends.numpy(), where, side="right")
        for number in np.flatnonzero(np.bincount(which)).tolist():
            own = np.flatnonzero(which == number)
            at = where[own] - self._begins[number].numpy()
            yield self._shards[number], torch.from_numpy(own), torch.from_numpy(at)

    def column(self, array: str) -> Column:
        """What a record takes of an array."""
        return self._columns[array]

    def gather(self, array: str, records: Tensor, into: Tensor | None = None) -> Tensor:
        """Some records of an array, in memory that is given, or that the next call uses again."""
        column = self._columns[array]
        size = column.width * column.dtype.itemsize
        found = self._memory(array, len(records)) if into is None else into
        target = pieces(found)
        for shard, own, at in self.parts(records):
            source = pieces(self._stored(shard, f"{self._stream}/{array}"))
            if len(own) == len(records):
                source.take(at.numpy(), out=target, mode="clip")
                continue
            together = max(1, CACHED_BYTES // max(1, size))
            for begin in range(0, len(own), together):
                some = slice(begin, begin + together)
                target[own.numpy()[some]] = source.take(at.numpy()[some], mode="clip")
        return found

    def _memory(self, array: str, count: int) -> Tensor:
        column, memory = self._columns[array], self._gathered.get(array)
        if memory is None or len(memory) < count:
            memory = torch.empty(count, column.width, dtype=column.dtype)
            self._gathered[array] = memory
        return memory[:count]

    def _stored(self, shard: Shard, name: str) -> Tensor:
        """A whole array of a shard, mapped."""
        if shard.path not in self._mapped:
            self._mapped[shard.path] = shard.file.mapped(in_order=False)
        return self._mapped[shard.path].rows(name, 0, shard.file.rows(name))

    def _rows(self, shard: Shard) -> int:
        """How many records of keys a shard has, after a look at its arrays."""
        count = shard.file.rows(f"{self._stream}/keys")
        for array, column in self._columns.items():
            name = f"{self._stream}/{array}"
            place, expected = shard.file.array(name), (count, column.width)
            if place.shape != expected or place.dtype != column.dtype:
                raise CorruptError(
                    f"'{shard.path}' has '{name}' as {place.dtype} of shape {place.shape}; by its "
                    f"codec it is {column.dtype} of {expected}."
                )
        return count
