"""Do the books of a study's runs balance? What an audit says, and the table of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dualform.read import Audit
from dualform.studies.report import NumberTable

BOUND = 1e-5
"""How large the remainder of a run may be, relative to the change of its weights."""


def audited(audit: Audit) -> dict[str, float]:
    """The largest remainder of a run, and the share of its parameters that is kept by row.

    >>> from dualform.testing import tiny_run
    >>> found = audited(tiny_run()[0].audit())
    >>> found["remainder"] < BOUND, found["coverage"]
    (True, 1.0)
    """
    return {"remainder": audit.remainder, "coverage": audit.coverage}


def balance_table(audits: Mapping[str, Sequence[Mapping[str, float]]]) -> NumberTable:
    """The worst of what some audits found, by the name of their runs.

    >>> print(balance_table({"runs": [{"remainder": 1e-6, "coverage": 1.0}]}).markdown())
    **do the books balance?**
    <BLANKLINE>
    | runs | largest remainder | at most 1e-05 | coverage, % |
    |---|---|---|---|
    | runs | 1e-06 | yes | 100 |
    """
    rows = []
    for name, found in audits.items():
        worst = max(audit["remainder"] for audit in found)
        kept = "yes" if worst <= BOUND else "no"
        rows.append((name, worst, kept, 100 * min(audit["coverage"] for audit in found)))
    columns = ("runs", "largest remainder", f"at most {BOUND:.0e}", "coverage, %")
    return NumberTable("do the books balance?", columns, tuple(rows))
