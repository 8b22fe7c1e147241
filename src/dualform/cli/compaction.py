"""The verb that makes a run smaller: `compact`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dualform.cli.options import as_json, print_json, print_results, run_argument
from dualform.compaction import compact as compact_run
from dualform.compaction import confirm as confirm_compaction
from dualform.compaction import undo as undo_compaction
from dualform.errors import RecordingError
from dualform.recording.keep import Keep

KEEP = (
    "half, int8, summaries, or these by the names of parameters or modules: "
    '\'{"head": "half", "*": "int8"}\'.'
)


@click.command()
@run_argument
@click.option("--keep", help=KEEP)
@click.option("--confirm", is_flag=True, help="Delete the old run, which is kept until then.")
@click.option("--undo", is_flag=True, help="Bring the old run back.")
@as_json
def compact(run: Path, keep: str | None, confirm: bool, undo: bool, as_json: bool) -> None:
    """Make a finished run smaller; its books stay as they are.

    The old run is kept as RUN.before-compact, until --confirm deletes it or --undo brings it back.
    """
    if [keep is not None, confirm, undo].count(True) != 1:
        raise click.UsageError("give one of --keep POLICY, --confirm and --undo.")
    if keep is not None:
        result = compact_run(run, _read_keep(keep))
        print_json(result.to_dict()) if as_json else print_results(result)
        return
    freed = confirm_compaction(run) if confirm else None
    if undo:
        undo_compaction(run)
    if as_json:
        print_json({"path": str(run), "undone": undo, "confirmed": confirm, "bytes_old": freed})
    elif freed is not None:
        click.echo(f"The old run, {freed / 1e6:,.1f} MB, is deleted.")
    else:
        click.echo(f"{run} is as it was before it was compacted.")


def _read_keep(text: str) -> Keep:
    """A policy, or an object of policies by name."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise RecordingError(
            f"--keep {text} is no JSON object: {error}; expected such as "
            '\'{"head": "half", "*": "int8"}\'.'
        ) from error
