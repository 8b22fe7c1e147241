"""How results look where there is little room, or much to show."""

from __future__ import annotations

import builtins
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from rich.console import Console
from torch import nn

import dualform
from dualform.read.audit import Audit, BookAudit
from dualform.read.scores import SHOWN, Check, Scores
from dualform.testing import tiny_run


def printed(result: object, width: int) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(result)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def book(name: str, granularity: str, size: int) -> BookAudit:
    return BookAudit(name, (size,), granularity, rows=9, remainder=1e-7, bytes=1, reason="")


def test_nothing_is_cut_off_in_a_small_terminal() -> None:
    run, model, x = tiny_run()
    reading = run.spotlight(model, x[:1])["2"]
    for result in (run, run.audit(), reading, reading.top(3), run.explain(model, x[:1])):
        assert "…" not in printed(result, 40)
    name = "encoder.layers.11.self_attention.in_proj_weight" * 2
    lines = printed(Audit([book(name, "row", 2)], 1, 1, 1), 60)
    letters = "".join(line.split("│")[1].strip() for line in lines.splitlines() if "│" in line)
    assert letters == name


def test_all_is_said_of_all_only() -> None:
    whole = Audit([book("w", "row", 9_999)], 1, 1, 1)
    nearly = Audit([book("w", "row", 9_999), book("b", "step", 1)], 1, 1, 1)
    assert "100% of trained parameters by row" in repr(whole)
    assert "99.9% of trained parameters by row" in repr(nearly)


def test_a_ranking_of_many_queries_shows_the_first_whole() -> None:
    queries = [f"q{at}" for at in range(SHOWN + 5)]
    ranking = Scores([0, 1, 2], np.ones((3, len(queries))), queries).top(2)
    assert len(ranking) == 2 * len(queries)
    assert "20 of 25 queries shown" in repr(ranking)
    assert repr(ranking).count("q19 ") == 2
    assert "q20" not in repr(ranking)
    assert "queries shown" not in repr(Scores([0, 1, 2], np.ones((3, 1)), ["q"]).top(2))


def test_what_was_booked_by_step_is_shown_where_there_is_any() -> None:
    def scores(steps: float) -> Scores:
        check = Check(*(np.array([part]) for part in (0.5, 1.0, steps, 0.0, 1.5 + steps)))
        return Scores([0], np.ones((1, 1)), ["q"], check)

    assert "booked by step" not in repr(scores(0.0))
    assert "+0.25 (booked by step)" in repr(scores(0.25))


def test_markup_in_ids_is_text(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.samples(["[red]apple", "[bold]pear"])
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    reading = dualform.open(tmp_path / "run").revisit(["[red]apple"]).last
    for result in (reading, reading.top(), reading.timeline(), reading.samples()):
        assert "[red]apple" in repr(result)


def test_a_run_says_when_no_sample_came_twice(tmp_path: Path) -> None:
    """So it is where a loop of epochs does not name its samples."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
    assert "12, each seen once" in repr(dualform.open(tmp_path / "run"))
    assert "each seen once" not in repr(tiny_run()[0])


def test_scores_are_arrays_and_rankings_lists() -> None:
    run, model, x = tiny_run()
    scores = run.spotlight(model, x[:2])["2"].samples()
    np.testing.assert_array_equal(np.asarray(scores), scores.values)
    assert np.asarray(scores, np.float32).dtype == np.float32
    assert [row.id for row in scores.top(2)] == scores.top(2).ids
    assert scores.top(2)[-1].query == scores.queries[1]


def test_long_labels_of_a_plot_are_shortened() -> None:
    labels = {0: "a label that goes on and on", 1: "cat"}
    axes = Scores([0, 1], np.ones((2, 1)), ["q"], None, labels).plot()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a label that go…", "cat"]


def test_in_a_notebook_a_result_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell's result is its text and its HTML; nothing is displayed while they are made."""

    class ZMQInteractiveShell:
        """What rich takes for a notebook, by its name."""

    displayed: list[object] = []
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setattr("IPython.display.display", displayed.append)
    run, model, x = tiny_run()
    for result in (run, run.audit(), run.spotlight(model, x[:1])["2"].top(3)):
        shown, _ = DisplayFormatter().format(result)
        assert displayed == []
        assert set(shown) == {"text/plain", "text/html"}
        assert shown["text/plain"] == repr(result)
        assert "│" in shown["text/plain"]
        assert shown["text/html"].startswith("<pre")
        assert "│" in shown["text/html"]
