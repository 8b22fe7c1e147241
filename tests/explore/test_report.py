"""What a report carries: one file under a strict policy, whose numbers are the Python API's."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dualform
from dualform.errors import DualformError, ReadingError, RecordingWarning
from dualform.explore import Exhibit, Explorer, Query, write_report
from dualform.explore.parameters import Parameters
from dualform.explore.views import Json
from dualform.ledger.samples import Preview

HOSTILE = "</script><img src=x onerror=alert(1)>"


def carried(page: Path) -> Json:
    found = re.search(r'id="carried">(.*?)</script>', page.read_text("utf-8"), re.S)
    assert found is not None
    content: Json = json.loads(found[1])
    return content


def test_cells_are_the_amounts_by_sample_and_time(digits: Exhibit, tmp_path: Path) -> None:
    content = carried(write_report(digits, tmp_path / "deep/report.html", ["0", "3"]))
    explorer = Explorer(digits)
    assert [card["query"] for card in content["queries"]] == ["0", "3"]
    assert content["run"]["carried"]
    kinds = set()
    for key, answer in content["answers"].items():
        query, ask, layer, output = key.split("|")
        kinds.add((ask, layer))
        asked = {"query": query, "ask": ask, "layer": layer, "output": output}
        cells = np.frombuffer(base64.b64decode(answer["cells"]), "<f4").reshape(120, -1)
        read = explorer.ask(query, Parameters.read(asked).question)
        np.testing.assert_allclose(cells, read.cells, rtol=1e-6, atol=1e-12)
        expected = explorer.view("answer", asked)
        assert answer["check"] == expected["check"]
        assert answer["groups"] == expected["groups"]
    assert kinds == {
        ("layer", "2"),
        ("layer", "0"),
        ("network", ""),
        ("removed", ""),
        ("keys", "2"),
    }
    assert content["books"]["remainder"] == digits.run.audit().remainder
    shown = {
        str(line["id"])
        for a in content["answers"].values()
        for line in a["sides"]["for"]["samples"]
    }
    assert shown <= set(content["previews"])


def test_without_a_model_it_is_about_training_samples(words: Exhibit, tmp_path: Path) -> None:
    content = carried(write_report(Exhibit(words.run), tmp_path / "report.html"))
    assert [card["query"][:7] for card in content["queries"]] == ["sample:"] * 2
    assert {key.split("|")[1] for key in content["answers"]} == {"layer", "keys"}


def test_room_for_cells_is_limited(
    digits: Exhibit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualform.explore.report.CELL_BYTES", 120 * 3 * 4)
    content = carried(write_report(digits, tmp_path / "report.html", ["0"]))
    held = {key for key, answer in content["answers"].items() if answer["cells"] is not None}
    assert len(held) == 1
    assert next(iter(held)).startswith("0|layer|2|")


def test_nothing_but_the_front_end_can_run(digits: Exhibit, tmp_path: Path) -> None:
    page = write_report(digits, tmp_path / "report.html", ["0"]).read_text("utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in policy[1]  # so it is 'none'
    script = re.search(r'<script type="module">(.*?)</script>', page, re.S)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy[1]


def test_labels_ids_and_texts_are_data(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [HOSTILE, "\ud800 half a character", "b\nc"]
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.describe(names, labels=[HOSTILE, "two", "three"], previews=[HOSTILE, "", "x"])
        recorder.samples(names)
        model(torch.eye(3)).square().sum().backward()
        optimizer.step()
    exhibit = Exhibit(dualform.open(tmp_path / "run"), model, torch.ones(1, 3), [Query(HOSTILE)])
    page = write_report(exhibit, tmp_path / "report.html")
    assert "<img" not in page.read_text("utf-8")
    content = carried(page)
    assert content["queries"][0]["title"] == HOSTILE
    assert HOSTILE in content["ids"]
    assert content["columns"]["label"][content["ids"].index(HOSTILE)] == HOSTILE


@pytest.mark.parametrize(
    ("preview", "message"),
    [
        (Preview("image", torch.zeros(8, 8)), "expected a torch.uint8 tensor of shape"),
        (Preview("sound", "x"), "is of kind 'sound'; previews are of kind 'image'"),
    ],
)
def test_previews_that_cannot_be_shown(
    digits: Exhibit, tmp_path: Path, preview: Preview, message: str
) -> None:
    exhibit = Exhibit(digits.run, digits.model, digits.inputs(1), [Query("q", None, preview)])
    with pytest.raises(ReadingError, match=re.escape(message)):
        write_report(exhibit, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_run_without_rows_has_nothing_to_report(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(RecordingWarning, match="saw no step"),
        dualform.record(model, optimizer, tmp_path / "run"),
    ):
        pass
    exhibit = Exhibit(dualform.open(tmp_path / "run"))
    with pytest.raises(ReadingError, match="no step of this run is committed yet"):
        write_report(exhibit, tmp_path / "report.html")
    with pytest.raises(ReadingError, match="none were given"):
        Explorer(exhibit).view("answer", {"query": "0"})


def test_a_folder_is_no_file(digits: Exhibit, tmp_path: Path) -> None:
    with pytest.raises(ReadingError, match="is a folder; give a file, such as"):
        write_report(digits, tmp_path)


def test_a_front_end_that_was_not_built_is_said(
    digits: Exhibit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualform.explore.page.files", lambda package: tmp_path)
    with pytest.raises(DualformError, match=r"front end is not built .* pip install"):
        write_report(digits, tmp_path / "report.html", ["0"])
