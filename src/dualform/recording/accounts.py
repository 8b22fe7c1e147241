"""Accounts: what the rows of some steps say about the gradients that these steps used.

An account is the books that share streams. They are checked together: usually a weight and its
bias. Their rows and their gradients are probed alike (`probe.py`). `factors.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.errors import NonFiniteError
from dualform.ledger import Declaration, Stream, Term
from dualform.optimizers import BY_ROW
from dualform.recording.changes import stacks
from dualform.recording.messages import Pages, RecordedStep
from dualform.recording.pages import StreamRows, rows_by_sample
from dualform.recording.probe import Look, in_double, probe_rows
from dualform.recording.processes import Line
from dualform.recording.streams import OpenStream

NOISE = 16.0
"""How many roundings of its terms a gradient must exceed to be more than rounding."""


class AccountPart(NamedTuple):
    """What some records say of one book, segment by segment."""

    columns: slice
    """Which numbers of its account are the book's."""
    at: Tensor
    """(segments,): the index of each segment's step."""
    probe: Tensor
    """(segments, numbers)."""
    size: Tensor
    """(segments,): the size of the probe's terms."""


@dataclass(frozen=True)
class Feed:
    """The rows that one stream gives to the books of an account."""

    opened: OpenStream
    terms: dict[str, Term]
    pieces: list[StreamRows]

    @property
    def stream(self) -> Stream:
        """The stream, as the ledger knows it."""
        return self.opened.stream


@dataclass(frozen=True)
class Evidence:
    """What the rows of one account say its gradients were, step by step.

    An account is the books that share streams, checked together: usually a weight and its bias.
    """

    feeds: list[Feed]
    looks: dict[str, tuple[Look, slice]]
    """For each book, how it was probed, and which of the numbers are its probe."""
    u: Tensor
    """(steps, numbers): the probes of the gradients that were used, flat."""
    active: Tensor
    """(steps, numbers): whether the step changed the number's book by row, and it was probed."""
    unprobed: Tensor
    """(steps,): whether the step changed the account by row, and it was not probed."""
    others_rounding: float = 0.0
    """The relative rounding of the coarsest rows of other processes."""
    others_have_16_bits: bool = False
    """Whether some of those are numbers of 16 bits."""

    @property
    def pieces(self) -> list[tuple[Feed, StreamRows]]:
        """All rows, with the stream they come from."""
        return [(feed, rows) for feed in self.feeds for rows in feed.pieces]

    @cached_property
    def touched(self) -> Tensor:
        """(steps,): whether the step changed the account at all."""
        return self.active.any(1)

    def parts(self) -> list[AccountPart]:
        """What the rows say of each book, at the steps at which it was probed."""
        found = []
        for feed, rows in self.pieces:
            for book, term in feed.terms.items():
                look, columns = self.looks[book]
                probed = self.active[rows.segments[:, 0], columns.start]
                some = rows if bool(probed.all()) else rows.keep(probed)
                if len(some.counts):
                    told = probe_rows(feed.stream, term, some, look)
                    found.append(AccountPart(columns, some.segments[:, 0], *told))
        return found

    @property
    def own_rounding(self) -> float:
        """The relative rounding of the coarsest rows of this process; 0 where it has none."""
        dtypes = [feed.opened.rounding or rows.values.dtype for feed, rows in self.pieces]
        coarse = max([torch.finfo(dtype).eps for dtype in dtypes], default=0.0)
        return coarse if coarse < 1e-4 else coarse / 250  # 16-bit rows are summed in 32 bits

    @property
    def rounding(self) -> float:
        """The relative rounding of the coarsest numbers involved."""
        return max(self.own_rounding, self.others_rounding) or torch.finfo(torch.float32).eps

    @property
    def has_16_bits(self) -> bool:
        """Whether some rows are numbers of 16 bits."""
        own = any(torch.finfo(rows.values.dtype).bits < 32 for _, rows in self.pieces)
        return own or self.others_have_16_bits

    def is_summarized(self, book: str) -> bool:
        """Whether some of a book's rows are not kept as they are."""
        return any(feed.opened.bases is not None for feed in self.feeds if book in feed.terms)

    def noise(self, factor: Tensor, line: Line) -> set[str]:
        """Books in which a gradient is zero but for rounding, though errors came in.

        Such are offsets that what follows takes out again: a bias before a batch normalization,
        or of attention's keys. An optimizer that divides by the gradient's size magnifies it.
        """
        found = set()
        for name, (look, columns) in self.looks.items():
            if look.is_column:
                size = torch.zeros_like(self.u[:, columns])
                for feed, rows in self.pieces:
                    if name in feed.terms and rows.reach is not None:
                        size.index_add_(0, rows.segments[:, 0], rows.reach.to(size))
                    elif name in feed.terms:
                        plain = replace(rows, values=rows.values.abs(), keys=rows.keys.abs())
                        probe, _ = probe_rows(feed.stream, feed.terms[name], plain, look)
                        size.index_add_(0, rows.segments[:, 0], probe.to(size))
                (size,) = line.total([size])
                reach = size * factor.abs()[:, None]
                small = self.u[:, columns].abs() <= NOISE * self.rounding * reach
                if bool((small & (size > 0)).any()):
                    found.add(name)
        return found

    def from_batch(self, at: int, first: int) -> Evidence:
        """The same without the batches of step `at` that came before `first`."""
        return self._keep(lambda table: (table[:, 0] != at) | (table[:, 1] >= first))

    def of_touched(self) -> Evidence:
        """The same without the rows of steps that left the account alone."""
        touched = self.touched | self.unprobed
        if bool(touched.all()):
            return self
        return self._keep(lambda table: touched[table[:, 0]])

    def _keep(self, chosen: Callable[[Tensor], Tensor]) -> Evidence:
        """Only the segments that are chosen, without pieces that have none."""
        feeds = []
        for feed in self.feeds:
            kept = [rows.keep(chosen(rows.segments)) for rows in feed.pieces]
            feeds.append(replace(feed, pieces=[rows for rows in kept if len(rows.counts)]))
        return replace(self, feeds=feeds)

    def batches(self, at: int) -> list[int]:
        """The batches that left rows in step `at`, in order."""
        tables = [rows.segments for _, rows in self.pieces]
        return sorted({int(n) for table in tables for n in table[table[:, 0] == at][:, 1]})


def gather_evidence(
    columns: Mapping[str, int],
    steps: Sequence[RecordedStep],
    pages: Pages,
    probes: Mapping[str, Tensor],
    line: Line,
) -> list[Evidence]:
    """What the rows of each account say about these steps, and the first so many probes.

    `columns` has the column of each book in a step's states. The rows are those of this process.
    """
    states = torch.tensor([step.states for step in steps])
    first, last = steps[0].number, steps[-1].number
    looks = looks_of(steps)
    named = [() if step.probe is None else step.probe[0] for step in steps]
    was_probed = {name: torch.tensor([name in names for names in named]) for name in looks}
    evidence = []
    for books, members in accounts_of([opened for opened, _ in pages]):
        probed: dict[str, tuple[Look, slice]] = {}
        start = 0
        for name in sorted(books & looks.keys()):
            stop = start + looks[name].numbers
            probed[name] = (looks[name], slice(start, stop))
            start = stop
        if not probed:
            continue
        feeds = []
        for opened, written in (pages[at] for at in members):
            terms = {book: term for book, term in opened.terms.items() if book in probed}
            laid = (rows_by_sample(opened.site, page, first, last) for page in written)
            feeds.append(Feed(opened, terms, [rows for rows in laid if rows is not None]))
        by_row = {name: states[:, columns[name]] == BY_ROW for name in probed}
        seen = {name: by_row[name] & was_probed[name] for name in probed}
        active = [
            seen[name][:, None].expand(-1, look.numbers) for name, (look, _) in probed.items()
        ]
        u = torch.cat([probes[name] for name in probed], 1)[: len(states)]
        unprobed = torch.stack([by_row[name] & ~seen[name] for name in probed]).any(0)
        evidence.append(Evidence(feeds, probed, u, torch.cat(active, 1), unprobed))
    return _with_others(evidence, line)


def _with_others(evidence: Sequence[Evidence], line: Line) -> list[Evidence]:
    """The evidence with the types of rows that other processes have."""
    if line.of == 1:
        return list(evidence)
    own = [[account.own_rounding, account.has_16_bits] for account in evidence]
    (found,) = line.largest([torch.tensor(own, dtype=torch.float64)])
    return [
        replace(account, others_rounding=rounding, others_have_16_bits=bool(has_16_bits))
        for account, (rounding, has_16_bits) in zip(evidence, found.tolist(), strict=True)
    ]


def books_in_bases(accounts: Sequence[Evidence], line: Line) -> set[str]:
    """Books of which all records of these steps, in all processes, are in bases.

    Rows that share a matrix count as such: a reader brings them into the bases.
    """
    found = [
        (name, [feed.stream for feed in account.feeds if name in feed.terms and feed.pieces])
        for account in accounts
        for name, (look, _) in account.looks.items()
        if look.in_bases
    ]
    if not found:
        return set()
    own = [
        [any(s.bases for s in fed), any(not (s.bases or s.shared) for s in fed)] for _, fed in found
    ]
    (held,) = line.largest([torch.tensor(own, dtype=torch.float64)])
    return {
        name
        for (name, _), (are, others) in zip(found, held.tolist(), strict=True)
        if are and not others
    }


def accounts_of(streams: Sequence[OpenStream | Declaration]) -> list[tuple[set[str], list[int]]]:
    """Books that share streams, with the numbers of these streams."""
    groups: list[tuple[set[str], list[int]]] = []
    for index, opened in enumerate(streams):
        books, members = set(opened.terms), [index]
        for group in [group for group in groups if group[0] & books]:
            groups.remove(group)
            books, members = group[0] | books, group[1] + members
        groups.append((books, members))
    return groups


def looks_of(steps: Sequence[RecordedStep]) -> dict[str, Look]:
    """How each book was probed."""
    different = {id(step.looks): step.looks for step in steps}.values()
    return {name: look for looks in different for name, look in looks.items()}


def probes_of(
    steps: Sequence[RecordedStep], sharded: Collection[str], line: Line
) -> dict[str, Tensor]:
    """(steps, numbers) for each book, in main memory; zero where a step did not touch it.

    Of books that are `sharded` each process has probed a part of the gradient: they are added up.
    """
    looks = looks_of(steps)
    probes = {
        name: torch.zeros(len(steps), look.numbers, dtype=torch.float64)
        for name, look in looks.items()
    }
    for names in dict.fromkeys(step.probe[0] for step in steps if step.probe is not None):
        taken = [p[1] if (p := step.probe) and p[0] == names else None for step in steps]
        where = torch.tensor([kept is not None for kept in taken])
        kept = torch.stack([kept for kept in taken if kept is not None])
        parts = torch.split(kept, [looks[name].kept for name in names], 1)
        found = [looks[name].probes(part) for name, part in zip(names, parts, strict=True)]
        for name, probe in zip(names, in_double(found), strict=True):
            probes[name][where] = probe
    divided = [name for name in probes if name in sharded]
    return probes | dict(zip(divided, line.total([probes[n] for n in divided]), strict=True))


def finite_steps(
    steps: Sequence[RecordedStep],
    probes: Mapping[str, Tensor],
    sharded: Collection[str],
    line: Line,
) -> tuple[Sequence[RecordedStep], NonFiniteError | None]:
    """The steps up to the first whose gradient, or observed change, is not finite."""
    every = [step.number for step in steps]
    signals = [(book, every, probe.isfinite().all(1)) for book, probe in probes.items()]
    for book, changed, sums in sorted(_sums_of_changes(steps, sharded), key=lambda own: own[:2]):
        if book in sharded:
            (sums,) = line.total([sums.cpu()])
        signals.append((book, changed, sums.isfinite()))
    error = None
    for book, numbers, finite in signals:
        if not finite.all():
            bad = numbers[int(torch.nonzero(~finite)[0])]
            if error is None or bad < error.step:
                error = NonFiniteError.at(book, bad)
    return [step for step in steps if error is None or step.number < error.step], error


def _sums_of_changes(
    steps: Sequence[RecordedStep], sharded: Collection[str]
) -> Iterator[tuple[str, list[int], Tensor]]:
    """For each book that may have changes that are not finite, their steps and sums.

    So may those of which a process has a part.
    """
    for stack in stacks([step.changes for step in steps]):
        numbers, values = [steps[at].number for at in stack.at], stack.values()
        is_finite = bool(values.sum(1).isfinite().all())
        for name, place in stack.places.items():
            if name in sharded or not is_finite:
                yield name, numbers, values[:, place.part].sum(1)
