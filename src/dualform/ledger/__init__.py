"""The run folder: written crash-safe, read as far as its log vouches."""

from dualform.ledger.background import Background
from dualform.ledger.format import Book, Declaration, RunInfo, Stream, Term
from dualform.ledger.reader import Ledger
from dualform.ledger.samples import Preview, Samples, SampleTable
from dualform.ledger.writer import Block, LedgerWriter

__all__ = [
    "Background",
    "Block",
    "Book",
    "Declaration",
    "Ledger",
    "LedgerWriter",
    "Preview",
    "RunInfo",
    "SampleTable",
    "Samples",
    "Stream",
    "Term",
]
