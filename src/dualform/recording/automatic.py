"""keep="auto": rows while they are cheap, summaries where they are not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from dualform.layers import Seen, positions
from dualform.ledger import Records, Stream
from dualform.ledger.codecs import CODECS
from dualform.recording.keep import AUTO, ROWS, Policy, Summaries, codec_for

CHEAP = 64 << 20
"""Rows are kept as they are while those of a forward pass take at most so many bytes."""


@dataclass
class RowCounts:
    """What rows take: as each codec would store them, and what is stored of them."""

    rows: int = 0
    """How many rows there were."""
    bytes: dict[str, int] = field(default_factory=dict)
    """What they take, by the policy of each codec."""
    stored_rows: int = 0
    """How many rows, or records in their place, are stored."""
    stored_bytes: int = 0
    """What those take."""

    def see(self, stream: Stream, keys: Tensor, values: Tensor) -> None:
        """Counts the rows of one use of a layer.

        >>> import torch
        >>> tally = RowCounts()
        >>> tally.see(Stream("fc", (3,), (2,)), torch.zeros(10, 3), torch.zeros(10, 2))
        >>> tally.rows, tally.bytes["rows"], tally.bytes["int8"]
        (10, 200, 130)
        """
        for codec in CODECS.values():
            taken = _stored(codec.policy, stream, keys, values)
            self.bytes[codec.policy] = self.bytes.get(codec.policy, 0) + taken
        self.rows += _records(stream, values) * positions(stream)

    def store(self, policy: str, stream: Stream, keys: Tensor, values: Tensor) -> None:
        """Counts what is stored of them, by the policy of a codec."""
        self.stored_rows += _records(stream, values) * positions(stream)
        self.stored_bytes += _stored(policy, stream, keys, values)


class Automatic:
    """How much is kept of each layer's rows, where keep="auto" leaves that open.

    The rows of a layer are its inputs and its errors, and an error is as large as an output. So the
    forward pass tells what the rows will take, before the backward pass makes any. If they take
    more than `CHEAP` together, layers are summarized. A layer stays as it was first met.

    Of several processes, each guesses by what its own pass leaves, until before the first step they
    tell each other. It belongs to the training loop.
    """

    def __init__(self, keep: Mapping[str, Policy], cheap: int = CHEAP, of: int = 1) -> None:
        self._keep, self._cheap, self._of = keep, cheap, of
        self._expected = 0
        self.is_open = AUTO in keep.values()
        """Whether the first step is still under way, and nothing is told yet."""
        self._decided: Policy | None = None
        """What several processes have decided together."""
        self.summarized: set[str] = set()
        """Books that are summarized because their rows take much."""

    def expect(self, use: Seen) -> None:
        """A call was seen in a forward pass, whose rows will come."""
        outputs = sum(output.nbytes for output in use.outputs)
        key = getattr(use, "key", None)
        self._expected += outputs + (key.nbytes if isinstance(key, Tensor) else outputs)

    def policies(self, books: Iterable[str]) -> dict[str, Policy]:
        """The policy of each of these books, which a layer feeds that is met for the first time."""
        found = {book: self._keep[book] for book in books}
        if AUTO not in found.values():
            return found
        chosen = self._decided or self._chosen(self._expected * self._of)
        if isinstance(chosen, Summaries):
            self.summarized |= {book for book, policy in found.items() if policy == AUTO}
        return {book: chosen if policy == AUTO else policy for book, policy in found.items()}

    @property
    def expected(self) -> int:
        """How many bytes of rows a forward pass leaves, until all processes have decided."""
        return 0 if self._of == 1 or self._decided or not self.is_open else self._expected

    def decide(self, expected: int) -> None:
        """The forward passes of all processes leave so many bytes: each decides the same."""
        self._decided = self._chosen(expected)
        self.summarized.clear()

    def _chosen(self, expected: int) -> Policy:
        return Summaries() if expected > self._cheap else ROWS

    def numbers(self, policies: Mapping[str, Policy]) -> str:
        """How rows are stored of which no summaries can be made; empty where books say it."""
        return "" if self.summarized.isdisjoint(policies) else codec_for(policies.values()).policy

    def told(self, tally: RowCounts) -> str:
        """What the user is told of the decision, after a step that took so much."""
        before, after = (size_of(count) for count in (tally.bytes[ROWS], tally.stored_bytes))
        where = f" in process 0 of {self._of}" if self._of > 1 else ""
        return (
            f"the rows of a step would take {before}{where}: keep='auto' stores summaries of them, "
            f"{after} a step. keep='rows' stores all rows, keep='summaries' these without a word, "
            "and dualform.plan tells what each policy takes."
        )


def _records(stream: Stream, values: Tensor) -> int:
    return values.numel() // max(1, math.prod(stream.values))


def _stored(policy: str, stream: Stream, keys: Tensor, values: Tensor) -> int:
    """What some records take by the policy of a codec."""
    codec = codec_for([policy]).for_records(Records(keys, values))
    widths = (math.prod(stream.keys), math.prod(stream.values))
    return _records(stream, values) * codec.bytes_per_row(*widths)


def size_of(count: int) -> str:
    """Bytes for people.

    >>> size_of(9_540_000_000), size_of(2_100)
    ('9.5 GB', '2.1 kB')
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count / 1e3:,.1f} kB"
