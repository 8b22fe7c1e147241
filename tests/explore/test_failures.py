"""What fails is said in words: in Python, over HTTP, in a notebook and on the page."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from playwright.sync_api import Browser, expect
from tests.explore.conftest import Reader, encode, record
from tests.explore.test_widget import Page
from tests.explore.visits import serving, visiting
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.errors import DualformError, ModelMismatchError, ReadingError
from dualform.explore import Exhibit, Explorer, Preview
from dualform.explore.encoding import pieces
from dualform.testing import tiny_run

UNKNOWN = "text:a zebra sat"
FAILED = "encode cannot make an input of this text: ValueError: 'zebra' is not in list"


def test_an_encode_that_fails_says_why(words: Exhibit) -> None:
    with pytest.raises(ReadingError, match=FAILED):
        Explorer(words).view("answer", {"query": UNKNOWN})


def test_an_encode_that_fails_is_seen_on_the_page(browser: Browser, words: Exhibit) -> None:
    with serving([Explorer(words)]) as address, visiting(browser, address) as visit:
        visit.go("/query")
        visit.at("give").locator("summary").click()
        visit.at("typed").fill("a zebra sat")
        visit.at("ask-typed").click()
        expect(visit.at("error")).to_contain_text(FAILED[1:])


class Picky(Reader):
    """Fails on two words, in a way that nobody foresaw."""

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] == 2:
            raise ZeroDivisionError("two words divide nothing")
        return super().forward(tokens)


@pytest.fixture
def picky(words: Exhibit) -> Exhibit:
    model = Picky()
    model.load_state_dict(words.run.state_dict())
    return Exhibit(words.run, model, words.inputs(2), encode=encode)


def test_what_nobody_foresaw_is_said_too(
    browser: Browser, picky: Exhibit, caplog: pytest.LogCaptureFixture
) -> None:
    """The page shows the error itself, not that the connection broke; the log has its trace."""
    said = "this could not be answered: ZeroDivisionError: two words divide nothing"
    with serving([Explorer(picky)]) as address, visiting(browser, address) as visit:
        visit.go("/query?query=text:the+cat")
        expect(visit.at("error")).to_contain_text(said[1:])
        where = urlsplit(address)
        connection = HTTPConnection(where.hostname or "", where.port, timeout=60)
        connection.request("GET", "/api/0/answer?query=text:the+cat")
        answer = connection.getresponse()
        assert (answer.status, said in json.loads(answer.read())["error"]) == (400, True)
        connection.close()
    page = Page(picky)
    page.ask(1, "answer", query="text:the cat")
    assert said in page.last(1)["error"]
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def test_a_connection_that_breaks_is_said(browser: Browser, digits: Exhibit) -> None:
    with serving([Explorer(digits)]) as address, visiting(browser, address) as visit:
        visit.page.route("**/api/0/answer*", lambda route: route.abort())
        visit.go("/query")
        expect(visit.at("error")).to_contain_text("The server does not answer")
        expect(visit.at("error").locator("code")).to_have_text("dualform view")
        visit.complaints.clear()  # the browser's own


def test_reading_while_recording_names_the_checkpoint(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 2), torch.randn(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(4):
            recorder.samples(range(8))
            F.cross_entropy(model(x), torch.arange(8) % 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                recorder.checkpoint()
        behind = dualform.open(tmp_path / "run")
        assert behind.steps == 2
        with pytest.raises(ModelMismatchError, match=r"not ended: .* recorder\.checkpoint\(\)"):
            behind.spotlight(model, x[:1])
        recorder.checkpoint()
        dualform.open(tmp_path / "run").spotlight(model, x[:1])
    ended = dualform.open(tmp_path / "run")
    with pytest.raises(ModelMismatchError) as error:
        ended.spotlight(nn.Linear(3, 2), x[:1])
    assert "checkpoint" not in str(error.value)


def test_previews_can_be_made_by_those_who_encode_them() -> None:
    assert "Preview" in dualform.explore.__all__
    assert torch.equal(encode(Preview("text", "the cat")), torch.tensor([[0, 1]]))


SCRIPT = """
import dualform
from dualform.testing import tiny_run
run, model, x = tiny_run()
dualform.view(run, model, x[:1], host="127.0.0.1", port=0, browser=False)
"""


def test_view_prints_its_address(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("The explorer is at http://127.0.0.1:")
        where = urlsplit(line.split()[4])
        connection = HTTPConnection(where.hostname or "", where.port, timeout=60)
        connection.request("GET", "/api/0/run")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.parametrize("given", [{}, {"port": 0}])
def test_in_a_notebook_a_port_means_a_server(
    given: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[object] = []
    monkeypatch.setattr("dualform.explore.show._in_notebook", lambda: True)
    monkeypatch.setattr("dualform.explore.server.serve", lambda *told: served.append(told[1:]))
    run, model, x = tiny_run()
    widget = dualform.view(run, model, x[:1], browser=False, **given)
    assert served == ([("127.0.0.1", 0, False)] if given else [])
    assert (widget is None) == bool(given)


def test_view_listens_where_it_is_told() -> None:
    run, model, x = tiny_run()
    with pytest.raises(DualformError, match=r"cannot listen on 192\.0\.2\.1 port 80"):
        dualform.view(run, model, x[:1], host="192.0.2.1", port=80, browser=False)


def test_a_text_is_cut_as_it_was_written(tmp_path: Path) -> None:
    """Characters are positions: line breaks and double spaces are among them, and so is an end."""
    texts = ["a  b\nc ", "x" * 7, "1\t\t2 3\n"]
    letters = sorted(set("".join(texts)))

    class Letters(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(len(letters), 8)

    torch.manual_seed(0)
    tokens = torch.tensor([[letters.index(letter) for letter in text] for text in texts])
    model = Letters()
    run = record(model, tokens, torch.tensor([0, 1, 0]), tmp_path / "run", previews=texts)
    explorer = Explorer(Exhibit(run, model, tokens[:1]))
    asked = {"query": "0", "layer": "mix"}
    for at, text in enumerate(texts):
        assert explorer.view("acts", asked | {"id": str(at)})["tokens"] == list(text)


def test_a_picture_has_no_words() -> None:
    """Though a tensor, printed, has some."""
    pixels = torch.zeros(6, 6, dtype=torch.uint8)
    assert pieces(Preview("image", pixels), len(str(pixels).split())) is None
