"""The report: one HTML file that opens from disk, runs no script and cannot call out."""

from __future__ import annotations

import math
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dualform.errors import ReadingError
from dualform.explore.amounts import shorten
from dualform.explore.figures import BLOCK_POINTS, LINE_POINTS
from dualform.explore.sections import LONGEST_NAME, Query, Sections
from dualform.ledger.format import write_durably
from dualform.read import Audit, Reading, Run


def write_report(
    run: Run, reading: Reading, path: str | os.PathLike[str], queries: Sequence[Query] = ()
) -> Path:
    """Writes what a layer's outputs are made of as one self-contained HTML file.

    >>> import tempfile, torch, dualform
    >>> from dualform.explore import Query, write_report
    >>> folder = tempfile.mkdtemp()
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with dualform.record(model, optimizer, folder + "/run") as recorder:
    ...     model(torch.randn(4, 3)).square().mean().backward()
    ...     optimizer.step()
    >>> run = dualform.open(folder + "/run")
    >>> reading = run.spotlight(model, torch.randn(1, 3))["model"]
    >>> write_report(run, reading, folder + "/report.html", [Query("a random input")]).name
    'report.html'

    Args:
        reading: one layer of a spotlight of this run; of the last layer, outputs are classes.
        path: the file to write; folders on the way are made.
        queries: a title, and if known a label and a preview, for each query of the reading.
    """
    target = Path(path)
    _check(run, reading, target, queries)
    page = _render(run, reading, queries)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_durably(target, page)
    return target


def _check(run: Run, reading: Reading, target: Path, queries: Sequence[Query]) -> None:
    source, asked = reading.source, len(reading.names)
    if (source.ledger.path.resolve(), source.until) != (run.path.resolve(), run.steps):
        raise ReadingError(
            f"the reading is of run '{source.ledger.path}' at step {source.until}, the report of "
            f"run '{run.path}' at step {run.steps}; give the run the reading came from."
        )
    if queries and len(queries) != asked:
        raise ReadingError(
            f"write_report got {len(queries)} queries, but the reading of layer "
            f"'{reading.layer}' has {asked}; give one Query each, or none at all."
        )
    if not asked:
        raise ReadingError("the reading has no queries: there is nothing to report.")
    if target.is_dir():
        raise ReadingError(f"'{target}' is a folder; give a file, such as '{target}/report.html'.")


def _render(run: Run, reading: Reading, queries: Sequence[Query]) -> str:
    environment = Environment(
        loader=PackageLoader("dualform.explore"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = files("dualform.explore").joinpath("templates/report.css").read_text("utf-8")
    sections = Sections(run, reading, queries)
    audit = run.audit()
    page = environment.get_template("report.html").render(
        style=style,
        style_hash=b64encode(sha256(style.encode()).digest()).decode(),
        run_name=run.path.resolve().name,
        layer=reading.layer,
        sections=[sections.section(at) for at in range(len(sections))],
        labeled=sections.labeled,
        classes=sections.outputs_are_classes,
        samples=len(run.ids),
        audit=audit,
        remainder=_remainder(audit.remainder),
        books=[(book, _remainder(book.remainder)) for book in audit.books],
        facts=_facts(run, audit),
        block_points=BLOCK_POINTS,
        line_points=LINE_POINTS,
    )
    # Half of a surrogate pair, which JSON can smuggle into a label, cannot be written as UTF-8.
    return page.encode("utf-8", "replace").decode("utf-8")


def _remainder(value: float) -> str:
    return "not measured" if math.isnan(value) else f"{value:.1e}"


def _facts(run: Run, audit: Audit) -> dict[str, str]:
    """What was recorded, and how; nothing that tells of the machine."""
    metadata = run.info.metadata
    settings = metadata.get("settings", [])
    groups = [_listed(group) for group in settings] if isinstance(settings, list) else []
    return {
        "Run": run.path.resolve().name,
        "Optimizer": shorten(metadata.get("optimizer", "unknown"), LONGEST_NAME),
        "Settings at the start": "; ".join(dict.fromkeys(groups)) or "unknown",
        "Steps": f"{run.steps:,}",
        "Samples": f"{len(run.ids):,}",
        "Recorded": f"{audit.bytes / 1e6:,.1f} MB",
        "Versions": _listed(metadata.get("versions")) or "unknown",
        "Created": shorten(metadata.get("created", "unknown"), LONGEST_NAME),
    }


def _listed(pairs: Any) -> str:
    """Names and values in one line; switches that are off are left out."""
    if not isinstance(pairs, Mapping):
        return ""
    shown = {
        name: value for name, value in pairs.items() if value is not None and value is not False
    }
    return ", ".join(f"{shorten(n, 30)} {shorten(v, 30)}" for n, v in shown.items())
