"""Every view's numbers are those of the Python API; parts add up; wrong questions say why."""

from __future__ import annotations

import base64
import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualform.errors import DualformError, ModelMismatchError, ReadingError
from dualform.explore import Exhibit, Explorer, Query
from dualform.explore.encoding import Pixels
from dualform.explore.views import Json
from dualform.read.removal import ACCOUNT, ESTIMATE, LAYER_ACCOUNT


@pytest.fixture(params=["digits", "patches", "words"])
def explorer(request: pytest.FixtureRequest) -> Explorer:
    return Explorer(request.getfixturevalue(request.param))


def every(explorer: Explorer, **asked: str) -> np.ndarray:
    """(samples,): all amounts of an answer, from its two lists."""
    amounts = dict.fromkeys(explorer.run.ids, 0.0)
    for side in ("for", "against"):
        found = explorer.view("evidence", asked | {"side": side, "limit": "500"})
        assert len(found["samples"]) == found["total"]
        amounts |= {line["id"]: line["value"] for line in found["samples"]}
    return np.array(list(amounts.values()))


def summed(answer: Json) -> float:
    return float(sum(side["sum"] for side in answer["sides"].values()))


def test_a_layer_s_answer_is_the_spotlight_s(explorer: Explorer) -> None:
    exhibit, run = explorer.exhibit, explorer.run
    for layer in run.layers:
        answer = explorer.view("answer", {"query": "1", "layer": layer})
        reading = run.spotlight(exhibit.model, exhibit.subject("1").x, answer["output"])[layer]
        place = answer["place"] or 0
        assert answer["places"] == len(reading.names)
        np.testing.assert_allclose(
            every(explorer, query="1", layer=layer), reading.samples().values[:, place], atol=1e-9
        )
        expected = reading.check.lines(place)
        for name, part in answer["check"].items():
            own = expected[name.replace("by_step", "booked by step")]
            assert part == pytest.approx(own, abs=1e-6)
        outputs = reading.queries.outputs
        assert answer["outputs"][0]["value"] == float(outputs[place].max())
        assert place == int(outputs.amax(1).argmax())


def test_the_network_s_answer_is_the_explanation_s(explorer: Explorer) -> None:
    exhibit, run = explorer.exhibit, explorer.run
    answer = explorer.view("answer", {"query": "2", "ask": "network", "output": "1"})
    expected = run.explain(exhibit.model, exhibit.subject("2").x, target=1)
    found = every(explorer, query="2", ask="network", output="1")
    np.testing.assert_allclose(found, expected.values[:, 0], atol=1e-6)
    check = answer["check"]
    assert check["total"] == pytest.approx(expected.total[0])
    assert sum(check.values()) - check["total"] == pytest.approx(check["total"], abs=1e-9)
    assert abs(check["remainder"]) <= 2e-3 * abs(check["total"] - check["initial"])
    assert answer["error"] < 2e-3
    shares = explorer.view("layers", {"query": "2", "output": "1"})
    by_layer = {share["layer"]: share["value"] for share in shares["shares"]}
    by_itself = dict(zip(expected.by_layer.ids, expected.by_layer.values[:, 0], strict=True))
    assert by_layer == pytest.approx(by_itself, abs=1e-6)
    for layer in by_layer:
        through = every(explorer, query="2", ask="network", output="1", layer=layer)
        np.testing.assert_allclose(through, expected.layer(layer).values[:, 0], atol=1e-6)


def test_removal_and_keys_are_the_python_api_s(explorer: Explorer) -> None:
    exhibit, run = explorer.exhibit, explorer.run
    x = exhibit.subject("0").x
    influence = run.influence(exhibit.model, x, target=1).values[:, 0]
    found = every(explorer, query="0", ask="removed", output="1")
    np.testing.assert_allclose(found, influence, atol=1e-6)
    assert explorer.view("answer", {"query": "0", "ask": "removed"})["check"] is None
    keys = run.spotlight(exhibit.model, x).last.keys_only().values[:, 0]
    np.testing.assert_allclose(every(explorer, query="0", ask="keys"), keys, atol=1e-9)


@pytest.mark.parametrize("ask", ["layer", "network"])
def test_parts_of_training_add_up(explorer: Explorer, ask: str) -> None:
    whole = explorer.view("answer", {"query": "1", "ask": ask})
    bins = len(explorer.run.bins)
    assert bins == len(whole["timeline"]) == 3
    parts = [
        explorer.view("answer", {"query": "1", "ask": ask, "span": f"{at}-{at}"})
        for at in range(bins)
    ]
    assert [summed(part) for part in parts] == pytest.approx(whole["timeline"])
    assert sum(whole["timeline"]) == pytest.approx(whole["check"]["evidence"], abs=1e-6)
    assert all(part["check"] is None for part in parts)
    assert all(part["timeline"] == whole["timeline"] for part in parts)


def test_positions_of_the_training_samples_add_up(patches: Exhibit, words: Exhibit) -> None:
    for exhibit, layer, places in ((patches, "0", 36), (words, "mix", 5)):
        explorer = Explorer(exhibit)
        asked = {"query": "1", "layer": layer}
        parts = [every(explorer, **asked, at=str(at)) for at in range(places)]
        np.testing.assert_allclose(sum(parts), every(explorer, **asked), atol=1e-9)
        acts = explorer.view("acts", asked | {"id": "7"})
        np.testing.assert_allclose(acts["places"], [part[7] for part in parts], atol=1e-9)
        assert sum(acts["timeline"]) == pytest.approx(acts["value"])
        spans = [explorer.view("acts", asked | {"id": "7", "span": f"{b}-{b}"}) for b in range(3)]
        assert [sum(part["places"]) for part in spans] == pytest.approx(acts["timeline"])
        assert np.sum([part["places"] for part in spans], 0) == pytest.approx(acts["places"])


def test_texts_are_cut_into_as_many_pieces_as_there_are_rows(words: Exhibit) -> None:
    explorer = Explorer(words)
    answer = explorer.view("answer", {"query": "0", "layer": "mix"})
    assert answer["tokens"] == answer["query"]["title"].split()
    acts = explorer.view("acts", {"query": "0", "layer": "mix", "id": "3"})
    assert acts["tokens"] == acts["preview"]["text"].split()


def test_texts_are_highlighted_where_they_act(words: Exhibit, digits: Exhibit) -> None:
    explorer, asked = Explorer(words), {"query": "0", "layer": "mix"}
    found = explorer.view("highlights", asked | {"id": ["3", "9"]})["samples"]
    assert list(found) == ["3", "9"]
    for name, marked in found.items():
        acts = explorer.view("acts", asked | {"id": name})
        assert marked["tokens"] == acts["tokens"]
        assert marked["places"] == pytest.approx(acts["places"])
    assert explorer.view("highlights", asked | {"ask": "keys", "id": "3"}) == {"samples": {}}
    assert Explorer(digits).view("highlights", {"query": "0", "id": "3"}) == {"samples": {}}


def test_patches_lie_in_a_grid(patches: Exhibit) -> None:
    explorer = Explorer(patches)
    assert [layer["grid"] for layer in explorer.view("run", {})["layers"]] == [(6, 6), None]
    assert explorer.view("acts", {"query": "0", "layer": "0", "id": "3"})["grid"] == (6, 6)


def test_groups_are_sums_by_label(explorer: Explorer) -> None:
    exhibit = explorer.exhibit
    answer = explorer.view("answer", {"query": "3"})
    reading = explorer.run.spotlight(exhibit.model, exhibit.subject("3").x).last
    expected = reading.by("label")
    assert [group["label"] for group in answer["groups"]] == expected.ids
    found = [group["sum"] for group in answer["groups"]]
    np.testing.assert_allclose(found, expected.values[:, 0], atol=1e-9)
    for group in answer["groups"]:
        assert group["for"] + group["against"] == pytest.approx(group["sum"])
        assert group["curve"] == sorted(group["curve"], reverse=True)
    label = max(answer["groups"], key=lambda group: group["sum"])["label"]
    asked = {"query": "3", "side": "for", "label": str(label)}
    assert {line["label"] for line in explorer.view("evidence", asked)["samples"]} == {label}


def test_groups_of_any_column(digits: Exhibit) -> None:
    explorer = Explorer(digits)
    assert explorer.view("run", {})["columns"] == ["label", "parity"]
    groups = explorer.view("answer", {"query": "3", "by": "parity"})["groups"]
    reading = digits.run.spotlight(digits.model, digits.subject("3").x).last
    expected = reading.by(digits.run.samples.columns["parity"])
    assert [group["label"] for group in groups] == expected.ids == ["even", "odd"]
    np.testing.assert_allclose([g["sum"] for g in groups], expected.values[:, 0], atol=1e-9)
    best = max(groups, key=lambda group: group["for"])["label"]
    asked = {"query": "3", "side": "for", "by": "parity", "label": best, "limit": "500"}
    found = {line["label"] % 2 for line in explorer.view("evidence", asked)["samples"]}
    assert found == {best == "odd"}
    with pytest.raises(ReadingError, match="by='color'; there are label, parity"):
        explorer.view("answer", {"query": "3", "by": "color"})


@pytest.mark.parametrize("ask", ["network", "removed"])
def test_without_some_samples_there_is_one_account_and_one_estimate(
    ask: str, explorer: Explorer
) -> None:
    """The headline, its table and Python say the same, whichever question the page shows."""
    exhibit, run = explorer.exhibit, explorer.run
    asked = {"query": "0", "ask": ask, "id": ["3", "5"], "estimate": "1"}
    found = explorer.view("subtract", asked)
    removal = run.without([3, 5], exhibit.model, exhibit.subject("0").x)
    assert found["asked"]["before"] == pytest.approx(removal.before[0], abs=1e-5)
    assert found["asked"]["after"] == pytest.approx(removal.accounted[0], abs=1e-5)
    assert found["asked"]["retrained"] == pytest.approx(removal.predicted[0], abs=1e-5)
    after = {one["output"]: one["value"] for one in found["after"]}
    assert after[found["asked"]["output"]] == found["asked"]["after"]
    amounts = every(explorer, query="0", ask="network")
    change = found["asked"]["before"] - found["asked"]["after"]
    assert change == pytest.approx(amounts[3] + amounts[5])
    assert found["note"] == ACCOUNT
    assert found["asked"]["estimate"] == ESTIMATE


@pytest.mark.parametrize("ask", ["layer", "keys"])
def test_a_layer_without_some_samples(ask: str, explorer: Explorer) -> None:
    """All outputs of the layer, less what they added to it; what it adds up to beforehand."""
    asked = {"query": "0", "ask": ask, "id": ["3", "5"], "estimate": "1"}
    found = explorer.view("subtract", asked)
    answer, amounts = explorer.view("answer", {"query": "0"}), every(explorer, query="0")
    assert found["asked"]["before"] == pytest.approx(answer["check"]["total"], abs=1e-5)
    assert found["asked"]["after"] == pytest.approx(
        found["asked"]["before"] - amounts[3] - amounts[5], abs=1e-5
    )
    for one in found["after"]:
        other = {"query": "0", "output": str(one["output"]), "id": ["3", "5"]}
        alone = explorer.view("subtract", other)["asked"]["after"]
        assert one["value"] == pytest.approx(alone, abs=1e-5)
    assert found["note"] == LAYER_ACCOUNT


def test_no_estimate_of_what_is_no_output_of_the_model(digits: Exhibit) -> None:
    asked = {"query": "0", "layer": "0", "output": "3", "id": "3", "estimate": "1"}
    assert Explorer(digits).view("subtract", asked)["asked"]["retrained"] is None


def test_a_report_says_the_same_of_what_is_without_some_samples() -> None:
    carried = Path("frontend/src/source/report.ts").read_text()
    assert all(f'"{sentence}"' in carried for sentence in (ACCOUNT, LAYER_ACCOUNT, ESTIMATE))


def test_the_shares_of_layers_add_up(explorer: Explorer) -> None:
    found = explorer.view("layers", {"query": "0"})
    parts = [found[name] for name in ("initial", "by_step", "remainder")]
    total = sum(share["value"] for share in found["shares"]) + sum(parts)
    assert total == pytest.approx(found["total"], abs=1e-6)
    assert abs(found["remainder"]) <= 2e-3 * abs(found["total"] - found["initial"])


def test_a_training_sample_needs_no_model(digits: Exhibit) -> None:
    alone = Explorer(Exhibit(digits.run))
    answer = alone.view("answer", {"query": "sample:7", "layer": "0"})
    reading = digits.run.revisit([7])["0"]
    amounts = every(alone, query="sample:7", layer="0")
    np.testing.assert_allclose(amounts, reading.samples().values[:, 0], atol=1e-9)
    without = alone.view("subtract", {"query": "sample:7", "layer": "0", "id": ["1", "2"]})
    after = {o["output"]: o["value"] for o in without["after"]}
    assert after[answer["output"]] == pytest.approx(without["asked"]["after"])
    last = alone.view("subtract", {"query": "sample:7", "layer": "2", "id": ["1", "2"]})
    assert len(last["after"]) == 10  # of the other layer, though the samples are the same
    left = answer["check"]["total"] - amounts[[1, 2]].sum()
    assert left == pytest.approx(after[answer["output"]])
    assert alone.view("queries", {"limit": "2"})["queries"][1]["query"] == "sample:1"
    facts = alone.view("run", {})
    assert [q["ask"] for q in facts["questions"] if not q["available"]] == ["network", "removed"]
    with pytest.raises(ReadingError, match="whole network cannot be asked without the model"):
        alone.view("answer", {"query": "sample:7", "ask": "network"})


def test_a_sample_s_own_page(explorer: Explorer) -> None:
    exhibit, run = explorer.exhibit, explorer.run
    page = explorer.view("sample", {"id": "4"})
    scores = run.spotlight(exhibit.model, exhibit.inputs(len(exhibit))).last.samples().values[4]
    assert page["of"] == len(exhibit)
    found = {int(e["query"]["query"]): e["value"] for e in page["helps"] + page["hurts"]}
    assert found == pytest.approx({query: scores[query] for query in found}, abs=1e-9)
    best = {int(page[side][0]["query"]["query"]) for side in ("helps", "hurts") if page[side]}
    assert best <= {int(scores.argmax()), int(scores.argmin())}
    assert page["visits"] == len(page["history"]) == 3
    suspicion = run.suspicion().values[:, 0]
    assert page["suspicion"] == suspicion[4]
    assert page["rank"] == 1 + int((suspicion > suspicion[4]).sum())


def test_suspects_and_their_table(digits: Exhibit) -> None:
    explorer = Explorer(digits)
    ranking = digits.run.suspicion().top(60)
    found = explorer.view("suspects", {"offset": "10", "limit": "50"})
    assert [line["id"] for line in found["samples"]] == ranking.ids[10:]
    table = list(csv.reader(io.StringIO(explorer.suspects_csv())))
    assert table[0] == ["id", "label", "suspicion"]
    assert [row[0] for row in table[1:61]] == [str(name) for name in ranking.ids]
    assert float(table[1][2]) == ranking.rows[0].value


def test_a_drawn_picture_is_the_query_of_the_same_pixels(digits: Exhibit, patches: Exhibit) -> None:
    for exhibit in (digits, patches):
        explorer = Explorer(exhibit)
        shown = exhibit.subject("0").query.preview
        assert shown is not None
        sent = base64.urlsafe_b64encode(bytes(shown.data.flatten().tolist())).decode().rstrip("=")
        drawn = explorer.view("answer", {"query": f"image:{sent}"})
        given = explorer.view("answer", {"query": "0"})
        assert drawn["query"]["predicted"] == given["query"]["predicted"]
        assert drawn["check"]["total"] == pytest.approx(given["check"]["total"], abs=0.05)


def test_typed_words_are_the_query_of_the_same_words(words: Exhibit) -> None:
    explorer = Explorer(words)
    text = words.subject("2").query.title
    typed = explorer.view("answer", {"query": f"text:{text}", "ask": "network"})
    given = explorer.view("answer", {"query": "2", "ask": "network"})
    assert typed["check"] == pytest.approx(given["check"])
    assert typed["query"]["title"] == "your text"


def test_inputs_are_found_to_be_scaled_pixels() -> None:
    pixels = torch.randint(0, 256, (5, 4, 4, 3), dtype=torch.uint8)
    x = (pixels.movedim(-1, 1).float() / 255 - 0.45) / 0.22
    found = Pixels.fitted(x, list(pixels))
    assert found is not None
    assert found.shown(x[1]).equal(pixels[1])
    assert Pixels.fitted(x**2, list(pixels)) is None


def test_wrong_queries_only(digits: Exhibit) -> None:
    explorer = Explorer(digits)
    found = explorer.view("queries", {"wrong": "1", "limit": "100"})
    assert digits.model is not None
    with torch.no_grad():
        predicted = digits.model(digits.inputs(len(digits))).argmax(1).tolist()
    labels = [card["label"] for card in explorer.view("queries", {})["queries"]]
    expected = [str(at) for at, label in enumerate(labels) if predicted[at] != label]
    assert [card["query"] for card in found["queries"]] == expected
    assert explorer.view("queries", {"search": "DIGIT 17"})["total"] == 1


@pytest.mark.parametrize(
    ("view", "asked", "message"),
    [
        ("answer", {}, "'query' is missing; give query=…"),
        ("answer", {"query": "40"}, "query '40' does not exist; there are queries 0 to 39."),
        ("answer", {"query": "-1"}, "query '-1' does not exist; there are queries 0 to 39."),
        ("answer", {"query": "0", "ask": "why"}, "ask='why': there are 'layer', 'network'"),
        ("answer", {"query": "0", "layer": "9"}, "layer '9' is not in this run; it recorded '0'"),
        ("answer", {"query": "0", "output": "10"}, "give a unit from 0 to 9"),
        ("answer", {"query": "0", "output": "x"}, "output='x'; expected a number, 0 or more."),
        (
            "answer",
            {"query": "0", "ask": "network", "output": "10"},
            "output=10: this query has outputs 0 to 9.",
        ),
        ("answer", {"query": "0", "place": "1"}, "place=1: this query has places 0 to 0."),
        ("answer", {"query": "0", "span": "2-1"}, "expected FIRST-LAST, there are bins 0 to 2."),
        ("answer", {"query": "0", "span": "0-3"}, "expected FIRST-LAST, there are bins 0 to 2."),
        (
            "answer",
            {"query": "0", "ask": "removed", "span": "0-1"},
            "there are no bins for this question.",
        ),
        ("answer", {"query": "sample:999"}, "sample 999 is not in this run; it has 120 samples"),
        (
            "answer",
            {"query": "sample:3", "ask": "network"},
            "ask about a layer, or give the sample",
        ),
        ("answer", {"query": "image:AAAA"}, "the image is 3 bytes; expected base64url of 64 bytes"),
        (
            "answer",
            {"query": "image:%%%%"},
            "expected base64url of 64 bytes, 8 × 8, 0 to 255 each.",
        ),
        ("answer", {"query": f"image:{'A' * 1000}"}, "the image is too long; expected base64url"),
        (
            "answer",
            {"query": "audio:x"},
            "query 'audio:x': give the number of a query, 'sample:ID'",
        ),
        ("answer", {"query": "text: "}, "the text has 1 characters; expected 1 to 20,000."),
        ("evidence", {"query": "0", "side": "both"}, "side='both'; there are for, against."),
        ("acts", {"query": "0", "id": "many"}, "sample 'many' is not in this run"),
        ("subtract", {"query": "0"}, "0 values of 'id'; give 1 to 10,000."),
        ("nothing", {}, "there is no view 'nothing'; there are acts, answer, attention, books"),
    ],
)
def test_wrong_questions_say_what_is_expected(
    digits: Exhibit, view: str, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(DualformError) as error:
        Explorer(digits).view(view, asked)
    assert message in str(error.value)


def test_wrong_exhibits_say_what_is_expected(digits: Exhibit) -> None:
    x = digits.inputs(3)
    with pytest.raises(ReadingError, match="queries need the model"):
        Exhibit(digits.run, x=x)
    with pytest.raises(ModelMismatchError, match=r"the model's '0\.weight' differs from the run's"):
        Exhibit(digits.run, nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)), x)
    with pytest.raises(ReadingError, match="got 2 queries, but x has 3; give one Query each"):
        Exhibit(digits.run, digits.model, x, [Query("one"), Query("two")])
