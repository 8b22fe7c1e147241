"""Asking a run: audit, spotlight, timeline, subtract; explain and influence; zoom."""

from dualform.read.audit import Audit, BookAudit
from dualform.read.explain import Explanation
from dualform.read.influence import Influence
from dualform.read.removal import Removal
from dualform.read.row_contributions import RowContributions
from dualform.read.run import Run, open_run
from dualform.read.scores import Check, Ranked, Ranking, Scores
from dualform.read.spotlight import Reading, Spotlight
from dualform.read.timeline import Timeline
from dualform.read.zoom import Zoom

__all__ = [
    "Audit",
    "BookAudit",
    "Check",
    "Explanation",
    "Influence",
    "Ranked",
    "Ranking",
    "Reading",
    "Removal",
    "RowContributions",
    "Run",
    "Scores",
    "Spotlight",
    "Timeline",
    "Zoom",
    "open_run",
]
