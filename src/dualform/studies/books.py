"""Do the books of a study balance? The same question of each of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dualform.read import Run
from dualform.studies.report import NumberTable

BOUND = 1e-5
"""What the remainder of a run may be at most, relative to what training changed."""


def audited(run: Run) -> dict[str, float]:
    """The largest remainder of a run, and which share of its parameters is booked by row.

    >>> from dualform.testing import tiny_run
    >>> audited(tiny_run()[0])["coverage"]
    1.0
    """
    audit = run.audit()
    return {"remainder": audit.remainder, "coverage": audit.coverage}


def books_table(audits: Mapping[str, Sequence[Mapping[str, float]]]) -> NumberTable:
    """The worst of some runs, by what they are called.

    >>> print(books_table({"all": [{"remainder": 2e-6, "coverage": 1.0}]}).markdown())
    **do the books balance?**
    <BLANKLINE>
    | runs | largest remainder | at most 1e-05 | coverage, % |
    |---|---|---|---|
    | all | 2e-06 | yes | 100 |
    """
    rows = []
    for name, found in audits.items():
        worst = max(audit["remainder"] for audit in found)
        kept = "yes" if worst <= BOUND else "no"
        rows.append((name, worst, kept, 100 * min(audit["coverage"] for audit in found)))
    columns = ("runs", "largest remainder", f"at most {BOUND:.0e}", "coverage, %")
    return NumberTable("do the books balance?", columns, tuple(rows))
