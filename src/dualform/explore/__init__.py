"""Showing what was read: a report that is one file and needs nothing else."""

from dualform.explore.report import write_report
from dualform.explore.sections import Query

__all__ = ["Query", "write_report"]
