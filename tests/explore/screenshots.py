"""Pictures of the explorer for people who have not opened it yet: `make screenshots`.

Trains the demo, serves it, and photographs it: python -m tests.explore.screenshots FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from tests.explore.browser import launch
from tests.explore.visits import serving, visiting

from dualform.demo import run_demo
from dualform.explore import Explorer

SHOTS = {
    "explorer": ("/query?query=12", {"width": 1440, "height": 1890}, "light"),
    "explorer-dark": (
        "/query?query=12&ask=network&tick=792&tick=1200",
        {"width": 1440, "height": 1000},
        "dark",
    ),
    "explorer-phone": ("/query?query=12", {"width": 390, "height": 844}, "light"),
}
"""What is photographed: which state, how large, in which colors."""


def photograph(browser: Browser, address: str, folder: Path) -> None:
    """Writes one picture a shot."""
    for name, (state, size, scheme) in SHOTS.items():
        with visiting(browser, address, viewport=size, color_scheme=scheme) as visit:
            visit.settle(state)
            save(visit.page, folder / f"{name}.png")


def save(page: Page, path: Path) -> None:
    """With a palette: the page has few colors, and 256 keep a picture small."""
    page.screenshot(path=path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(256)
    small.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as runs, sync_playwright() as playwright:
        exhibit = run_demo(Path(runs) / "digits", Console(quiet=True)).exhibit
        browser = launch(playwright)
        with serving([Explorer(exhibit)]) as address:
            photograph(browser, address, folder)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
