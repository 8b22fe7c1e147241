"""The report: the explorer in one HTML file, with the answers to some queries inside."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dualform.errors import ReadingError
from dualform.explore.exhibit import Exhibit, plain_label
from dualform.explore.page import carried_page
from dualform.explore.parameters import Given
from dualform.explore.views import Explorer, Json
from dualform.ledger.files import write_durably
from dualform.read.progress import LateProgress, together
from dualform.read.scores import Array
from dualform.read.spotlight import nothing_by_row

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
    carried = Carried(Explorer(exhibit), list(queries or usual_queries(exhibit))).content()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_durably(target, carried_page(f"dualform · {carried['run']['name']}", carried))
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


class Carried:
    """What a report carries, in the shape that the front end reads; see docs/explorer-api.md."""

    def __init__(self, explorer: Explorer, queries: Sequence[str]) -> None:
        self._explorer, self._queries = explorer, queries
        self._run = explorer.run
        self._left = CELL_BYTES
        self._shown: dict[str, Json] = {}
        """Previews of the samples that are shown somewhere."""

    def content(self) -> Json:
        """Everything, as JSON; says how far it is."""
        asked = list(self._questions())
        with together("writing the report", len(asked) + 1) as progress:
            answers = dict(self._answers(asked, progress))
            found = self._rest() | {"answers": answers}
            progress.advance(1)
        return found

    def _rest(self) -> Json:
        """What is not an answer to a query."""
        self._show(self._explorer.view("suspects", {"limit": str(SUSPECTS)})["samples"])
        pages = {name: self._page(name) for name in list(self._shown)[:PAGES]}
        ids, columns = self._run.ids, self._run.samples.columns
        self._show_all()
        return {
            "run": self._explorer.view("run", {})
            | {"carried": True, "queries": len(self._queries)},
            "books": self._explorer.view("books", {}),
            "suspicion": _packed(self._explorer.suspicion),
            "ids": ids,
            "columns": {
                column: [plain_label(known.get(name)) for name in ids]
                for column, known in columns.items()
            },
            "queries": [self._card(query) for query in self._queries],
            "layers": dict(self._layers()),
            "samples": pages,
            "previews": self._shown,
        }

    def _card(self, query: str) -> Json:
        exhibit = self._explorer.exhibit
        return exhibit.card(exhibit.subject(query))

    def _answers(
        self, asked: Sequence[tuple[str, str, str | None, int]], progress: LateProgress
    ) -> Iterator[tuple[str, Json]]:
        """The answers, as they are made; the first ones with cells."""
        for one in asked:
            yield from self._answer(*one)
            progress.advance(1)

    def _questions(self) -> Iterator[tuple[str, str, str | None, int]]:
        """Every question to every query, by rank of output; first what people ask first."""
        last = (None, self._run.layers[-1])
        for rank in range(max(ALTERNATIVES.values())):
            for ask, layer in self._asked():
                if rank < (ALTERNATIVES.get(ask, 1) if layer in last else 1):
                    for query in self._queries:
                        yield query, ask, layer, rank

    def _asked(self) -> list[tuple[str, str | None]]:
        """The questions, in the order in which they may take up room."""
        layers = self._run.layers
        whole = [("network", None), ("removed", None)] if self._explorer.exhibit.model else []
        own = [("layer", layer) for layer in [*layers[-1:], *layers[:-1]]]
        return [*own[:1], *whole, *own[1:], ("keys", layers[-1])]

    def _answer(
        self, query: str, ask: str, layer: str | None, rank: int
    ) -> Iterator[tuple[str, Json]]:
        """The answer about the output of a rank among the query's outputs, if there is one."""
        if ask in ("network", "removed") and query.startswith("sample:"):
            return
        given = {"query": query, "ask": ask, "layer": layer or ""}
        first = self._explorer.view("answer", given)
        if rank >= len(first["outputs"]):
            return
        output = first["outputs"][rank]["output"]
        asked = given | {"output": str(output)}
        answer = first if output == first["output"] else self._explorer.view("answer", asked)
        key, cells = f"{query}|{ask}|{layer or ''}|{output}", self._cells(asked)
        yield key, answer | {"cells": cells, "sides": self._sides(answer["sides"], asked)}

    def _sides(self, sides: Json, asked: dict[str, str]) -> Json:
        """The evidence without pictures, each of which is carried once, and with highlights."""
        for side in sides.values():
            self._show(side["samples"])
        ids = [str(line["id"]) for side in sides.values() for line in side["samples"]]
        marked = self._explorer.view("highlights", asked | {"id": ids})["samples"] if ids else {}
        return {
            name: side | {"samples": [_bare(line, marked) for line in side["samples"]]}
            for name, side in sides.items()
        }

    def _cells(self, asked: dict[str, str]) -> str | None:
        """Amounts by sample and bin, as long as there is room for them."""
        cells = self._explorer.found(Given(asked)).cells.astype("<f4")
        if cells.nbytes > self._left:
            return None
        self._left -= cells.nbytes
        return _packed(cells)

    def _layers(self) -> Iterator[tuple[str, Json]]:
        if self._explorer.exhibit.model is None:
            return
        for query in self._queries:
            if not query.startswith("sample:"):
                found = self._explorer.view("layers", {"query": query})
                yield f"{query}|{found['output']}", found

    def _page(self, sample: str) -> Json:
        page = self._explorer.view("sample", {"id": sample})
        return page | {side: page[side][:EFFECTS] for side in ("helps", "hurts")}

    def _show(self, lines: Sequence[Json]) -> None:
        for line in lines:
            if line["preview"] is not None:
                self._shown.setdefault(str(line["id"]), line["preview"])

    def _show_all(self) -> None:
        """The other samples' previews, as long as there is room."""
        left = PREVIEW_BYTES
        for at, name in enumerate(self._run.ids):
            line = self._explorer.line(at)
            left -= len(str(line["preview"])) if str(name) not in self._shown else 0
            if left < 0:
                return
            self._show([line])


def _packed(numbers: Array) -> str:
    """Numbers as base64 of little-endian float32."""
    return b64encode(np.ascontiguousarray(numbers, dtype="<f4").tobytes()).decode()


def _bare(line: Json, marked: Json) -> Json:
    """A piece of evidence without its picture, but with its text's highlights."""
    highlights: Json = marked.get(str(line["id"]), {})
    return line | {"preview": None} | highlights
