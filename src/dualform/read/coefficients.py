"""What the optimizer made of each step's gradient, as of any step."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.ledger import Book, Ledger
from dualform.record.optimizers import (
    BY_ROW,
    OBSERVED,
    Coefficients,
    History,
    rule_named,
)


class Accounting:
    """The coefficients of every book, read as of step `until`."""

    def __init__(self, ledger: Ledger, until: int) -> None:
        self._ledger, self._until = ledger, until
        self._rule = rule_named(ledger.info.rule)
        self._columns = {book.name: at for at, book in enumerate(ledger.info.books)}
        self._account = {
            name: at for at, books in enumerate(ledger.info.accounts) for name in books
        }
        self._known: dict[tuple[bytes, ...], Coefficients] = {}

    @cached_property
    def _states(self) -> NDArray[np.uint8]:
        """(T, books)."""
        empty = np.zeros((0, len(self._columns)), dtype=np.uint8)
        column = self._ledger.column("states")
        return column.numpy()[: self._until] if len(column) else empty

    @cached_property
    def _factors(self) -> NDArray[np.float64]:
        """(T, accounts)."""
        empty = torch.zeros(0, len(self._ledger.info.accounts), dtype=torch.float64)
        parts = [shard.file.read("factors") for shard in self._ledger.shards]
        return torch.cat([empty, *parts]).numpy()[: self._until]

    @cached_property
    def _hyper(self) -> NDArray[np.float64]:
        """(T, books, fields): the hyper-parameters of each book's group."""
        parts = [
            _by_book(shard.file.read("hyper"), shard.file.read("groups").long())
            for shard in self._ledger.shards
        ]
        fields = len(self._ledger.info.fields)
        empty = torch.zeros(0, len(self._columns), fields, dtype=torch.float64)
        return torch.cat([empty, *parts]).numpy()[: self._until]

    def states(self, book: Book) -> NDArray[np.uint8]:
        """(T,): what each step did to the book."""
        return self._states[:, self._columns[book.name]]

    def granularity(self, book: Book) -> str:
        """How the book was kept: "row", "step", "row, then step", or "frozen"."""
        states = self.states(book)
        rows, steps = bool((states == BY_ROW).any()), bool((states == OBSERVED).any())
        names = {
            (True, True): "row, then step",
            (True, False): "row",
            (False, True): "step",
            (False, False): "frozen",
        }
        return names[rows, steps]

    def of(self, book: Book) -> Coefficients:
        """The book's coefficients; books with the same history share them."""
        history = self._history(book)
        key = (history.states.tobytes(), history.hyper.tobytes(), repr(history.buffers).encode())
        if key not in self._known:
            self._known[key] = self._rule.coefficients(history)
        return self._known[key]

    def of_rows(self, book: Book) -> NDArray[np.float64]:
        """(T + 1,): the coefficient of a row by its step's number, its factor included."""
        steps = np.zeros(self._until + 1)
        if book.name in self._account:
            by_row = self.states(book) == BY_ROW
            factors = self._factors[:, self._account[book.name]]
            steps[1:] = np.where(by_row, self.of(book).steps * factors, 0.0)
        return steps

    def of_changes(self, book: Book) -> NDArray[np.float64]:
        """(T + 1,): the coefficient of an observed change by its step's number."""
        steps = np.zeros(self._until + 1)
        steps[1:] = np.where(self.states(book) == OBSERVED, self.of(book).steps, 0.0)
        return steps

    def _history(self, book: Book) -> History:
        column = self._columns[book.name]
        starts = [s for s in self._ledger.starts if s["step"] <= self._until]
        buffers = {start["step"]: book.name in start.get("buffers", ()) for start in starts}
        hyper = np.ascontiguousarray(self._hyper[:, column])
        return History(self.states(book), hyper, self._ledger.info.fields, buffers)


def _by_book(hyper: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Each book's own hyper-parameters; those of group 0 stand in where it has no group."""
    index = groups.clamp_min(0)[:, :, None].expand(-1, -1, hyper.shape[2])
    return hyper.gather(1, index)
