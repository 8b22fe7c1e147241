"""The notebook's explorer: the kernel answers what the page asks, and knows what was ticked."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dualform.explore import Exhibit, Explorer
from dualform.explore.page import asset, finite
from dualform.explore.widget import ExplorerWidget


class Page:
    """The other end of a widget's connection: sends questions, and keeps what comes back."""

    def __init__(self, exhibit: Exhibit) -> None:
        self.widget, self.news = ExplorerWidget(Explorer(exhibit)), []
        self.widget.send = self.news.append

    def ask(self, number: int, path: str, **params: str) -> None:
        message = {"id": number, "path": path, "params": params}
        self.widget._handle_custom_msg(message, [])

    def rest(self) -> None:
        """Waits until answers that were told are let go."""
        for _ in range(600):
            if not self.widget._asked:
                return
            time.sleep(0.05)
        pytest.fail("questions that were answered are still held")

    def last(self, number: int) -> dict[str, Any]:
        for _ in range(600):
            done = [n for n in self.news if n["id"] == number and {"result", "error"} & set(n)]
            if done:
                return done[0]
            time.sleep(0.05)
        pytest.fail("no answer came")


def test_the_kernel_answers_as_the_server_does(digits: Exhibit) -> None:
    page, explorer = Page(digits), Explorer(digits)
    for number, (path, params) in enumerate(
        [("run", {}), ("answer", {"query": "3", "ask": "network"}), ("books", {})]
    ):
        page.ask(number, path, **params)
        assert page.last(number)["result"] == finite(explorer.view(path, params))
    page.rest()
    page.ask(9, "answer", query="999")
    assert "there are queries 0 to 39" in page.last(9)["error"]


def test_what_is_no_longer_waited_for_is_not_sent(digits: Exhibit) -> None:
    page = Page(digits)
    page.ask(1, "answer", query="5", ask="removed")
    page.widget._handle_custom_msg({"id": 1, "cancel": True}, [])
    page.ask(2, "run")
    page.last(2)
    assert not any("result" in news for news in page.news if news["id"] == 1)


def test_it_carries_the_front_end_and_the_selection(digits: Exhibit) -> None:
    widget = ExplorerWidget(Explorer(digits))
    state = widget.get_state()
    assert state["_esm"] == asset("widget.js")
    assert state["_css"] == asset("widget.css")
    widget.set_state({"selection": ["3", "5"], "state": "#/query?query=1"})
    assert widget.selection == [3, 5]
