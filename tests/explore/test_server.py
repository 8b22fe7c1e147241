"""The server as strangers and friends meet it: a real process, real connections."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Event
from urllib.parse import urlencode, urlsplit

import numpy as np
import pytest
from tests import processes

from dualform.explore import Exhibit, Explorer
from dualform.explore.jobs import CancelledByReader, Jobs
from dualform.explore.page import json_text
from dualform.read.progress import LateProgress

MODEL = """
from torch import nn
def model():
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
"""


@dataclass
class Served:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    address: str

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, str]:
        """The answer, and its body."""
        where = urlsplit(self.address)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = HTTPConnection(where.hostname or "", where.port, timeout=60)
        with closing(connection):
            connection.request(method, path, headers=names)
            answer = connection.getresponse()
            return answer, answer.read().decode()

    def error(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        answer, body = self.get(path, method, **headers)
        return answer.status, json.loads(body)["error"]


def start(folder: Path, *arguments: str) -> Served:
    command = [
        sys.executable,
        "-c",
        "from dualform.cli import main; main()",
        "view",
        "--no-browser",
    ]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "The explorer is at http://" in line, process.communicate()
    return Served(process, line.split()[4])


@pytest.fixture(scope="module")
def folder(digits: Exhibit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a person would start it: with the model's module and the queries."""
    path = tmp_path_factory.mktemp("served")
    (path / "mine.py").write_text(MODEL)
    labels = [subject.query.label for subject in digits.some(range(len(digits)))]
    np.savez(path / "x.npz", x=digits.inputs(len(digits)).numpy(), labels=np.array(labels))
    return path


@pytest.fixture(scope="module")
def served(digits: Exhibit, folder: Path) -> Iterator[Served]:
    run = str(digits.run.path)
    server = start(folder, run, run, "--model", "mine:model", "--input", "x.npz")
    yield server
    server.process.terminate()
    _, complaints = server.process.communicate(timeout=20)
    assert complaints == ""


def test_views_are_the_same_as_in_python(digits: Exhibit, served: Served) -> None:
    explorer = Explorer(digits)
    for view, asked in (
        ("answer", {"query": "sample:3", "layer": "0"}),
        ("sample", {"id": "5"}),
        ("suspects", {}),
        ("books", {}),
    ):
        answer, body = served.get(f"/api/1/{view}?{urlencode(asked)}")
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        here = json.loads(json_text(explorer.view(view, asked)))
        there = json.loads(body)
        if view == "sample":  # queries are called otherwise there
            here, there = (
                {n: v for n, v in p.items() if n not in ("helps", "hurts")} for p in (here, there)
            )
        assert there == here
    table = served.get("/api/0/suspects.csv")[1]
    assert table == explorer.suspects_csv()


def test_news_come_before_the_result(served: Served) -> None:
    asked = "/api/0/answer?query=5&ask=network"
    answer, body = served.get(asked, Accept="application/x-ndjson")
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    *news, last = [json.loads(line) for line in body.splitlines()]
    assert all(0 <= line["progress"] <= 1 and line["doing"] for line in news)
    assert last["result"] == json.loads(served.get(asked)[1])
    wrong = served.get("/api/0/answer?query=999", Accept="application/x-ndjson")[1]
    assert "there are queries 0 to 39" in json.loads(wrong.splitlines()[-1])["error"]


def test_what_a_browser_may_do_is_said_with_every_answer(served: Served) -> None:
    for path in ("/", "/assets/app.js", "/api/0/run", "/nothing"):
        headers = served.get(path)[0].headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/nothing", 404, "there is nothing at /nothing."),
        ("/assets/other.js", 404, "there is no file 'other.js'."),
        ("/assets/..%2f..%2frun.json", 404, "there is nothing at"),
        ("/assets/../../../../etc/passwd", 404, "there is nothing at"),
        ("/run.json", 404, "there is nothing at /run.json."),
        ("/api/2/run", 400, "run 2 is not here; there are 2."),
        ("/api/0/secrets", 400, "there is no view 'secrets'; there are acts"),
        ("/api/0/answer?query=%ff", 400, "the parameters cannot be read"),
        ("/api/0/answer?query=" + "A" * 60_001, 413, "longer than 60,000 characters."),
    ],
)
def test_only_the_run_is_served(served: Served, path: str, status: int, message: str) -> None:
    found, why = served.error(path)
    assert (found, message in why) == (status, True), why


def test_pages_of_strangers_are_refused(served: Served) -> None:
    host = urlsplit(served.address).netloc
    assert served.error("/api/0/run", Host="evil.example")[0] == 403
    assert served.error("/api/0/run", Host=f"127.0.0.1.evil.example:{host[-5:]}")[0] == 403
    assert served.error("/api/0/run", Origin="http://evil.example")[0] == 403
    assert served.error("/api/0/run", Origin="null")[0] == 403
    assert served.error("/api/0/run", Sec_Fetch_Site="cross-site")[0] == 403
    assert served.error("/api/0/run", method="POST")[0] == 405
    assert served.get("/api/0/run", Origin=f"http://{host}")[0].status == 200
    assert served.get("/", Sec_Fetch_Site="none")[0].status == 200


def test_bound_elsewhere_it_asks_for_a_token(digits: Exhibit, folder: Path) -> None:
    server = start(folder, str(digits.run.path), "--host", "0.0.0.0")
    try:
        token = server.address.partition("?token=")[2]
        assert len(token) > 20
        for path in ("/", "/api/0/run", "/api/0/run?token=guess"):
            status, why = server.error(path)
            assert (status, why[:31]) == (403, "the token is missing or wrong; ")
        entered = server.get(f"/?token={token}")[0]
        assert (entered.status, entered.headers["location"]) == (303, "/")
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert server.get("/api/0/run", Cookie=cookie.partition(";")[0])[0].status == 200
        assert server.error("/api/0/run", Cookie="dualform=guess")[0] == 403
    finally:
        server.process.terminate()
        server.process.communicate(timeout=20)


def test_many_at_once_get_what_each_would_get_alone(served: Served) -> None:
    paths = [
        f"/api/0/{view}"
        for query in range(6)
        for view in (
            f"answer?query={query}",
            f"answer?query={query}&ask=network",
            f"answer?query={query}&layer=0&span=0-1",
            f"evidence?query={query}&side=against&offset=5",
            f"sample?id={query}",
        )
    ]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda path: served.get(path)[1], paths * 2))
    alone = [served.get(path)[1] for path in paths]
    assert together == alone * 2


def waits(begun: Event) -> None:
    """A scan that never ends by itself."""
    with LateProgress("everything", 10**9) as progress:
        while True:
            progress.advance(1)
            begun.set()
            time.sleep(0.01)


def test_a_scan_that_nobody_waits_for_ends() -> None:
    jobs, begun = Jobs(), Event()
    first = jobs.join("scan", lambda: waits(begun))
    second = jobs.join("scan", lambda: waits(begun))
    assert first is second
    assert begun.wait(10)
    first.leave()
    time.sleep(0.1)
    assert not first.future.done()
    second.leave()
    with pytest.raises(CancelledByReader, match="nobody waits"):
        first.future.result(timeout=10)
    again = jobs.join("scan", lambda: 3)
    assert again.future.result(timeout=10) == 3


def test_a_port_in_use_is_said(served: Served, digits: Exhibit, folder: Path) -> None:
    port = str(urlsplit(served.address).port)
    given = ("view", str(digits.run.path), "--no-browser", "--port", port)
    result = processes.dualform(*given, cwd=folder)
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in result.stderr
    assert "give another port" in result.stderr
