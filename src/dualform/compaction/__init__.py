"""Making a finished run smaller: rows become rounded rows or summaries; the books stay."""

from dualform.compaction.front_door import Compaction, compact, confirm, undo

__all__ = ["Compaction", "compact", "confirm", "undo"]
