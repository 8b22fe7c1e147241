"""Peers, one a file: each gives (samples, queries), positive where a sample raises the output.

`scores(trained, work, **settings)` computes them from one training run, with intermediate files in
`work`; `SETTINGS` holds what a sweep tries, `BEST` what it chose for each task.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.attribution.trained import Trained

PEERS = ("captum", "traker", "kronfluence", "dattri")


class Peer(Protocol):
    """What the module of a peer holds."""

    SETTINGS: list[dict[str, Any]]
    BEST: dict[str, dict[str, Any]]

    def scores(self, trained: Trained, work: Path, **settings: Any) -> NDArray[np.float64]: ...


def peer(name: str) -> Peer:
    """The module of this peer; its library is imported only now."""
    module: Any = import_module(f"{__name__}.{name}_peer")
    return module
