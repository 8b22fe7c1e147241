"""dualform: every prediction, traced to the training that made it."""

__version__ = "0.1.0"

from dualform import attention as attention
from dualform import evaluate as evaluate
from dualform import families as families
from dualform.errors import DualformError, DualformWarning
from dualform.explore import view
from dualform.memory import Memory
from dualform.read import (
    Audit,
    Explanation,
    Influence,
    Ranking,
    Reading,
    Removal,
    Run,
    Scores,
    Spotlight,
    Timeline,
)
from dualform.read import open_run as open
from dualform.record import Recorder, describe, record

__all__ = [
    "Audit",
    "DualformError",
    "DualformWarning",
    "Explanation",
    "Influence",
    "Memory",
    "Ranking",
    "Reading",
    "Recorder",
    "Removal",
    "Run",
    "Scores",
    "Spotlight",
    "Timeline",
    "describe",
    "open",
    "record",
    "view",
]
