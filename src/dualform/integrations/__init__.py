"""Recording inside other people's training loops; each needs its package, this door none.

`dualform.integrations.transformers` has a `TransformersCallback`, and
`dualform.integrations.lightning` a `LightningCallback`.
"""

from dualform.integrations.ids import with_ids

__all__ = ["with_ids"]
