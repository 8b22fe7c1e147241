"""Showing what was read: one front end in a browser, in a file, and in a notebook."""

from dualform.explore.exhibit import Exhibit, Query
from dualform.explore.report import write_report
from dualform.explore.show import view
from dualform.explore.views import Explorer
from dualform.ledger.samples import Preview

__all__ = ["Exhibit", "Explorer", "Preview", "Query", "view", "write_report"]
