"""The explorer in a real browser, and everything it did that it should not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import uvicorn
from playwright.sync_api import Browser, Locator, Page, expect

from dualform.explore import Explorer
from dualform.explore.server import make_app

AXE = Path(__file__).parents[2] / "frontend/node_modules/axe-core/axe.min.js"
BUSY = "[aria-busy=true], [data-testid=progress]"
"""What a page shows while it is not answered yet."""
PATIENCE = 15.0
"""Seconds that an answer may take on a busy machine."""


@dataclass
class Visit:
    """A page of the explorer, with what it asked for and complained about."""

    page: Page
    home: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def go(self, hash: str) -> None:
        """Opens a state of the explorer, as a link would."""
        self.page.goto(f"{self.home}#{hash}")

    def settle(self, hash: str) -> None:
        """Opens a state anew, and waits until all of it is answered."""
        self.page.goto("about:blank")
        self.go(hash)
        self.page.locator("main").wait_for()
        expect(self.page.locator(BUSY)).to_have_count(0)

    def at(self, name: str) -> Locator:
        """The part with this test hook; frontend/README.md lists them."""
        return self.page.get_by_test_id(name)

    @staticmethod
    def choose(radio: Locator) -> None:
        """Clicks the label around a radio button, which is what people see, once it is still."""
        radio.locator("xpath=..").click()

    def value(self, name: str) -> float:
        """The number that is shown there, in full."""
        return float(self.at(name).get_attribute("value", timeout=1000 * PATIENCE) or "nan")

    def values(self, selector: str) -> list[float]:
        read = "all => all.map(element => Number(element.value))"
        return [float(value) for value in self.page.locator(selector).evaluate_all(read)]

    def evidence(self, side: str) -> dict[str, float]:
        """The cards of one side: ids and amounts."""
        read = (
            "all => all.map(card => [card.dataset.testid.slice(5),"
            " Number(card.querySelector('data').value)])"
        )
        cards = self.page.locator(f"[data-testid=side-{side}] [data-testid^=card-]")
        return {str(name): float(value) for name, value in cards.evaluate_all(read)}

    def axe(self) -> list[str]:
        """What the accessibility checker calls serious or worse."""
        self.page.evaluate(AXE.read_text("utf-8"))
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['id']}: {node['html'][:120]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]

    def too_wide(self) -> bool:
        """Whether the page must be scrolled sideways."""
        script = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        return bool(self.page.evaluate(script))

    def check(self) -> None:
        """No complaint in the console, no request that leaves the page's home."""
        assert self.complaints == []
        home = self.home.split("#")[0]
        own = (home, "data:", "blob:", "about:")
        strangers = [url for url in self.requests if not url.startswith(own)]
        assert strangers == []


def eventually(read: Callable[[], Any], expected: Any) -> None:
    """Waits until it reads as expected; numbers to within float32."""
    parts = expected.values() if isinstance(expected, dict) else [expected]
    exact = "str" in str({type(part) for part in np.ravel(list(parts)).tolist()})
    wanted = expected if exact else pytest.approx(expected, rel=1e-5, abs=1e-6)
    until = time.monotonic() + PATIENCE
    while read() != wanted and time.monotonic() < until:
        time.sleep(0.02)
    assert read() == wanted


@contextmanager
def visiting(browser: Browser, home: str, offline: bool = False, **look: Any) -> Iterator[Visit]:
    """A visit; what it did wrong is found in the end.

    Opening a page takes a browser longer than most tests do. So visits share one, which each
    leaves blank and without cookies; the explorer's own state is all in its address. A visit that
    fails, or wants another `look` (a size, colors), has a page of its own.
    """
    page = _opened(browser, offline, look)
    visit = Visit(page, home)
    listeners: dict[Any, Callable[[Any], None]] = {
        "request": lambda request: visit.requests.append(request.url),
        "pageerror": lambda error: visit.complaints.append(str(error)),
        "console": lambda message: visit.complaints.append(message.text),
        "dialog": lambda dialog: visit.complaints.append(f"dialog: {dialog.message}"),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    reused = False
    try:
        yield visit
        visit.check()
        reused = not look and len(page.context.pages) == 1
    finally:
        if reused:
            for event, listener in listeners.items():
                page.remove_listener(event, listener)
            page.unroute_all()
            page.goto("about:blank")
            page.context.clear_cookies()
            _BLANK[browser, offline] = page
        else:
            page.context.close()


_BLANK: dict[tuple[Browser, bool], Page] = {}
"""Pages that earlier visits left, by whether they are offline."""


def _opened(browser: Browser, offline: bool, look: dict[str, Any]) -> Page:
    if not look and (browser, offline) in _BLANK:
        return _BLANK.pop((browser, offline))
    size = {"viewport": {"width": 1280, "height": 900}}
    return browser.new_context(offline=offline, **{**size, **look}).new_page()


@contextmanager
def serving(explorers: list[Explorer]) -> Iterator[str]:
    """A real server on a free port of this machine."""
    config = uvicorn.Config(make_app(explorers), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:  # or a test that fails never ends
        server.should_exit = server.force_exit = True
        thread.join()
