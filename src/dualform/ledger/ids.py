"""The ids of samples: each rank numbers those it meets, and a reader gives each id one number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from dualform.errors import CorruptError
from dualform.ledger.files import parse_json
from dualform.ledger.sessions import Shard
from dualform.ledger.tensors import TensorFile


def encode_ids(ids: Sequence[str]) -> Tensor:
    """String ids as bytes: one JSON string a line."""
    text = "".join(json.dumps(name) + "\n" for name in ids)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode_ids(file: TensorFile) -> list[str]:
    """The string ids that a shard is the first of its rank to have, in order."""
    if "ids" not in file:
        return []
    try:
        names = [parse_json(line) for line in bytes(file.read("ids").tolist()).splitlines()]
    except ValueError as error:
        raise CorruptError(f"the ids of '{file.path}' are altered: {error}.") from error
    if not all(isinstance(name, str) for name in names):
        raise CorruptError(f"the ids of '{file.path}' are altered: not all are texts.")
    return names


class Ids:
    """The string ids of a run; none where its ids are integers.

    Ranks number the strings they meet, each for itself. The run's numbers are those of rank 0;
    what only other ranks have met comes behind, rank by rank.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards

    @cached_property
    def by_rank(self) -> dict[int, list[str]]:
        """What the numbers of each rank stand for."""
        found: dict[int, list[str]] = {}
        for shard in sorted(self._shards, key=lambda shard: shard.rank):
            found.setdefault(shard.rank, []).extend(decode_ids(shard.file))
        return found

    @cached_property
    def strings(self) -> list[str] | None:
        """What the run's numbers stand for; None where ids are integers."""
        own = self.by_rank.get(0, [])
        others = dict.fromkeys(name for r, names in self.by_rank.items() if r for name in names)
        for name in own:
            others.pop(name, None)
        return [*own, *others] or None

    def numbers(self, rank: int, stored: Tensor) -> Tensor:
        """The run's numbers of samples, from those that a rank has stored."""
        return run_numbers(self.table(rank), rank, stored)

    def table(self, rank: int) -> Tensor | None:
        """The run's number for each of a rank's; None where they are the same."""
        return None if not rank or self.strings is None else self._run_numbers[rank]

    @cached_property
    def _run_numbers(self) -> dict[int, Tensor]:
        at = {name: number for number, name in enumerate(self.strings or [])}
        return {
            rank: torch.tensor([at[name] for name in names], dtype=torch.int64)
            for rank, names in self.by_rank.items()
        }


def run_numbers(table: Tensor | None, rank: int, stored: Tensor) -> Tensor:
    """The run's numbers of samples by a rank's table, from those that the rank has stored."""
    if table is None:
        return stored
    if len(stored) and not 0 <= int(stored.min()) <= int(stored.max()) < len(table):
        raise CorruptError(
            f"rank {rank} has {len(table):,} ids, and samples whose numbers lie beyond them."
        )
    return table[stored]
