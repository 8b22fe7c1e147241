"""dualform: every prediction, traced to the training that made it.

Names and parts are loaded when they are first touched, so that reading a run loads nothing of
recording, and recording nothing of the explorer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dualform.version import __version__ as __version__

if TYPE_CHECKING:
    from dualform import attention as attention
    from dualform import compaction as compaction
    from dualform import evaluate as evaluate
    from dualform import families as families
    from dualform import studies as studies
    from dualform import testing as testing
    from dualform.compaction import Compaction, compact
    from dualform.diagnose.callable import DiagnosePackage
    from dualform.errors import DualformError, DualformWarning
    from dualform.explore import view
    from dualform.ledger.repair import Repair, repair
    from dualform.memory import Memory
    from dualform.read import (
        Audit,
        Explanation,
        Influence,
        Ranking,
        Reading,
        Removal,
        RowContributions,
        Run,
        Scores,
        Spotlight,
        Timeline,
        Zoom,
    )
    from dualform.read import open_run as open
    from dualform.read.engine import engine
    from dualform.recording import Recorder, describe, record, summaries
    from dualform.recording.planning import RunPlan, plan

    diagnose: DiagnosePackage

__all__ = [
    "Audit",
    "Compaction",
    "DualformError",
    "DualformWarning",
    "Explanation",
    "Influence",
    "Memory",
    "Ranking",
    "Reading",
    "Recorder",
    "Removal",
    "Repair",
    "RowContributions",
    "Run",
    "RunPlan",
    "Scores",
    "Spotlight",
    "Timeline",
    "Zoom",
    "compact",
    "describe",
    "engine",
    "open",
    "plan",
    "record",
    "repair",
    "summaries",
    "view",
]

PARTS = ("attention", "compaction", "diagnose", "evaluate", "families", "studies", "testing")
HOMES = {
    "compaction": ("Compaction", "compact"),
    "errors": ("DualformError", "DualformWarning"),
    "explore": ("view",),
    "ledger.repair": ("Repair", "repair"),
    "memory": ("Memory",),
    "read": (
        *("Audit", "Explanation", "Influence", "Ranking", "Reading", "Removal"),
        *("RowContributions", "Run", "Scores", "Spotlight", "Timeline", "Zoom"),
    ),
    "read.engine": ("engine",),
    "recording": ("Recorder", "describe", "record", "summaries"),
    "recording.planning": ("RunPlan", "plan"),
}
"""In which part each name is at home."""


def __getattr__(name: str) -> Any:
    """Loads a part, or the part in which a name is at home, when it is first asked for."""
    if name in PARTS:
        return import_module(f"dualform.{name}")
    if name == "open":
        value = import_module("dualform.read").open_run
    else:
        home = next((home for home, names in HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module 'dualform' has no attribute {name!r}")
        value = getattr(import_module(f"dualform.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Everything that can be asked for, loaded or not."""
    return sorted({*globals(), *__all__, *PARTS})
