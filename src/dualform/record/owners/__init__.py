"""Whose row is it? Experiments decide; README.md tells how."""

from dualform.record.owners.table import CHANGED, UNCLEAR, UNSEEN, Owners
from dualform.record.owners.trial import Sighting, Trial

__all__ = ["CHANGED", "UNCLEAR", "UNSEEN", "Owners", "Sighting", "Trial"]
