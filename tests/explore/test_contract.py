"""The JSON contract: real answers keep to it, and everything that repeats it is made from it."""

from __future__ import annotations

import ast
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from tests.explore.test_report import carried

import dualform
from dualform.explore import Exhibit, Explorer, contract, report_contract, write_report
from dualform.explore.page import json_text
from dualform.explore.typescript import typescript, written

ROOT = Path(__file__).parents[2]
SOURCE = Path(dualform.__file__).parent


def departures(value: Any, kind: Any, where: str = "") -> Iterator[str]:
    """Where a value, as JSON has it, departs from a type: other types, missing or further keys."""
    origin, parts = get_origin(kind), get_args(kind)
    if hasattr(kind, "__required_keys__"):
        fields = get_type_hints(kind)
        if not isinstance(value, dict):
            yield f"{where}: {value!r} is no {kind.__name__}"
            return
        yield from (f"{where}.{name} is missing" for name in kind.__required_keys__ - set(value))
        yield from (f"{where}.{name} is not in the contract" for name in set(value) - set(fields))
        for name in set(value) & set(fields):
            yield from departures(value[name], fields[name], f"{where}.{name}")
    elif origin in (Union, types.UnionType):
        each = [list(departures(value, part, where)) for part in parts]
        if all(each):
            yield min(each, key=len)[0]
    elif origin is Literal:
        if value not in parts:
            yield f"{where}: {value!r} is none of {parts}"
    elif origin is dict:
        for name, part in value.items():
            yield from departures(name, parts[0], f"{where} key")
            yield from departures(part, parts[1], f"{where}[{name}]")
    elif origin in (list, tuple):
        if not isinstance(value, list) or (origin is tuple and len(value) != len(parts)):
            yield f"{where}: {value!r} is no {kind}"
            return
        for at, part in enumerate(value):
            yield from departures(part, parts[at if origin is tuple else 0], f"{where}[{at}]")
    else:
        expected = (int, float) if kind is float else kind
        if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
            yield f"{where}: {value!r} is no {kind}"


def questions(explorer: Explorer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every view, asked in every way that a page asks it."""
    layers, model = explorer.run.layers, explorer.exhibit.model
    for name in ("run", "books", "suspects", "queries"):
        yield name, {}
    query = "1" if model else "sample:1"
    yield "sample", {"id": "3"}
    asks = [*(("layer", layer) for layer in layers), ("keys", layers[-1])]
    if model:
        yield "layers", {"query": query}
        asks += [("network", ""), ("network", layers[0]), ("removed", "")]
    for ask, layer in asks:
        asked = {"query": query, "ask": ask, "layer": layer}
        yield "answer", asked
        yield "answer", {**asked, "output": "1"}
        yield "evidence", {**asked, "side": "against"}
        yield "acts", {**asked, "id": "2"}
        yield "highlights", {**asked, "id": ["1", "2"]}
        yield "subtract", {**asked, "id": ["1", "2"], "estimate": "1"}
        if ask in ("layer", "network"):
            yield "answer", {**asked, "span": "0-1"}
    yield "answer", {"query": query, "layer": layers[0], "at": "0"}


@pytest.mark.parametrize("name", ["digits", "patches", "words", "speech", "alone"])
def test_every_view_keeps_to_the_contract(name: str, request: pytest.FixtureRequest) -> None:
    run_alone = name == "alone"
    exhibit: Exhibit = request.getfixturevalue("digits" if run_alone else name)
    explorer = Explorer(Exhibit(exhibit.run) if run_alone else exhibit)
    kinds, asked = get_type_hints(contract.Views), set()
    for view, parameters in questions(explorer):
        asked.add(view)
        answer = json.loads(json_text(explorer.view(view, parameters)))
        assert not list(departures(answer, kinds[view], f"{view} {parameters}"))
    elsewhere = {"attention"}  # of transformers: test_attention.py
    assert asked == set(kinds) - elsewhere - ({"layers"} if run_alone else set())


def test_a_report_keeps_to_the_contract(words: Exhibit, tmp_path: Path) -> None:
    content = carried(write_report(words, tmp_path / "report.html", ["0", "sample:3"]))
    assert not list(departures(content, report_contract.ReportData))
    sides = [side for answer in content["answers"].values() for side in answer["sides"].values()]
    assert any("tokens" in card for side in sides for card in side["samples"])


@pytest.mark.parametrize(
    ("change", "departure"),
    [
        ({"rank": "first"}, ".rank: 'first' is no <class 'int'>"),
        ({"rank": True}, ".rank: True is no <class 'int'>"),
        ({"more": 1}, ".more is not in the contract"),
        ({"suspicion": None}, ".suspicion: None is no <class 'float'>"),
        ({"history": [{"bin": 0}]}, ".history[0].error is missing"),
        ({"preview": {"kind": "sound"}}, ".preview"),
    ],
)
def test_departures_are_noticed(digits: Exhibit, change: dict[str, Any], departure: str) -> None:
    page = json.loads(json_text(Explorer(digits).view("sample", {"id": "3"})))
    (found,) = departures({**page, **change}, contract.SampleView)
    assert found.startswith(departure)


def test_the_explorer_has_the_views_of_the_contract(digits: Exhibit) -> None:
    assert set(Explorer(digits)._views) == set(get_type_hints(contract.Views))


def test_what_is_made_from_the_contract_is_up_to_date() -> None:
    for path, text in written(ROOT).items():
        assert path.read_text("utf-8") == text, f"{path} is out of date: run `make format`."


def test_every_parameter_is_documented() -> None:
    """The table in the docs, what is read, and what the views say that they take."""
    source = (SOURCE / "explore/parameters.py").read_text("utf-8")
    read = set(re.findall(r'(?:get|_number)\("(\w+)"', source))
    page = (ROOT / "docs/explorer-api.md").read_text("utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == read
    taken = set(re.findall(r"[?&)](\w+)=", "".join(re.findall(r"GET [^*\n]+", page))))
    assert taken == read


def test_the_front_end_declares_no_answers_of_its_own() -> None:
    declared = re.compile(r"^(?:export )?(?:interface|type) (\w+)", re.MULTILINE)
    names = set(declared.findall(typescript()))
    for path in (ROOT / "frontend/src").rglob("*.ts*"):
        if path.name != "contract.ts":
            assert not names & set(declared.findall(path.read_text("utf-8"))), path


DOOR = {"", ".ask", ".outputs", ".progress", ".removal", ".scores", ".display", ".engine.names"}
"""Of `read`: its results, the door, and words; nothing that reads rows."""


@pytest.mark.parametrize("part", ["explore", "cli"])
def test_runs_are_asked_through_one_door(part: str) -> None:
    for path in (SOURCE / part).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dualform.read"):
                assert (node.module or "").removeprefix("dualform.read") in DOOR, path
