"""The state machine of a book: what may happen, and what never does."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import dualform
from dualform.errors import CoverageWarning, RecorderFailedError
from dualform.ledger import Ledger
from dualform.optimizers import BY_ROW, OBSERVED, UNTOUCHED
from dualform.recording.book_states import ALLOWED, BookStates, Event, Kept
from dualform.recording.observer import StepObserver

BOOKS = ("weight", "bias")
NEEDS_REASON = set(Event) - {Event.ROWS_SEEN, Event.VERIFIED}
BY_STEP = {Kept.BY_STEP, Kept.SHARED}


class Books(RuleBasedStateMachine):
    """Any events, in any order."""

    @initialize()
    def begin(self) -> None:
        self.states = BookStates(BOOKS)
        self.before = dict.fromkeys(BOOKS, Kept.UNSEEN)
        self.reasons = dict.fromkeys(BOOKS, "")

    @rule(book=st.sampled_from(BOOKS), event=st.sampled_from(Event), number=st.integers(0, 9))
    def happen(self, book: str, event: Event, number: int) -> None:
        reason = f"reason {number}" if event in NEEDS_REASON else ""
        self.before = {name: self.states.kept(name) for name in BOOKS}
        self.reasons = {name: self.states.reason(name) for name in BOOKS}
        given = {book: reason} if reason else [book]
        if (self.before[book], event) in ALLOWED:
            self.states.happen(event, given)
        else:
            with pytest.raises(RecorderFailedError, match=f"'{book}' is kept .* defect"):
                self.states.happen(event, given)
            assert self.states.kept(book) is self.before[book]

    @precondition(lambda self: any(kept not in BY_STEP for kept in self.before.values()))
    @rule(event=st.sampled_from(sorted(NEEDS_REASON, key=lambda event: event.value)))
    def without_a_reason(self, event: Event) -> None:
        for book in BOOKS:
            if not self.states.reason(book):
                with pytest.raises(RecorderFailedError):
                    self.states.happen(event, [book])

    @invariant()
    def by_step_is_for_good(self) -> None:
        for book in BOOKS:
            if self.before[book] in BY_STEP:
                assert self.states.kept(book) in BY_STEP
                assert self.states.reason(book) == self.reasons[book]
            if self.before[book] is Kept.SHARED:
                assert self.states.kept(book) is Kept.SHARED

    @invariant()
    def reasons_are_those_of_books_by_step(self) -> None:
        for book in BOOKS:
            assert bool(self.states.reason(book)) == (self.states.kept(book) in BY_STEP)

    @invariant()
    def by_row_was_verified(self) -> None:
        for book in BOOKS:
            if self.states.kept(book) is Kept.BY_ROW:
                assert self.before[book] in (Kept.UNVERIFIED, Kept.BY_ROW)

    @invariant()
    def sets_are_the_states(self) -> None:
        kept = {book: self.states.kept(book) for book in BOOKS}
        assert self.states.by_step == {book for book in BOOKS if kept[book] in BY_STEP}
        assert self.states.shared == {book for book in BOOKS if kept[book] is Kept.SHARED}
        assert self.states.unverified == {book for book in BOOKS if kept[book] is Kept.UNVERIFIED}

    @invariant()
    def steps_follow_the_states(self) -> None:
        for book, (own, given, ruled) in itertools.product(
            BOOKS, itertools.product((False, True), repeat=3)
        ):
            touch, kept = self.states.touch(book, own, given, ruled), self.states.kept(book)
            if touch == BY_ROW:
                assert kept in (Kept.UNVERIFIED, Kept.BY_ROW)
                assert own
                assert given
            if kept is Kept.SHARED:
                assert touch == OBSERVED
            if not own and kept is not Kept.SHARED:
                assert touch == UNTOUCHED


TestBooks = Books.TestCase


def test_every_pair_is_decided_once() -> None:
    """Whatever leads to by step leads away from nowhere else, and each event can happen."""
    for event in Event:
        assert any(event is allowed for _, allowed in ALLOWED)
    for kept in BY_STEP:
        assert {after for (before, _), after in ALLOWED.items() if before is kept} <= BY_STEP


def masked_and_shrunk(path: Path) -> None:
    """A loop that masks a gradient once, and shrinks another weight after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path) as recorder:
        for number in range(6):
            model(torch.randn(5, 3)).square().mean().backward()
            if number == 2:
                model[0].weight.grad[0] = 0.0
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model[2].weight.mul_(0.9)
            recorder.checkpoint()


def test_a_run_s_reasons_are_those_of_the_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit says what the state machine decided: granularity and reason of each book."""
    observers: list[StepObserver] = []
    usual = StepObserver.__init__

    def kept(self: StepObserver, *args: object) -> None:
        usual(self, *args)  # type: ignore[arg-type]
        observers.append(self)

    monkeypatch.setattr(StepObserver, "__init__", kept)
    with pytest.warns(CoverageWarning):
        masked_and_shrunk(tmp_path / "run")
    states = observers[0].states
    audit = {line.name: line for line in dualform.open(tmp_path / "run").audit().books}
    found = {name: states.kept(name) for name in audit}
    assert found["0.weight"] is Kept.BY_STEP
    assert found["2.weight"] is Kept.SHARED
    assert found["4.weight"] is Kept.BY_ROW
    for name, line in audit.items():
        assert ("step" in line.granularity) == (name in states.by_step)
        assert line.reason == states.reason(name)
    assert {note["book"] for note in Ledger(tmp_path / "run").notes} == states.by_step
