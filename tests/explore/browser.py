"""Which browser the explorer's tests use: one that is found, or else one that is installed.

`make browser` runs this: python -m tests.explore.browser
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from playwright.sync_api import Browser, Playwright, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""What a Chromium may be called on the PATH; the first that runs is taken."""
MISSING = (
    "the explorer's tests need a browser, and none was found: neither "
    f"{', '.join(NAMES)} on the PATH nor Playwright's own. `make browser` tries to install one; "
    "where it cannot, install Debian's `chromium` or Google Chrome, or run "
    "`.venv/bin/playwright install --with-deps chromium` with network and the right to install."
)


def find(playwright: Playwright) -> str | None:
    """The path of a browser that runs, or None: the system's first, then Playwright's own."""
    paths = [*map(shutil.which, NAMES), playwright.chromium.executable_path]
    return next((path for path in paths if path and runs(path)), None)


def runs(path: str) -> bool:
    """Whether a browser starts at all: some packages are empty shells, some lack libraries."""
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def launch(playwright: Playwright) -> Browser:
    """Starts the browser that is there; where there is none, says how to get one."""
    path = find(playwright)
    if path is None:
        raise FileNotFoundError(MISSING)
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@dataclass(frozen=True)
class Way:
    """Commands that install a browser, one after the other, and what they need set."""

    commands: Sequence[Sequence[str]]
    settings: Mapping[str, str] = field(default_factory=dict)

    def succeeds(self) -> bool:
        """Runs the commands until one fails, and then shows what that one said."""
        for command in self.commands:
            print("+", *command, file=sys.stderr, flush=True)
            environment = {**os.environ, **self.settings}
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode:
                print(done.stdout, file=sys.stderr, flush=True)
                return False
        return True


def ways(user: int) -> Iterator[Way]:
    """Debian's package where this user may install it, then Playwright's download."""
    apt, sudo = shutil.which("apt-get"), shutil.which("sudo")
    may = [] if user == 0 else [sudo, "-n"] if sudo and runs_as_root(sudo) else None
    if apt and may is not None:
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        install = [*may, apt, "install", "-y", "-qq", "chromium"]
        yield Way([[*may, apt, "update", "-qq"], install], quiet)
    yield Way([[sys.executable, "-m", "playwright", "install", "chromium"]])


def runs_as_root(sudo: str) -> bool:
    """Whether sudo asks for no password."""
    return not subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode


def main() -> int:
    """Prints the browser's path, after installing one where there is none."""
    with sync_playwright() as playwright:
        found = find(playwright)
        for way in ways(os.geteuid()) if found is None else ():
            if way.succeeds() and (found := find(playwright)):
                break
    print(found or MISSING, file=sys.stdout if found else sys.stderr)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
