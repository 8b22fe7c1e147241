"""The door: plain questions, plain answers; with and without details the same numbers."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from torch import Tensor, nn

from dualform.cli import cli
from dualform.errors import ReadingError
from dualform.explore import Exhibit, Explorer
from dualform.read import Run
from dualform.read.ask import Ask, Question, ask
from dualform.testing import tiny_run


@pytest.fixture(scope="module")
def tiny() -> tuple[Run, nn.Module, Tensor]:
    return tiny_run()


def test_a_question_is_plain_data() -> None:
    question = Question("network", "2", (1, 2), damping=0.5)
    assert pickle.loads(pickle.dumps(question)) == question
    assert {question: 1}[Question("network", "2", (1, 2), damping=0.5)] == 1


def test_answers_are_the_python_api_s(tiny: tuple[Run, nn.Module, Tensor]) -> None:
    run, model, x = tiny
    expected = {
        Question("layer", "0", 2): run.spotlight(model, x[:2], 2)["0"].samples(),
        Question("keys", "0"): run.spotlight(model, x[:2])["0"].keys_only(),
        Question("network", output=1): run.explain(model, x[:2], 1),
        Question("network", output=(1, 0)): run.explain(model, x[:2], [1, 0]),
        Question("removed", output=1, damping=2.0): run.influence(model, x[:2], 1, damping=2.0),
    }
    for question, scores in expected.items():
        found = ask(run, question, model, x[:2]).scores
        np.testing.assert_array_equal(found.values, scores.values)
        assert (found.queries, found.ids) == (scores.queries, scores.ids)
    revisited = ask(run, Question("layer", samples=(3, 5))).scores
    np.testing.assert_array_equal(revisited.values, run.revisit([3, 5]).last.samples().values)


@pytest.mark.parametrize("kind", ["layer", "keys", "network", "removed"])
def test_details_change_no_number(tiny: tuple[Run, nn.Module, Tensor], kind: Ask) -> None:
    run, model, x = tiny
    plain = ask(run, Question(kind, output=1), model, x[:1])
    detailed = ask(run, Question(kind, output=1, detailed=True), model, x[:1])
    np.testing.assert_allclose(detailed.scores.values, plain.scores.values, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(detailed.cells.sum(1), plain.scores.values[:, 0], atol=1e-9)
    assert detailed.output == 1
    output = model(x[:1]).detach().double().numpy()[0]
    np.testing.assert_allclose(detailed.outputs, output, atol=1e-6)
    if plain.scores.check is not None:
        assert detailed.scores.check is not None
        for part, own in vars(plain.scores.check).items():
            np.testing.assert_allclose(vars(detailed.scores.check)[part], own, atol=1e-6)


def test_the_command_line_and_the_page_give_one_answer(
    tiny: tuple[Run, nn.Module, Tensor],
) -> None:
    run, _, _ = tiny
    asked = ["top", str(run.path), "--sample", "3", "--layer", "0", "--output", "1", "--json"]
    printed = json.loads(CliRunner().invoke(cli, [*asked, "-k", "8"]).stdout)
    page = Explorer(Exhibit(run)).view("answer", {"query": "sample:3", "layer": "0", "output": "1"})
    own = {row["id"]: row["value"] for row in printed["for"]}
    cards = [card for side in page["sides"].values() for card in side["samples"]]
    assert {card["id"]: card["value"] for card in cards} == pytest.approx(own, abs=1e-9)
    check = {
        name.replace("booked by step", "by_step"): v for name, v in printed["check"][0].items()
    }
    assert page["check"] == pytest.approx(check, abs=1e-9)


@pytest.mark.parametrize(
    ("asked", "given", "message"),
    [
        ({"ask": "everything"}, True, "there are 'layer', 'network', 'removed', 'keys' to ask"),
        ({"ask": "network"}, False, "the whole network cannot be asked without the model"),
        ({"ask": "removed", "samples": (1,)}, True, "known by what its layers last saw"),
        ({"ask": "layer"}, False, "training samples, or a model and its input x"),
        ({"layer": "9"}, True, "layer '9' is not in this run; it recorded '0', '2'"),
        ({"detailed": True, "place": 4}, True, "place=4: this query has places 0 to 0"),
        ({"ask": "network", "detailed": True, "output": 9}, True, "output=9: this query has"),
    ],
)
def test_wrong_questions_are_refused(
    tiny: tuple[Run, nn.Module, Tensor], asked: dict[str, Any], given: bool, message: str
) -> None:
    run, model, x = tiny
    with pytest.raises(ReadingError, match=message):
        ask(run, Question(**asked), *((model, x[:1]) if given else ()))
