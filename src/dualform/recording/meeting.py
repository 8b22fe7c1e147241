"""What the processes that record together agree on before each step.

Each process sees the rows of its own samples only. So before each step they tell each other what
they have seen: new streams, how many bytes have come together, whether somebody wants the step to
be marked, or cannot go on. What follows is the same in all of them. They hand over the same steps,
keep the same books by row, and hold the sum of their rows against the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from dualform.errors import RecorderFailedError, SampleIdsError
from dualform.layers import Site
from dualform.ledger import Declaration
from dualform.recording.bases import BookBases
from dualform.recording.messages import Pages
from dualform.recording.pages import Page
from dualform.recording.processes import Line
from dualform.recording.sample_ids import CURE
from dualform.recording.streams import OpenStream

PATIENCE = 60.0
"""So many seconds a process that marks a step waits for the others to do the same."""


class Occasion(IntEnum):
    """Where a process is when it speaks to the others."""

    STEP = 0
    """Before an optimizer's step."""
    MARK = 1
    """At a checkpoint."""
    END = 2
    """At the end of the `with` statement."""
    FAILED = 3
    """Its recording has ended before."""


class Standing(NamedTuple):
    """What one process says: whole numbers."""

    occasion: int
    step: int
    """How many steps it has recorded."""
    nbytes: int
    """How much its rows and steps take that were not handed over yet."""
    late: int
    """Whether it is time for a shard."""
    findings: int
    """How many hand-overs its writer's thread has answered."""
    streams: int
    """How many streams it has seen that the others may not know."""
    mark: int
    """Whether it wants the steps so far to be marked."""
    naming: int
    """1 where its samples have ids, 2 where they are numbered, 0 where nobody knows yet."""
    bases: int
    """Of how many books it knows bases that the others do not know."""
    expected: int
    """How many bytes of rows a forward pass leaves; 0 once it is decided what is kept of them."""
    passes: int
    """How many forward passes it has made for the step under way."""
    learning: int
    """While its compiled model runs as it was written: 2 once that need not go on, until then 1."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all processes have said."""

    standings: Sequence[Standing]
    new: Sequence[OpenStream]
    """The streams that were not known before, the same in all processes."""

    def any(self, occasion: Occasion) -> bool:
        """Whether some process is there."""
        return any(standing.occasion == occasion for standing in self.standings)

    def first(self, occasion: Occasion) -> int:
        """The first process that is there."""
        return [standing.occasion for standing in self.standings].index(occasion)

    @property
    def is_marked(self) -> bool:
        """Whether some process wants the steps so far to be marked."""
        return any(standing.mark for standing in self.standings)

    @property
    def nbytes(self) -> int:
        """The most that the rows and steps of a process take."""
        return max(standing.nbytes for standing in self.standings)

    @property
    def is_late(self) -> bool:
        """Whether it is time for a shard."""
        return any(standing.late for standing in self.standings)

    @property
    def has_bases(self) -> bool:
        """Whether some process knows bases that others do not know."""
        return any(standing.bases for standing in self.standings)

    @property
    def expected(self) -> int:
        """How many bytes of rows the forward passes of all processes leave."""
        return sum(standing.expected for standing in self.standings)

    @property
    def had_several_passes(self) -> bool:
        """Whether the step under way had more than one pass in some process."""
        return any(standing.passes > 1 for standing in self.standings)

    @property
    def may_compile(self) -> bool:
        """Whether enough is known of a compiled model, in all processes."""
        learning = {standing.learning for standing in self.standings}
        return 2 in learning and 1 not in learning

    @property
    def findings(self) -> int:
        """How many hand-overs all processes have an answer to."""
        return min(standing.findings for standing in self.standings)


class Meeting:
    """What the processes have agreed on so far; belongs to the training thread."""

    def __init__(self, line: Line, bases: BookBases) -> None:
        self.line, self._bases = line, bases
        self._streams: dict[str, OpenStream] = {}
        """The streams that all processes know, by name; those of this process as it opened them."""
        self._declared: dict[str, Declaration] = {}
        self._told = 0
        """How many streams of this process the others know."""
        self.has_spoken = False
        """Whether this process has spoken before the step under way."""
        self.wants_mark = False
        """Whether this process wants the steps so far to be marked."""
        self.last: Agreed | None = None
        """What the processes said last; None where one records."""
        self.is_over = line.of == 1
        """Whether nobody waits for this process any more."""

    def exchange(
        self, standing: Standing, opened: Sequence[OpenStream], wait: float | None = None
    ) -> Agreed:
        """Tells the others how it stands, and hears it of them; `opened` are all own streams."""
        self.has_spoken = True
        said = [Standing(*own) for own in self.line.numbers(standing, wait)]
        if any(each.occasion in (Occasion.END, Occasion.FAILED) for each in said):
            self.is_over = True
        failed = [rank for rank, each in enumerate(said) if each.occasion == Occasion.FAILED]
        if failed and self.line.rank not in failed:
            raise RecorderFailedError(
                f"process {failed[0]} has ended its recording, and says why; without its samples "
                "the others have none to go on with."
            )
        if {each.naming for each in said} >= {1, 2} and not self.is_over:
            at = [each.naming for each in said]
            raise SampleIdsError(
                f"process {at.index(1)} names its samples, and process {at.index(2)} does not; "
                f"{CURE}, in every process, or in none."
            )
        new: list[OpenStream] = []
        if any(each.streams for each in said) and not self.is_over:
            new = self._learn(opened[self._told :])
            self._told = len(opened)
        self.last, self.wants_mark = Agreed(said, new), False
        return self.last

    def unknown(self, opened: Sequence[OpenStream]) -> int:
        """How many of its streams the others do not know yet."""
        return len(opened) - self._told

    def pages(self, taken: Iterable[tuple[OpenStream, Sequence[Page]]]) -> Pages:
        """The pages of all streams that the processes know, in an order that is theirs."""
        if self.line.of == 1:
            return tuple([(opened, tuple(pages)) for opened, pages in taken])
        own = {opened.stream.name: (opened, tuple(pages)) for opened, pages in taken}
        return tuple([own.get(name, (known, ())) for name, known in self._streams.items()])

    def _learn(self, opened: Sequence[OpenStream]) -> list[OpenStream]:
        """Makes the new streams of all processes known to each."""
        own = {one.stream.name: one for one in opened}
        new: dict[str, OpenStream] = {}
        told = self.line.said([one.declaration.to_json() for one in opened])
        for rank, declarations in enumerate(told):
            for given in declarations:
                stream, terms = (declared := Declaration.from_json(given)).stream, given["terms"]
                known = self._declared.setdefault(stream.name, declared)
                if (known.stream, known.terms) != (stream, declared.terms):
                    raise RecorderFailedError(
                        f"process {rank} uses {_listed(terms)} otherwise than a process before it "
                        f"({stream} and {known.stream}); so rows of all processes cannot be read "
                        "together. Record with layers=… or keep={…: 'steps'} what all use alike."
                    )
                if stream.name not in self._streams:
                    order = len(self._streams) + len(new)
                    site = Site(stream.name, declared.terms)
                    bases = self._bases.of_stream(stream, declared.terms)
                    foreign = OpenStream(site, stream, declared.terms, order, bases=bases)
                    new[stream.name] = own.get(stream.name, foreign)
        self._streams |= new
        return list(new.values())


def _listed(books: Iterable[str]) -> str:
    return ", ".join(f"'{book}'" for book in books)
