"""Outputs are called by their names wherever the page speaks of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.explore.conftest import WORDS
from tests.explore.visits import serving, visiting

from dualform.explore import Exhibit, Explorer, write_report
from dualform.testing import tiny_run


@pytest.mark.parametrize("carrier", ["server", "report"])
def test_outputs_are_called_by_their_names(
    carrier: str, browser: Browser, speech: Exhibit, tmp_path: Path
) -> None:
    explorer = Explorer(speech)
    page = write_report(speech, tmp_path / "report.html", ["1"]).as_uri()
    answer = explorer.view("answer", {"query": "1"})
    first = answer["outputs"][0]["output"]
    assert answer["asked"] == f"output '{WORDS[first]}' of layer head"
    with (
        serving([explorer]) as address,
        visiting(browser, address if carrier == "server" else page) as visit,
    ):
        visit.go("/query?query=1&tick=3")
        shown = visit.at("outputs").locator(".name")
        expect(shown).to_have_text([WORDS[one["output"]] for one in answer["outputs"]])
        expect(visit.at("check")).to_contain_text(answer["asked"])
        expect(visit.at("layers")).to_contain_text(f"adds to output {WORDS[first]} of the whole")
        expect(visit.at("tray")).to_contain_text(f"output {WORDS[first]} goes from")


def test_outputs_of_a_layer_inside_have_numbers(browser: Browser, speech: Exhibit) -> None:
    answer = Explorer(speech).view("answer", {"query": "1", "layer": "mix"})
    assert answer["asked"] == f"output {answer['output']} of layer mix"
    with serving([Explorer(speech)]) as address, visiting(browser, address) as visit:
        visit.go("/query?query=1&layer=mix")
        numbers = [str(one["output"]) for one in answer["outputs"]]
        expect(visit.at("outputs").locator(".name")).to_have_text(numbers)


def test_a_label_is_found_among_names_and_a_prediction_has_its_name(
    browser: Browser, digits: Exhibit
) -> None:
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    assert digits.model is not None
    own = Exhibit(digits.run, digits.model, digits.inputs(40), names=names)
    with serving([Explorer(own)]) as address, visiting(browser, address) as visit:
        visit.go("/query?query=2")
        assert own.predictions is not None
        expect(visit.at("verdict")).to_contain_text(f"Predicted {names[own.predictions[2]]}.")


def test_an_output_without_a_name_has_its_number() -> None:
    """tests/studies/test_language.py reads names from the file of the queries."""
    run, model, x = tiny_run()
    exhibit = Exhibit(run, model, x[:2], names=["wolf"])
    assert [exhibit.output_name(at, None) for at in range(2)] == ["'wolf'", "1"]
    assert Explorer(exhibit).view("run", {})["names"] == ["wolf"]
