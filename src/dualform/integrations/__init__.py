"""Recording inside other people's training loops; each needs its package, this door none.

`dualform.integrations.transformers` and `.lightning` have a `RecordCallback` each.
"""

from dualform.integrations.ids import with_ids

__all__ = ["with_ids"]
