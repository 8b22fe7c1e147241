"""The law of coverage: a recording warns that books are kept by step if, and only if, some are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualform.errors import CoverageWarning
from dualform.ledger import Ledger
from dualform.recording.bookkeeping import NOISY


@contextmanager
def told(path: Path | None) -> Iterator[None]:
    """Holds the warnings of a recording against its ledger: one where coverage fell, else none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.simplefilter("always", CoverageWarning)
        yield
    texts = [str(warning.message) for warning in caught]
    if path is None:
        assert not texts
        return
    ledger = Ledger(path)
    kept = {book.name: book.reason for book in ledger.info.books if book.reason}
    for note in ledger.notes:
        kept.setdefault(note["book"], note["reason"])
    lost = {book for book, reason in kept.items() if reason != NOISY}
    assert bool(texts) == bool(lost), (texts, kept)
    assert len(texts) <= 2, texts
    for reason in {kept[book] for book in lost}:
        assert any(reason in text for text in texts), (reason, texts)
