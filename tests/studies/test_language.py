"""The study of language models on tiny texts that the test writes itself, against plain loops."""

from __future__ import annotations

import gzip
import json
import random
import re
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.studies.explored import opened
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualform
from dualform.cli import cli
from dualform.cli.options import make_exhibit
from dualform.errors import ReadingError
from dualform.studies.language import SETTINGS, LanguageSetting, LanguageTask, run_study
from dualform.studies.language.asking import (
    foretold_logit,
    last_readings,
    network_questions,
    sensitivities,
)
from dualform.studies.language.evidence import PlaceEvidence, RowEvidence, Updates
from dualform.studies.language.explored import build_model
from dualform.studies.language.matches import TrainingPlaces, itself
from dualform.studies.language.measure import SUMMARIES, LanguageMeasurement
from dualform.studies.language.models import RecurrentLanguageModel
from dualform.studies.language.prompts import Prompts, draw_prompts
from dualform.studies.language.tasks import LanguageData, load_task
from dualform.studies.language.training import train_language_model, window_loss
from dualform.studies.report import NumberTable, Passage, Report, read_tables
from dualform.studies.texts import (
    FABLES,
    LINE_END,
    Corpus,
    Windows,
    characters,
    load_fables,
    load_shakespeare,
    load_wikitext,
)

LSTM = LanguageTask(
    "fables", 6, 4, unroll=8, batch=3, steps=18, rate=0.05, tokens=200, checkpoint=2
)
WORDS = LanguageTask(
    "wikitext", 5, dropout=0.2, unroll=6, batch=3, steps=16, rate=0.05, words=12, tokens=120
)
BLOCKS = LanguageTask(
    "shakespeare", 8, blocks=1, heads=2, unroll=8, batch=3, steps=16, rate=0.02, tokens=200
)
TINY = LanguageSetting(
    {"fables": LSTM, "wikitext": WORDS, "shakespeare": BLOCKS},
    prompts=4,
    explained=2,
    context=6,
    again=("fables",),
    zoomed=3,
    seeds=2,
)
LOOK = "dualform.studies.language.explored:small"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    (folder / "text").mkdir()
    names, verbs = ("the wolf", "a lamb", "the fox"), ("saw", "met", "ate")
    told = " ".join(
        f"{draw.choice(names)} {draw.choice(verbs)} {draw.choice(names)}.\n" for _ in range(7000)
    )
    (folder / "text" / "aesop.txt").write_text("x" * FABLES.start + told, encoding="utf-8")
    (folder / "text" / "tinyshakespeare.txt").write_text(told[:900], encoding="utf-8")
    for part, lines in (("train", told[:4000]), ("test", told[4000:6000])):
        packed = gzip.compress(lines.replace(".", " .").encode())
        (folder / "text" / f"wikitext2.{part}.tokens.gz").write_bytes(packed)
    return folder


@pytest.fixture(scope="module")
def small(data: Path) -> LanguageData:
    return load_task(data, LSTM, TINY.context)


def study(data: Path, out: Path, setting: LanguageSetting = TINY, seeds: int = 2) -> Report:
    return run_study(data, setting, seeds, "cpu", out, LOOK)


def recorded(
    small: LanguageData, task: LanguageTask, path: Path, keep: Any = "rows"
) -> tuple[dualform.Run, nn.Module, Prompts]:
    model = train_language_model(small, task, 0, path, keep, "cpu")
    prompts = draw_prompts(model, small, task, 3, TINY.context, 0, "cpu")
    return dualform.open(path), model, prompts


def seen(small: LanguageData, task: LanguageTask) -> list[Tensor]:
    return [ids for ids, _ in islice(task.batches(small.windows, 0), task.steps)]


class PlainRow(NamedTuple):
    """What one step made of one place, at the output layer."""

    key: Tensor
    error: Tensor
    """With the factor of clipping."""


def plain_training(
    small: LanguageData, task: LanguageTask
) -> tuple[RecurrentLanguageModel, dict[tuple[int, int], PlainRow]]:
    """The same training once more, and what the output layer got, by step and place."""
    torch.manual_seed(0)
    model, rows, state = task.make_model(small.words), dict[tuple[int, int], PlainRow](), None
    optimizer = torch.optim.Adam(model.parameters(), lr=task.rate, weight_decay=task.decay)
    assert isinstance(model, RecurrentLanguageModel)
    for step, (ids, begins) in enumerate(islice(task.batches(small.windows, 0), task.steps), 1):
        x, y = small.windows.inputs(ids), small.windows.targets(ids)
        first = model.rested(len(ids)) if begins else state
        hidden, after = model.lstm(model.adapt(model.embed(x)), first)
        logits = model.head(hidden)
        logits.retain_grad()
        cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        size = float(nn.utils.clip_grad_norm_(model.parameters(), task.clip))
        errors = logits.grad * min(1.0, task.clip / (size + 1e-6))
        for at, window in enumerate(ids.tolist()):
            for place in range(task.unroll):
                row = PlainRow(hidden[at, place].detach().double(), errors[at, place].double())
                rows[step, window * task.unroll + place] = row
        optimizer.step()
        optimizer.zero_grad()
        state = tuple(part.detach() for part in after)
    return model, rows


def plain_contributions(
    rows: dict[tuple[int, int], PlainRow], task: LanguageTask, asked: Tensor, token: int
) -> list[float]:
    """What Adam made of each row, for one output: a plain loop over all later steps."""
    wide = {name: torch.cat([row.key, torch.ones(1)]) for name, row in rows.items()}
    of_token = {name: row.error[token] * wide[name] for name, row in rows.items()}
    steps = range(1, task.steps + 1)
    second, divisors = torch.zeros(len(asked) + 1, dtype=torch.float64), {}
    for step in steps:
        gradient = sum(part for (when, _), part in of_token.items() if when == step)
        second = 0.999 * second + 0.001 * gradient**2
        divisors[step] = (second / (1 - 0.999**step)).sqrt() + 1e-8
    counts = {
        step: -sum(
            task.rate * 0.1 * 0.9 ** (later - step) / (1 - 0.9**later) / divisors[later]
            for later in range(step, task.steps + 1)
        )
        for step in steps
    }
    query = torch.cat([asked, torch.ones(1)])
    return [float((counts[step] * part * query).sum()) for (step, _), part in of_token.items()]


def test_evidence_is_that_of_plain_loops(small: LanguageData, tmp_path: Path) -> None:
    run, model, prompts = recorded(small, LSTM, tmp_path / "run")
    other, plain = plain_training(small, LSTM)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
    reading = last_readings(run, model, prompts)["head"]
    rows = RowEvidence(run, seen(small, LSTM), LSTM.unroll, len(small.train))
    keys, exact = rows.keys(reading), rows.exact(reading)
    names = zip(exact.updates.steps.tolist(), exact.updates.places.tolist(), strict=True)
    assert [*names] == [*plain]
    asked = other.lstm(other.adapt(other.embed(prompts.x)))[0][:, -1].detach().double()
    similar = torch.stack([(asked @ row.key).abs() for row in plain.values()])
    np.testing.assert_allclose(keys.values, similar.numpy(), atol=1e-5)
    for at, token in enumerate(prompts.foretold.tolist()):
        expected = plain_contributions(plain, LSTM, asked[at], token)
        np.testing.assert_allclose(exact.values[:, at], expected, atol=1e-5)
        assert np.abs(expected).max() > 1e-2
    summed = np.zeros_like(exact.sums)
    for place, line in zip(exact.updates.places, exact.values, strict=True):
        summed[place] += line
    np.testing.assert_allclose(exact.sums, summed)


@pytest.mark.parametrize("task", [LSTM, BLOCKS], ids=["lstm", "transformer"])
def test_all_updates_add_up_to_what_layers_and_the_network_say(
    data: Path, task: LanguageTask, tmp_path: Path
) -> None:
    text = load_task(data, task, TINY.context)
    run, model, prompts = recorded(text, task, tmp_path / "run")
    rows = RowEvidence(run, seen(text, task), task.unroll, len(text.train))
    logits = foretold_logit(model(prompts.x), prompts.foretold).detach().numpy()
    readings = last_readings(run, model, prompts)
    for name, reading in readings.items():
        evidence = rows.exact(reading)
        np.testing.assert_allclose(
            evidence.values.sum(0), reading.samples().values.sum(0), atol=1e-5
        )
        by_window = evidence.sums[: len(text.windows) * task.unroll].reshape(-1, task.unroll, 6)
        ids = [int(sample) for sample in run.source.ids]
        np.testing.assert_allclose(by_window.sum(1)[ids], reading.samples().values, atol=1e-5)
        parts = reading.check.initial + evidence.sums.sum(0) + reading.check.remainder
        np.testing.assert_allclose(parts, reading.check.total, atol=1e-5)
        if name == "head":
            np.testing.assert_allclose(reading.check.total, logits, atol=1e-5)
    evidence, books = rows.network(network_questions(run, model, prompts))
    before = task.make_model(text.words)
    before.load_state_dict(run.at(0).state_dict())
    first = foretold_logit(before.eval()(prompts.x), prompts.foretold).detach().numpy()
    np.testing.assert_allclose(evidence.values.sum(0), logits - first, rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(sum(books.values()), evidence.values.sum(0), atol=1e-6)


def test_layers_are_asked_along_the_gradient(small: LanguageData, tmp_path: Path) -> None:
    """What moves the gates of an LSTM's last token by a little moves the logit as foretold."""
    run, model, prompts = recorded(small, LSTM, tmp_path / "run")
    along = sensitivities(run, model, prompts)
    assert [*along] == ["adapt", "lstm.ih_l0", "lstm.hh_l0", "head"]
    for at, token in enumerate(prompts.foretold.tolist()):
        assert along["head"][at].tolist() == [float(unit == token) for unit in range(small.words)]
    torch.testing.assert_close(along["lstm.ih_l0"], along["lstm.hh_l0"])
    assert isinstance(model, RecurrentLanguageModel)
    embedded = model.adapt(model.embed(prompts.x)).detach().requires_grad_()
    logits = model.head(model.lstm(embedded)[0])
    foretold_logit(logits, prompts.foretold).sum().backward()
    assert embedded.grad is not None
    torch.testing.assert_close(along["adapt"].float(), embedded.grad[:, -1])
    W = model.lstm.weight_ih_l0.detach()
    torch.testing.assert_close((along["lstm.ih_l0"].float() @ W), embedded.grad[:, -1])


def test_zoom_finds_the_rows_of_training(small: LanguageData, tmp_path: Path) -> None:
    """At weights that were kept, a window after the first of its line agrees with its summary."""
    task = replace(LSTM, checkpoint=1)
    run, model, _ = recorded(small, task, tmp_path / "run", SUMMARIES)
    loss = window_loss(small, task, "cpu")
    last = seen(small, task)[-1].tolist()
    zoom = run.zoom([last[0]], model, loss, steps=[task.steps])
    assert zoom.agreement > 0.98
    fresh = next(ids for ids, begins in task.batches(small.windows, 0) if begins).tolist()
    assert run.zoom([fresh[1]], model, loss, steps=[1]).agreement > 0.9999  # nothing was carried
    assert run.audit().remainder < 1e-5


def test_batches_carry_on_where_they_were(small: LanguageData) -> None:
    each = len(small.windows) // LSTM.batch
    steps = [*islice(LSTM.batches(small.windows, 0), each + 1)]
    for (ids, _), (after, begins) in pairwise(steps[:each]):
        assert (after - ids == 1).all()
        assert not begins
        targets = small.windows.targets(ids)[:, -1]
        assert torch.equal(targets, small.windows.inputs(after)[:, 0])
    assert steps[each][1]
    assert torch.equal(steps[each][0], steps[0][0])
    for task in (replace(LSTM, batch=5), replace(BLOCKS, batch=5)):  # four windows are left over
        for first in (0, 4):
            epoch = [ids for ids, _ in islice(task.batches(small.windows, 0), first, first + 4)]
            assert sorted(torch.cat(epoch).tolist()) == [*range(20)]


def test_matches_are_those_of_a_plain_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 3, (60,), generator=draw)
    prompts = Prompts(
        torch.stack([tokens[10:15], torch.randint(0, 3, (5,), generator=draw)]),
        torch.tensor([1, 2]),
        torch.tensor([1, 0]),
        torch.tensor([14, -1]),
    )
    places = TrainingPlaces(tokens, 50, prompts)
    values = torch.randn(60, 2, generator=draw).numpy().astype(float)
    evidence = PlaceEvidence(values, Updates(np.arange(60), np.ones(60, dtype=int), 60))
    for prompt in range(2):
        x, shared = prompts.x[prompt].tolist(), []
        for at in range(50):
            length = 0
            while length < min(5, at + 1) and int(tokens[at - length]) == x[-1 - length]:
                length += 1
            shared.append(length)
        assert places.shared(prompt).tolist() == shared
        order = sorted(range(50), key=lambda at: -values[at, prompt])
        best = [at for at in order if at != int(prompts.places[prompt])][:10]
        assert places.first(evidence.sums[:, prompt], prompt) == best
        found = places.found(best, prompt)
        assert found["shared"] == pytest.approx(np.mean([shared[at] for at in best]))
        following = [int(tokens[at + 1]) == int(prompts.foretold[prompt]) for at in best]
        assert found["same next"] == pytest.approx(np.mean(following))
    assert places.shared(0)[14] == 5  # a training prompt shares all of itself
    rank = sorted(values[:50, 0], reverse=True).index(values[14, 0])
    assert itself(evidence, places, [0])["among the first"] == float(rank < 10)


@pytest.fixture(scope="module")
def report(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("study")
    found = study(data, out)
    found.save(out)
    return found, out


def titled(report: Report, title: str) -> NumberTable:
    return next(table for table in report.tables if table.title.startswith(title))


def test_the_study_answers_its_questions(report: tuple[Report, Path]) -> None:
    found, out = report
    read = read_tables(out / "study.json")
    assert [table.markdown() for table in read] == [table.markdown() for table in found.tables]
    for picture in found.pictures:
        assert (out / picture.file).stat().st_size > 5000, picture.file
    for name in TINY.tasks:
        rows = titled(found, f"{name}: the first ten training positions").rows
        assert rows[-1][1] == 100.0
        assert all(0 <= row[1].mean <= 100 for row in rows[:-1])
    for row in titled(found, "what the logit").rows:
        before, same, others, by_step, rest, logit = (cell.mean for cell in row[2:])
        assert before + same + others + by_step + rest == pytest.approx(logit, abs=1e-9)
        assert abs(rest) < 1e-2
    books = titled(found, "do the books balance?")
    assert [row[0] for row in books.rows] == [*TINY.tasks, "fables, summaries"]
    assert all(row[2] == "yes" and row[3] == 100 for row in books.rows)
    assert all(sentence.endswith(".") for sentence in found.findings)


def test_prompts_are_printed_with_the_positions_that_count(
    report: tuple[Report, Path], small: LanguageData
) -> None:
    found, _ = report
    table = titled(found, "fables, training prompt 3")
    prompt, *rows = table.rows
    text = small.train.written(small.train.tokens)
    assert isinstance(prompt[3], Passage)
    assert prompt[3].before in text
    for _, _, value, passage in rows:
        assert isinstance(passage, Passage)
        assert passage.before + passage.marked + passage.after in text
        assert value > 0
    assert f"⟦{rows[0][3].marked}⟧".replace("\n", "⏎") in repr(found)
    assert {"keys only, output layer, one update", "exact, whole network, repeats added up"} <= {
        row[0] for row in rows
    }


def test_runs_stay_for_the_explorer(
    data: Path, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, out = report
    assert not [*out.glob("scratch*")]
    assert found.look[0] == (
        f"DUALFORM_DATA={data} dualform view {out / 'fables'} --model {LOOK}_fables "
        f"--input {out / 'fables.npz'}"
    )
    monkeypatch.setitem(SETTINGS, "small", TINY)
    for look, model in zip(found.look, TINY.tasks, strict=True):
        explorer, asked = opened(look, monkeypatch), np.load(out / f"{model}.npz")
        queries = explorer.view("queries", {})["queries"]
        for card, text in zip(queries, asked["texts"].tolist(), strict=True):
            assert card["preview"]["text"].split() == text.split()
        sides = explorer.view("answer", {"query": "0"})["sides"]
        windows = load_task(data, TINY.tasks[model], TINY.context)
        for card in (*sides["for"]["samples"], *sides["against"]["samples"]):
            (window,) = windows.windows.inputs([int(card["id"])])
            assert card["preview"]["text"].split() == windows.train.written(window).split()
    explorer = opened(found.look[0], monkeypatch)
    run, text = explorer.run, str(np.load(out / "fables.npz")["texts"][0])
    answer = explorer.view("answer", {"query": "0", "ask": "layer", "layer": "head"})
    assert answer["tokens"] == list(text)
    assert answer["query"]["title"].startswith("test prompt 0, foretells '")
    assert answer["asked"].startswith("output '")
    names = explorer.view("run", {})["names"]
    assert names[:2] == ["⏎", "␣"]
    best = str(answer["sides"]["for"]["samples"][0]["id"])
    asked = {"query": "0", "ask": "layer", "layer": "head", "id": best}
    shown = explorer.view("highlights", asked)["samples"][best]
    preview = run.samples.preview(int(best))
    assert preview is not None
    assert "".join(shown["tokens"]) == preview.data
    assert len(shown["places"]) == LSTM.unroll
    preview = dualform.open(out / "wikitext").samples.preview(1)
    assert preview is not None
    assert len(preview.data.split()) == WORDS.unroll


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_study_goes_on(
    data: Path, tmp_path: Path, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, made = LanguageMeasurement.measure, list[str]()

    def fails(self: LanguageMeasurement, seed: int) -> dict[str, Any]:
        if len(made) == 2:
            made.append("failed")
            raise KeyboardInterrupt
        made.append(f"{self.name} {seed}")
        return whole(self, seed)

    monkeypatch.setattr(LanguageMeasurement, "measure", fails)
    only = replace(TINY, tasks={"fables": LSTM, "shakespeare": BLOCKS}, again=())
    with pytest.raises(KeyboardInterrupt):
        study(data, tmp_path, only)
    again = study(data, tmp_path, only)
    assert made == ["fables 0", "fables 1", "failed", "shakespeare 0", "shakespeare 1"]
    for title in ("fables: the first ten updates", "shakespeare: the first ten updates"):
        assert titled(again, title).rows == titled(report[0], title).rows


def test_summaries_answer_as_far_as_visits_are_run_again(data: Path, tmp_path: Path) -> None:
    """As at the paper's size: no row is kept."""
    keep = dualform.summaries(2, 3, numbers="rows")
    task = replace(LSTM, keep=keep, checkpoint=1, steps=12)
    found = study(data, tmp_path, replace(TINY, tasks={"fables": task}, again=()), seeds=1)
    rows = titled(found, "fables: the first ten training positions").rows
    assert [row[0] for row in rows[:-2]] == ["exact, whole network"]
    assert 0 < titled(found, "the models").rows[0][6].mean < 100
    assert titled(found, "do the books balance?").rows[0][2] == "yes"


def test_the_papers_setting_makes_a_step(data: Path, tmp_path: Path) -> None:
    paper = SETTINGS["paper"]
    assert {name: (task.units, task.steps) for name, task in paper.tasks.items()} == {
        "fables": (1024, 5000),
        "wikitext": (200, 10_000),
        "shakespeare": (128, 5000),
    }
    for name, task in paper.tasks.items():
        cut = replace(task, steps=1, batch=2, unroll=10)
        text = load_task(data, cut, context=5)
        train_language_model(text, cut, 0, tmp_path / name, task.keep, "cpu")
        audit = dualform.open(tmp_path / name).audit()
        assert audit.coverage == 1.0, name
        assert audit.remainder < 1e-4, name  # Adam's first step magnifies rounding


@pytest.mark.usefixtures("undrawn")
def test_from_the_shell(
    data: Path, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "small", TINY)  # whose parts are kept there
    given = ["study", "language", "--data", str(data), "--out", str(report[1])]
    result = CliRunner().invoke(cli, [*given, "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["name"] == "language"
    assert found["settings"]["fables"]["units"] == 6
    assert json.loads((report[1] / "study.json").read_text()) == found
    assert "fables: the first ten training positions" in CliRunner().invoke(cli, given).stdout


@pytest.mark.usefixtures("undrawn")
def test_one_model_alone(
    data: Path, tmp_path: Path, report: tuple[Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part is that of the study of all models, and it needs no other text."""
    monkeypatch.setitem(SETTINGS, "small", TINY)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/tinyshakespeare.txt").symlink_to(data / "text/tinyshakespeare.txt")
    out = tmp_path / "out"
    given = ["study", "language", "--data", str(tmp_path), "--out", str(out), "--seeds", "1"]
    CliRunner().invoke(cli, [*given, "--only", "shakespeare"], catch_exceptions=False)
    found = json.loads((out / "study.json").read_text())
    assert "shakespeare" in found["settings"]
    assert "fables" not in found["settings"]
    assert len(found["look"]) == 1
    part = "parts/shakespeare-seed-0.json"
    kept, whole = (json.loads((folder / part).read_text()) for folder in (out, report[1]))
    assert kept["quality"] == whole["quality"]


def test_texts_are_read(data: Path) -> None:
    train, test = load_fables(data)
    assert len(train) + len(test) == FABLES.stop - FABLES.start
    assert train.vocabulary == test.vocabulary
    assert "x" in train.vocabulary  # of the fox
    assert train.written(train.tokens[:4]) in ("the ", "a la")
    train, test = load_shakespeare(data)
    assert (len(train), len(test)) == (810, 90)
    train, test = load_wikitext(data)
    assert LINE_END in train.vocabulary
    fewer, _ = load_wikitext(data, most=4)
    assert len(fewer.vocabulary) == 4
    assert len(fewer) == len(train)
    assert set(fewer.vocabulary) < {*train.vocabulary, "<unk>"}
    same = [a for a in fewer.tokens.tolist() if a == 0]
    assert 0 < len(same) < len(fewer)


def test_windows_and_what_follows() -> None:
    windows = Windows(torch.arange(10), 3)
    assert len(windows) == 3
    assert windows.inputs([0, 2]).tolist() == [[0, 1, 2], [6, 7, 8]]
    assert windows.targets([2]).tolist() == [[7, 8, 9]]
    assert len(Windows(torch.arange(9), 3)) == 2  # the last token has nothing after it


def test_texts_that_are_too_short_are_refused(data: Path, tmp_path: Path) -> None:
    many = replace(LSTM, batch=64)
    with pytest.raises(
        ReadingError, match=r"200 tokens to train on, which are 24 windows of 8 and"
    ):
        load_task(data, many, 6)
    with pytest.raises(ReadingError, match="the test part of 'shakespeare' has 90 tokens, and pro"):
        load_task(data, BLOCKS, 50)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "aesop.txt").write_text("ONE day a Wolf", encoding="utf-8")
    with pytest.raises(
        ReadingError, match=r"has 14 characters, and the fables are those from 16,5"
    ):
        load_fables(tmp_path)
    (tmp_path / "text" / "wikitext2.train.tokens").write_text("", encoding="utf-8")
    with pytest.raises(ReadingError, match=r"train\.tokens' has no words"):
        load_wikitext(tmp_path)
    with pytest.raises(ReadingError, match=r"has neither tinyshakespeare\.txt nor tinyshakespeare"):
        load_shakespeare(tmp_path)


def test_unknown_words_are_not_foretold(small: LanguageData) -> None:
    model = LSTM.make_model(small.words)
    nn.init.zeros_(model.get_parameter("head.weight"))
    with torch.no_grad():
        model.get_parameter("head.bias").copy_(torch.arange(small.words).flip(0))
    words = Corpus(small.train.tokens, ("<unk>", *small.train.vocabulary[1:]))
    for corpus, best in ((words, 1), (small.train, 0)):
        data = LanguageData(corpus, small.test, small.windows)
        prompts = draw_prompts(model, data, LSTM, 3, 6, 0, "cpu")
        assert prompts.foretold.tolist() == [best] * 6
    assert (prompts.places[:3] == -1).all()
    for at in range(3, 6):
        last = int(prompts.places[at])
        assert torch.equal(small.train.tokens[last - 5 : last + 1], prompts.x[at])
        assert int(small.train.tokens[last + 1]) == int(prompts.following[at])
    short = LanguageData(small.train, small.train, small.windows)
    with pytest.raises(
        ReadingError, match="'fables' has 194 places for prompts of 6 tokens, and 9"
    ):
        draw_prompts(model, short, LSTM, 999, 6, 0, "cpu")


def test_a_passage_is_no_markup() -> None:
    passage = Passage("a | b\n[/bold] <unk> `c`", "d|", "")
    table = NumberTable("texts", ("text",), ((passage,),))
    line = table.markdown().splitlines()[-1]
    assert line == "| `a \\| b⏎[/bold] <unk> ´c´⟦d\\|⟧` |"
    shown = repr(Report("x", "Why?", {}, (), (table,)))
    assert "[/bold] <unk> ´c´⟦d|⟧" in re.sub(r"\s*│\n│\s*", "", shown)


def test_queries_have_one_text_each(
    data: Path, report: tuple[Report, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALFORM_DATA", str(data))
    monkeypatch.setitem(SETTINGS, "small", TINY)
    arrays, file = dict(np.load(report[1] / "fables.npz")), tmp_path / "short.npz"
    np.savez(file, **(arrays | {"texts": arrays["texts"][:3]}))  # type: ignore[arg-type]
    run = dualform.open(report[1] / "fables")
    with pytest.raises(ReadingError, match="8 labels, 8 titles and 3 texts; give one each"):
        make_exhibit(run, f"{LOOK}_fables", file, None)


def test_models_for_the_explorer(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALFORM_DATA", str(data))
    monkeypatch.setitem(SETTINGS, "small", TINY)
    for name, task in TINY.tasks.items():
        known = load_task(data, task, TINY.context).words
        assert build_model("small", name).get_parameter("head.weight").shape[0] == known


def test_characters_are_sorted() -> None:
    assert characters("banana").vocabulary == ("a", "b", "n")
