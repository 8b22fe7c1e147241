"""The report: the explorer in one HTML file, with the answers to some queries inside."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from dualform.errors import ReadingError
from dualform.explore.attention import has_attention
from dualform.explore.attention_contract import AttentionView
from dualform.explore.cards import plain_label, sample_cards
from dualform.explore.contract import (
    BooksView,
    LayersView,
    PreviewCard,
    RunView,
)
from dualform.explore.exhibit import Exhibit
from dualform.explore.page import report_page
from dualform.explore.parameters import Parameters
from dualform.explore.report_contract import ReportData
from dualform.explore.views import Explorer, Json
from dualform.ledger.files import write_durably
from dualform.read.ask import keeps_inputs, nothing_by_row
from dualform.read.progress import together
from dualform.read.scores import Array

MOST_QUERIES = 24
ALTERNATIVES = {"layer": 3, "network": 2}
"""How many outputs of a query can be asked about; otherwise one."""
CELL_BYTES = 1_800_000
"""How much of a report may be amounts by sample and time."""
PREVIEW_BYTES = 600_000
SUSPECTS = 50
"""How many of the most suspicious samples are shown with their previews in any case."""
PAGES = 48
"""How many training samples have a page of their own."""
EFFECTS = 4
"""How many queries such a page names on either side."""


def write_report(
    exhibit: Exhibit, path: str | os.PathLike[str], queries: Sequence[str] | None = None
) -> Path:
    """Writes the explorer and the answers to some queries as one file that needs nothing else.

    >>> import tempfile
    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> write_report(Exhibit(run, model, x[:2]), tempfile.mkdtemp() + "/report.html").name
    'report.html'

    Args:
        queries: as in a URL: "0" for the first, "sample:7" for a training sample. By default the
            first of those given, or else a training sample of each label.
    """
    target = Path(path)
    if target.is_dir():
        raise ReadingError(f"'{target}' is a folder; give a file, such as '{target}/report.html'.")
    if not exhibit.run.layers:
        raise ReadingError(f"{nothing_by_row(exhibit.run.source.ledger)}.")
    data = ReportContent(Explorer(exhibit), list(queries or usual_queries(exhibit))).collect()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_durably(target, report_page(f"dualform · {data['run']['name']}", data))
    return target


def usual_queries(exhibit: Exhibit) -> list[str]:
    """The first queries that were given, or a training sample of each label."""
    if len(exhibit):
        return [str(at) for at in range(min(len(exhibit), MOST_QUERIES))]
    labels = exhibit.run.samples.labels
    first = {plain_label(labels.get(name)): name for name in reversed(exhibit.run.ids)}
    several = [first[label] for label in sorted(first, key=str)]
    chosen = several if len(several) > 1 else exhibit.run.ids[:8]
    return [f"sample:{name}" for name in chosen[:MOST_QUERIES]]


class ReportContent:
    """What a report carries, in the shape that the front end reads: `ReportData`."""

    def __init__(self, explorer: Explorer, queries: Sequence[str]) -> None:
        self._explorer, self._queries = explorer, queries
        self._run = explorer.run
        self._bytes_left = CELL_BYTES
        self._previews: dict[str, PreviewCard] = {}
        """Of the samples that are shown somewhere."""

    def collect(self) -> ReportData:
        """Everything; says how far it is."""
        view, exhibit, ids = self._explorer.view, self._explorer.exhibit, self._run.ids
        asked, answers = list(self._questions()), dict[str, Any]()
        with together("writing the report", len(asked) + 1) as progress:
            for question in asked:
                answers.update(self._answer(*question))
                progress.advance(1)
            self._add_previews(view("suspects", {"limit": str(SUSPECTS)})["samples"])
            pages = dict[str, Any]()
            for name in list(self._previews)[:PAGES]:
                page = view("sample", {"id": name})
                pages[name] = page | {side: page[side][:EFFECTS] for side in ("helps", "hurts")}
            self._add_all_previews()
            columns = self._run.samples.columns
            data: ReportData = {
                "run": cast(RunView, view("run", {}))
                | {"carried": True, "queries": len(self._queries)},
                "books": cast(BooksView, view("books", {})),
                "attention": self._attention(),
                "ids": ids,
                "suspicion": _packed(self._explorer.suspicion),
                "columns": {
                    column: [plain_label(known.get(name)) for name in ids]
                    for column, known in columns.items()
                },
                "previews": self._previews,
                "queries": [exhibit.card(exhibit.subject(query)) for query in self._queries],
                "answers": answers,
                "layers": self._layers(),
                "samples": pages,
            }
            progress.advance(1)
        return data

    def _attention(self) -> AttentionView | None:
        """Where the model has attention."""
        if not has_attention(self._explorer.exhibit):
            return None
        return cast(AttentionView, self._explorer.view("attention", {}))

    def _questions(self) -> Iterator[tuple[str, str, str | None, int]]:
        """Every question to every query, by rank of output; first what people ask first.

        Their order is the one in which they may take up room.
        """
        layers = self._run.layers
        whole = [("network", None), ("removed", None)] if self._explorer.exhibit.model else []
        own = [("layer", layer) for layer in [*layers[-1:], *layers[:-1]]]
        keys = [("keys", layers[-1])] if keeps_inputs(self._run, layers[-1]) else []
        asks = [*own[:1], *whole, *own[1:], *keys]
        for rank in range(max(ALTERNATIVES.values())):
            for ask, layer in asks:
                if rank < (ALTERNATIVES.get(ask, 1) if layer in (None, layers[-1]) else 1):
                    for query in self._queries:
                        yield query, ask, layer, rank

    def _answer(self, query: str, ask: str, layer: str | None, rank: int) -> Json:
        """The answer about the output of a rank among the query's outputs, if there is one.

        The evidence is without pictures, each of which is carried once, and with highlights.
        """
        if ask in ("network", "removed") and query.startswith("sample:"):
            return {}
        view, parameters = self._explorer.view, {"query": query, "ask": ask, "layer": layer or ""}
        first = view("answer", parameters)
        if rank >= len(first["outputs"]):
            return {}
        output = first["outputs"][rank]["output"]
        asked = parameters | {"output": str(output)}
        answer = first if output == first["output"] else view("answer", asked)
        cards = [card for side in answer["sides"].values() for card in side["samples"]]
        self._add_previews(cards)
        ids = [str(card["id"]) for card in cards]
        marked = view("highlights", asked | {"id": ids})["samples"] if ids else {}
        sides = {
            name: side
            | {
                "samples": [
                    card | {"preview": None} | marked.get(str(card["id"]), {})
                    for card in side["samples"]
                ]
            }
            for name, side in answer["sides"].items()
        }
        key = f"{query}|{ask}|{layer or ''}|{output}"
        return {key: answer | {"cells": self._cells(asked), "sides": sides}}

    def _cells(self, asked: dict[str, str]) -> str | None:
        """Amounts by sample and bin, as long as there is room for them."""
        parameters = Parameters.read(asked)
        cells = self._explorer.ask(parameters.query, parameters.question).cells.astype("<f4")
        if cells.nbytes > self._bytes_left:
            return None
        self._bytes_left -= cells.nbytes
        return _packed(cells)

    def _layers(self) -> dict[str, LayersView]:
        """Each layer's share of the queries' first outputs, where the network can be asked."""
        own = [query for query in self._queries if not query.startswith("sample:")]
        if self._explorer.exhibit.model is None:
            return {}
        found = {query: self._explorer.view("layers", {"query": query}) for query in own}
        return {f"{q}|{view['output']}": cast(LayersView, view) for q, view in found.items()}

    def _add_previews(self, cards: Iterable[Mapping[str, Any]]) -> None:
        for card in cards:
            if card["preview"] is not None:
                self._previews.setdefault(str(card["id"]), card["preview"])

    def _add_all_previews(self) -> None:
        """The other samples' previews, as long as there is room."""
        left, nothing = PREVIEW_BYTES, np.zeros(len(self._run.ids))
        for at, name in enumerate(self._run.ids):
            cards = sample_cards(self._run, [at], nothing)
            left -= len(str(cards[0]["preview"])) if str(name) not in self._previews else 0
            if left < 0:
                return
            self._add_previews(cards)


def _packed(numbers: Array) -> str:
    """Numbers as base64 of little-endian float32."""
    return b64encode(np.ascontiguousarray(numbers, dtype="<f4").tobytes()).decode()
