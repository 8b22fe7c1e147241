"""The run folder: written crash-safe, read as far as its log vouches."""

from dualform.ledger.background import Background
from dualform.ledger.codecs import Codec, Records
from dualform.ledger.format import Book, Declaration, RunInfo, Stream, Term
from dualform.ledger.object_path import run_path
from dualform.ledger.reader import Ledger
from dualform.ledger.samples import Preview, Samples, SampleTable
from dualform.ledger.sessions import Shard
from dualform.ledger.tensor_writing import Awaited
from dualform.ledger.writer import LedgerWriter, ShardBlock

__all__ = [
    "Awaited",
    "Background",
    "Book",
    "Codec",
    "Declaration",
    "Ledger",
    "LedgerWriter",
    "Preview",
    "Records",
    "RunInfo",
    "SampleTable",
    "Samples",
    "Shard",
    "ShardBlock",
    "Stream",
    "Term",
    "run_path",
]
