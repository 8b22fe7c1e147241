"""The explorer, wherever one is: in a notebook as a widget, elsewhere in a browser."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from dualform.errors import DualformError
from dualform.explore.encoding import Encode
from dualform.explore.exhibit import Exhibit, Query
from dualform.explore.views import Explorer
from dualform.read import Run


def view(
    run: Run,
    model: nn.Module | None = None,
    x: Any = None,
    queries: Sequence[Query] = (),
    encode: Encode | None = None,
    names: Sequence[str] = (),
    *,
    host: str | None = None,
    port: int | None = None,
    browser: bool = True,
) -> Any:
    """Opens the explorer: in a notebook as a widget, elsewhere in a browser, until interrupted.

    The address is printed. With a host or a port there is a server in a notebook too.

    >>> import dualform
    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> dualform.view(run, x=x)
    Traceback (most recent call last):
    dualform.errors.ReadingError: queries need the model that they are asked of: give model and x.

    Args:
        model, x, queries, encode, names: as in `dualform.explore.Exhibit`.
        host: where the server listens; by default 127.0.0.1, which only this machine reaches.
        port: by default any that is free.
        browser: whether the address is opened in a browser.
    """
    explorer = Explorer(Exhibit(run, model, x, queries, encode, names))
    try:
        if _in_notebook() and host is None and port is None:
            from dualform.explore.widget import ExplorerWidget

            return ExplorerWidget(explorer)
        from dualform.explore.server import serve
    except ImportError as error:
        raise missing(error) from error
    return serve([explorer], host or "127.0.0.1", port or 0, browser)


def missing(error: ImportError) -> DualformError:
    """Says what to install."""
    return DualformError(
        f"the explorer needs {error.name}, which is not installed: pip install 'dualform[explore]'."
    )


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"
