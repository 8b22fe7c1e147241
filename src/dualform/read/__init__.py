"""Asking a run: audit, spotlight, timeline, forget."""

from dualform.read.audit import Audit, BookAudit
from dualform.read.run import Run, open_run
from dualform.read.scores import Check, Ranked, Ranking, Scores
from dualform.read.spotlight import Reading, Spotlight
from dualform.read.timeline import Timeline

__all__ = [
    "Audit",
    "BookAudit",
    "Check",
    "Ranked",
    "Ranking",
    "Reading",
    "Run",
    "Scores",
    "Spotlight",
    "Timeline",
    "open_run",
]
