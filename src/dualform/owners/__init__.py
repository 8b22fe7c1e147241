"""Whose row is it? Experiments decide; README.md tells how."""

from dualform.owners.batch import Batch, BatchSamples
from dualform.owners.table import CHANGED, UNCLEAR, UNSEEN, Owners
from dualform.owners.trial import Sighting, Trial

__all__ = ["CHANGED", "UNCLEAR", "UNSEEN", "Batch", "BatchSamples", "Owners", "Sighting", "Trial"]
