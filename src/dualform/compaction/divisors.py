"""What an optimizer divided its steps by, found again by replaying it from the rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualform.errors import LedgerError
from dualform.ledger import Book
from dualform.optimizers import BY_ROW, Hyper, State, StateRule
from dualform.read.coefficients import Accounting
from dualform.read.replay import kept_moment, spans_of
from dualform.read.seen import replayed_gradients
from dualform.recording.observer import is_due


def replayed_divisors(accounting: Accounting, book: Book) -> dict[int, Tensor]:
    """The divisors of a book at the steps at which a recorder keeps them, in 16 bits.

    >>> import torch; from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run(torch.optim.Adam)
    >>> found = replayed_divisors(run.source.accounting, run.info.books[0])
    >>> {step: tuple(divisor.shape) for step, divisor in found.items()}
    {1: (5, 4), 2: (5, 4), 4: (5, 4), 6: (5, 4)}
    """
    reader, rule = accounting.reader, accounting.rule.replayed
    history, factors = accounting.history(book), accounting.factors(book)
    found: dict[int, Tensor] = {}
    last_by_row = max((np.flatnonzero(history.states == BY_ROW) + 1).tolist(), default=0)
    for first, last in spans_of(reader.ledger, accounting.until, book.size):
        if first - 1 in reader.ledger.kept_steps:
            W, b, state = kept_moment(reader, rule, book, first - 1)
        gradients, _ = replayed_gradients(reader, rule, book, first, last)
        for step in range(first, last + 1):
            if history.states[step - 1] != BY_ROW:
                continue
            gradient = gradients.get(step, torch.zeros_like(W)) * float(factors[step - 1])
            hyper = history.at(step, rule.fields)
            transition, state = rule.transition(hyper, state, W, b, gradient)
            W, b = transition.forward(W, b, gradient)
            if is_due(step) or step == last_by_row:
                found[step] = _divisor(rule, hyper, state)
    return found


def _divisor(rule: StateRule, hyper: Hyper, state: State) -> Tensor:
    divisor = rule.divisor(hyper, state)
    if divisor is None:
        raise LedgerError(
            f"rows of a run by the rule '{rule.name}' cannot become summaries: what its steps did "
            "is not known without them. Runs by 'sgd', 'adam' and 'adamw' can; keep='half' and "
            "keep='int8' are for all."
        )
    return divisor.bfloat16()
