"""The command line: one file for each group of verbs."""

from __future__ import annotations

import sys

import click

from dualform.cli.compaction import compact
from dualform.cli.evaluations import evaluate
from dualform.cli.explorer import demo, report, view
from dualform.cli.instruments import diagnose
from dualform.cli.network import explain, influence
from dualform.cli.planning import plan
from dualform.cli.runs import audit, info, repair, top
from dualform.cli.studies import study
from dualform.errors import DualformError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dualform")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Every prediction, traced to the training that made it."""


VERBS = (
    *(plan, demo, info, audit, compact, repair, top, view, report),
    *(explain, influence, diagnose, evaluate, study),
)
for verb in VERBS:
    cli.add_command(verb)


def main() -> None:
    """Runs the command line; an error is one line, unless --debug asks for more."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except (DualformError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        _fail(str(error))
    except Exception as error:  # of the user's own code, as a rule
        if "--debug" in sys.argv:
            raise
        said = str(error).strip().partition("\n")[0]
        _fail(f"{type(error).__name__}: {said} (`dualform --debug …` shows where)")


def _fail(message: str) -> None:
    click.echo(f"dualform: {message}", err=True)
    sys.exit(1)
