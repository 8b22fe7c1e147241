"""Keys are stored once: what a writer leaves out of a shard because it is there already.

Two streams of a shard may have the same keys, as the projections of one input to queries, keys and
values do. Then one of them has the keys, and the log's line names it for the other. A stream of a
first layer meets the same samples in every epoch. Then a shard has only the keys that its log has
not stored before, and says at which place of all the log's keys those of each visit begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from secrets import randbits

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_digest

from dualform.ledger.format import Declaration
from dualform.ledger.tensors import raw

LEAST_BYTES = 32
"""Keys of a visit that take less are stored as they come: a place takes 8 bytes."""
MOST_KNOWN = 1 << 22
"""Of so many visits a stream's keys are remembered, with 24 bytes each."""
WATCHED = 4096
"""So many samples are watched to see whether their keys come again when they do."""
ENOUGH = 64
"""So many of their visits show it."""
FEW = 0.1
"""If no larger part of those has known keys, the keys of the stream are not looked at any more."""

Arrays = dict[str, list[Tensor]]


class SharedKeys:
    """What a writer knows of the keys in its log; leaves out of each shard what is there already.

    >>> from dualform.ledger import Stream
    >>> x, segments = torch.randn(2, 30), torch.tensor([[1, 1, 1]])
    >>> arrays = {"q/keys": [x], "q/segments": [segments], "k/keys": [x], "k/segments": [segments]}
    >>> declared = [Declaration(Stream(name, (30,), (1,)), {}) for name in "qk"]
    >>> SharedKeys().leave_out(arrays, declared, repeating=[]), "k/keys" in arrays
    ({'k': 'q'}, False)
    """

    def __init__(self) -> None:
        self._declared: dict[str, Declaration] = {}
        self._tables: dict[str, KnownKeys] = {}
        self._repeating: set[str] = set()

    def leave_out(
        self, arrays: Arrays, declared: Iterable[Declaration], repeating: Iterable[str]
    ) -> dict[str, str]:
        """Takes keys out of the arrays of the next shard; returns whose keys a stream has instead.

        `declared` are the streams that the shard's line declares. `repeating` names those that may
        see the same keys again; what summarizes such a stream may too.
        """
        for one in declared:
            self._declared[one.stream.name] = one
            self._tables.pop(one.stream.name, None)  # by another codec, keys are others
        same: dict[str, str] = {}
        alike: dict[object, list[str]] = {}
        for name in [name for name in self._declared if f"{name}/segments" in arrays]:
            keys = self._keys(name, arrays)
            if any(part.nbytes for parts in keys.values() for part in parts):
                own = alike.setdefault(self._kind(name, keys), [])
                source = next((one for one in own if self._are_same(name, one, arrays)), None)
                if source is None:
                    own.append(name)
                else:
                    same[name] = source
        for name in same:
            for full in self._keys(name, arrays):
                del arrays[full]
        self._repeating |= set(repeating)
        for name in [name for own in alike.values() for name in own]:
            table = self._tables.setdefault(name, KnownKeys())
            if self._repeating & {name, self._declared[name].stream.layer}:
                table.leave_out(name, self._keys(name, arrays), arrays)
            else:
                table.rows += sum(map(len, arrays[f"{name}/keys"]))
        return same

    def _keys(self, name: str, arrays: Arrays) -> Arrays:
        """The arrays that hold a stream's keys."""
        named = [f"{name}/{each}" for each in self._declared[name].codec.key_arrays]
        return {full: arrays[full] for full in named if full in arrays}

    def _kind(self, name: str, keys: Arrays) -> object:
        """What the keys of streams have in common that may be the same."""
        rows = [row for parts in keys.values() for row in (parts[0][:1], parts[-1][-1:])]
        forms = [_form(parts) for parts in keys.values()]
        return (self._declared[name].codec.keys, *forms, *(bytes(raw(row)) for row in rows))

    def _are_same(self, name: str, other: str, arrays: Arrays) -> bool:
        segments = (arrays[f"{name}/segments"], arrays[f"{other}/segments"])
        keys = (self._keys(stream, arrays).values() for stream in (name, other))
        return _equal(*segments) and all(_equal(*pair) for pair in zip(*keys, strict=True))


@dataclass
class KnownKeys:
    """The keys of a stream that a log has, as fingerprints: 128 bits and a place for each visit.

    A visit is what one use of a layer left of one sample.
    """

    rows: int = 0
    """How many records of keys the log's shards have together."""
    prints: NDArray[np.uint64] = field(default_factory=lambda: np.empty((0, 2), np.uint64))
    """Ordered by their first half."""
    places: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Where the keys of each begin."""
    watched: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """The samples of the first visits."""
    again: int = 0
    """How many visits of those were seen again."""
    found: int = 0
    """How many of these had known keys."""
    seed: int = field(default_factory=lambda: randbits(64))
    """Fingerprints depend on it. Nobody can know it, and so make data whose fingerprints agree."""
    is_over: bool = False
    """Whether keys are not looked at any more, because they do not come again."""

    def leave_out(self, name: str, keys: Arrays, arrays: Arrays) -> None:
        """Leaves only new keys of a stream among the arrays of a shard, with the visits' places."""
        counts, samples = _visits(name, arrays)
        width = sum(parts[0].nbytes // max(1, len(parts[0])) for parts in keys.values())
        is_new = np.ones(len(counts), bool)
        if not self.is_over and counts.max(initial=0) * width >= LEAST_BYTES:
            keys = {full: [part.contiguous() for part in parts] for full, parts in keys.items()}
            prints = _fingerprints(list(keys.values()), counts.tolist(), self.seed)
            self._watch(samples, prints)
            if not self.is_over:
                is_new, places = self._place(prints, counts)
        if not is_new.all():
            chosen = torch.from_numpy(is_new.repeat(counts))
            for full, parts in keys.items():
                arrays[full] = _chosen(parts, chosen)
                if not arrays[full]:
                    del arrays[full]
            arrays[f"{name}/places"] = [torch.from_numpy(places)]
        self.rows += int(counts[is_new].sum())

    def _watch(self, samples: NDArray[np.int64], prints: NDArray[np.uint64]) -> None:
        """Gives up where the first samples have come again, and their keys have not."""
        if not len(self.watched):
            self.watched = np.unique(samples[:WATCHED])
            return
        again = np.isin(samples, self.watched)
        self.again += int(again.sum())
        self.found += int((_find(self.prints, prints[again]) >= 0).sum())
        if self.again >= ENOUGH and self.found <= FEW * self.again:
            self.is_over = True
            self.prints, self.places = self.prints[:0], self.places[:0]

    def _place(
        self, prints: NDArray[np.uint64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which visits have new keys, and where the keys of each begin; new ones are remembered."""
        order = np.lexsort((prints[:, 1], prints[:, 0]))  # stable: the first of equals comes first
        begins = np.ones(len(order), bool)
        begins[1:] = (prints[order][1:] != prints[order][:-1]).any(1)
        firsts = order[begins]
        known = _find(self.prints, prints[firsts])
        new = np.sort(firsts[known < 0])
        is_new = np.zeros(len(order), bool)
        is_new[new] = True
        stored = np.where(is_new, counts, 0)
        places = self.rows + stored.cumsum() - stored
        places[firsts[known >= 0]] = self.places[known[known >= 0]]
        places[order] = places[firsts][begins.cumsum() - 1]
        new = new[: MOST_KNOWN - len(self.prints)]
        every, at = np.concatenate([self.prints, prints[new]]), [self.places, places[new]]
        order = np.argsort(every[:, 0], kind="stable")
        self.prints, self.places = every[order], np.concatenate(at)[order]
        return is_new, places


def _visits(name: str, arrays: Arrays) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many records each visit has, and its sample; segment by segment."""
    table, samples = (torch.cat(arrays[each]).numpy() for each in ("batches", "samples"))
    ends = dict(zip(table[:, 0].tolist(), table[:, 1].cumsum().tolist(), strict=True))
    sizes, counts, found = dict(table.tolist()), [samples[:0]], [samples[:0]]
    for _, batch, each in torch.cat(arrays[f"{name}/segments"]).tolist():
        counts.append(np.full(sizes[batch], each))
        found.append(samples[ends[batch] - sizes[batch] : ends[batch]])
    return np.concatenate(counts), np.concatenate(found)


def _fingerprints(
    keys: Sequence[Sequence[Tensor]], counts: Sequence[int], seed: int
) -> NDArray[np.uint64]:
    """(visits, 2): 128 bits of each visit's keys."""
    if len(keys) == 1:  # one call a visit, whose loop keeps training from the interpreter
        whole = b"".join([xxh3_128_digest(piece, seed) for piece in _pieces(keys[0], counts)])
        return np.frombuffer(whole, np.uint64).reshape(-1, 2)
    hashes = [xxh3_128(piece, seed) for piece in _pieces(keys[0], counts)]
    for parts in keys[1:]:
        for each, piece in zip(hashes, _pieces(parts, counts), strict=True):
            each.update(piece)
    digests = b"".join([each.digest() for each in hashes])
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def _pieces(parts: Sequence[Tensor], counts: Sequence[int]) -> list[memoryview]:
    """The bytes of each visit's records; a part holds whole visits."""
    alike, left, pieces = len(set(counts)) == 1, iter(counts), list[memoryview]()
    for part in parts:
        data, at = raw(part), 0
        size = len(data) // max(1, len(part))
        if alike:
            each = max(1, counts[0] * size)
            pieces += [data[at : at + each] for at in range(0, len(data), each)]
            continue
        while at < len(data):
            end = at + next(left) * size
            pieces.append(data[at:end])
            at = end
    return pieces


def _find(known: NDArray[np.uint64], prints: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where fingerprints are among those that are known; -1 for those that are not."""
    if not len(known):
        return np.full(len(prints), -1)
    at = np.searchsorted(known[:, 0], prints[:, 0]).clip(max=len(known) - 1)
    return np.where((known[at] == prints).all(1), at, -1)


def _chosen(parts: Sequence[Tensor], chosen: Tensor) -> list[Tensor]:
    """Some records of an array, in parts."""
    own = torch.split(chosen, [len(part) for part in parts])
    kept = [part if mask.all() else part[mask] for part, mask in zip(parts, own, strict=True)]
    return [part for part in kept if len(part)]


def _form(parts: Sequence[Tensor]) -> tuple[object, ...]:
    """The shape and type of an array in parts."""
    return (sum(map(len, parts)), parts[0].shape[1:], parts[0].dtype)


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two arrays have the same bytes; their parts may have other lengths."""
    if _form(one) != _form(other):
        return False
    ends = sorted({end for parts in (one, other) for end in accumulate(map(len, parts))})
    lengths = [end - begin for begin, end in pairwise([0, *ends]) if end > begin]
    pairs = zip(_in_lengths(one, lengths), _in_lengths(other, lengths), strict=True)
    return all(torch.equal(_words(a), _words(b)) for a, b in pairs)


def _in_lengths(parts: Sequence[Tensor], lengths: Sequence[int]) -> Iterator[Tensor]:
    rest = iter(lengths)
    for part in parts:
        at = 0
        while at < len(part):
            length = next(rest)
            yield part[at : at + length]
            at += length


def _words(rows: Tensor) -> Tensor:
    """The bytes of some rows in the largest words that fit, which are compared the fastest."""
    flat = rows.contiguous().view(-1).view(torch.uint8)
    return flat.view(torch.int64) if len(flat) % 8 == 0 and flat.data_ptr() % 8 == 0 else flat
