"""Every view of the explorer as JSON: what a page, a report and a notebook show alike.

docs/explorer-api.md describes them. A view is a function of an `Explorer` and its parameters.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dualform.errors import ReadingError
from dualform.explore.cache import Kept
from dualform.explore.encoding import pieces
from dualform.explore.exhibit import LONGEST_NAME, Exhibit, plain_label
from dualform.explore.facts import grid, members_of, run_facts
from dualform.explore.found import Found, Question, Reader
from dualform.explore.parameters import Given
from dualform.explore.pictures import picture, shorten
from dualform.explore.summaries import SHOWN, group, largest, ranked, strongest
from dualform.ledger.samples import SampleId
from dualform.read.removal import ACCOUNT, ESTIMATE, LAYER_ACCOUNT, less
from dualform.read.scan import places
from dualform.read.scores import Array
from dualform.read.suspicion import RowErrors, row_errors

Json: TypeAlias = dict[str, Any]

MOST_EFFECTS = 256
"""Over how many queries a training sample's effects are looked for."""
MOST_LISTED = 500
MOST_SUBTRACTED = 10_000
MOST_HIGHLIGHTED = 100


class Explorer:
    """Answers for one exhibit; what was read is kept, as far as memory allows.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> explorer = Explorer(Exhibit(run, model, x[:2]))
    >>> sorted(explorer.view("answer", {"query": "0"})["check"])
    ['by_step', 'evidence', 'initial', 'remainder', 'total']
    >>> explorer.view("anwser", {})
    Traceback (most recent call last):
    dualform.errors.ReadingError: there is no view 'anwser'; there are acts, answer, books, ...
    """

    def __init__(self, exhibit: Exhibit) -> None:
        self.exhibit, self.run = exhibit, exhibit.run
        self.reader, self._kept = Reader(exhibit), Kept()
        self._views: dict[str, Callable[[Given], Json]] = {
            "acts": self._acts,
            "answer": self._answer,
            "books": self._books,
            "evidence": self._evidence,
            "subtract": self._subtract,
            "highlights": self._highlights,
            "layers": self._layers,
            "queries": self._queries,
            "run": self._facts,
            "sample": self._sample,
            "suspects": self._suspects,
        }

    def view(self, name: str, parameters: Mapping[str, str | Sequence[str]]) -> Json:
        """One view as JSON."""
        if name not in self._views:
            raise ReadingError(f"there is no view '{name}'; there are {', '.join(self._views)}.")
        return self._views[name](Given(parameters))

    def suspects_csv(self) -> str:
        """All samples, the most suspicious first, as a table for other programs."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(["id", "label", "suspicion"])
        for at in self._ranks:
            name = self.run.source.ids[at]
            writer.writerow([name, self.run.samples.labels.get(name, ""), self.suspicion[at]])
        return out.getvalue()

    def found(self, given: Given) -> Found:
        """What was read for the question that parameters ask."""
        question = Question(
            given.text("query"),
            given.text("ask", "layer"),
            given.text("layer", "") or None,
            given.number("output"),
            given.number("place"),
            given.number("at"),
        )
        found: Found = self._kept.get(question, lambda: self.reader(question))
        for place in (question.place, found.question.place):  # asked in full, it is the same
            self._kept.put(replace(found.question, place=place), found)
        return found

    def _facts(self, given: Given) -> Json:
        found: Json = self._kept.get("run", lambda: run_facts(self.exhibit))
        return found

    def _queries(self, given: Given) -> Json:
        chosen = self._chosen_queries(given)
        some = given.page(chosen, MOST_LISTED)
        return {"total": len(chosen), "queries": self._cards(some)}

    def _cards(self, at: Sequence[int]) -> list[Json]:
        return [self.exhibit.card(subject) for subject in self.exhibit.some(at)]

    def _chosen_queries(self, given: Given) -> list[int]:
        exhibit, words = self.exhibit, given.text("search", "").lower()
        chosen = [at for at in range(exhibit.listed) if words in exhibit.words(at)]
        if given.text("wrong", "") in ("1", "true"):
            chosen = [at for at in chosen if exhibit.right(at) is False]
        return chosen

    def _answer(self, given: Given) -> Json:
        found = self.found(given)
        question, amounts = found.question, self._amounts(found, given)
        chosen, own = self._chosen(given), self._restricted(amounts, given)
        subject = self.exhibit.subject(question.query)
        only = self._only(found, given)
        return {
            "query": self.exhibit.card(subject),
            "ask": question.ask,
            "layer": question.layer,
            "output": question.output,
            "asked": _asked(question),
            "outputs": largest(found.outputs),
            "check": None if only else found.check,
            "error": None if only else found.missed,
            "note": " ".join([*only, *([] if only and found.check else [found.note])]),
            "unit": "similarity" if question.ask == "keys" else "units of the output",
            "sides": {side: self._side(own, side) for side in ("for", "against")},
            "timeline": found.cells[chosen].sum(0).tolist() if self._bins(found) else None,
            "groups": self._groups(amounts, given),
            "places": 1 if found.marks is None else len(found.marks),
            "place": None if found.marks is None else question.place,
            "shared": found.shared,
            "marks": None if found.marks is None else found.marks.tolist(),
            "tokens": None
            if found.marks is None
            else pieces(subject.shown.preview, len(found.marks)),
        }

    def _evidence(self, given: Given) -> Json:
        amounts = self._restricted(self._amounts(self.found(given), given), given)
        lines = ranked(amounts, given.choice("side", ("for", "against")))
        some = given.page(lines, MOST_LISTED)
        return {"total": len(lines), "samples": [self.line(at, amounts[at]) for at in some]}

    def _layers(self, given: Given) -> Json:
        asked = given.without("layer", "at") | {"ask": "network"}
        found = self.found(Given(asked))
        assert found.shares is not None
        assert found.check is not None
        shares = [{"layer": name, "value": value} for name, value in found.shares.items()]
        parts = {name: found.check[name] for name in ("initial", "by_step", "remainder", "total")}
        return {"output": found.question.output, "shares": shares, **parts}

    def _acts(self, given: Given) -> Json:
        found = self.found(given)
        sample = self.run.sample_id(given.text("id"))
        at = self._place_of(sample)
        where = self._where(found, [sample], given)
        line = self.line(at, float(self._amounts(found, given)[at]))
        preview = self.run.samples.preview(sample)
        return {
            **line,
            "timeline": found.cells[at].tolist() if self._bins(found) else None,
            "places": None if where is None else where[0].tolist(),
            "tokens": None if where is None else pieces(preview, where.shape[1]),
            "grid": None
            if where is None
            else grid(self.run.info.stream(found.question.layer or "")),
        }

    def _highlights(self, given: Given) -> Json:
        """What each piece of some samples' texts adds, where there is a position a piece."""
        found = self.found(given)
        chosen = [self.run.sample_id(name) for name in given.several("id", MOST_HIGHLIGHTED)]
        previews = {name: self.run.samples.preview(name) for name in chosen}
        texts = {name: p for name, p in previews.items() if p and p.kind == "text"}
        where = self._where(found, list(texts), given) if texts else None
        if where is None:
            return {"samples": {}}
        cut = {name: pieces(text, where.shape[1]) for name, text in texts.items()}
        marked = zip(cut.items(), where.tolist(), strict=True)
        samples = {
            str(n): {"tokens": cut, "places": amounts} for (n, cut), amounts in marked if cut
        }
        return {"samples": samples}

    def _where(self, found: Found, chosen: Sequence[SampleId], given: Given) -> Array | None:
        """(samples, positions): what each position adds, where the layer has positions."""
        question = found.question
        if question.ask != "layer" or question.layer is None:
            return None
        stream = self.run.info.stream(question.layer)
        if places(self.run.source.ledger, stream) < 2:
            return None
        span, at = given.span(self._bins(found)), [self._place_of(name) for name in chosen]
        found_places: Array = self._kept.get(
            ("where", question, span, *at), lambda: self.reader.places(question, at, span)
        )
        return found_places

    def _sample(self, given: Given) -> Json:
        sample = self.run.sample_id(given.text("id"))
        at = self._place_of(sample)
        errors = self._errors
        mine = np.flatnonzero(errors.samples == at)
        bins = np.digitize(errors.steps[mine], self.run.bins.edges[1:-1], right=True)
        effects = self._effects(at)
        return {
            **self.line(at),
            "visits": len(np.unique(errors.steps[mine])),
            "history": [
                {"bin": int(b), "error": float(errors.relative[mine][bins == b].mean())}
                for b in np.unique(bins)
            ],
            "suspicion": float(self.suspicion[at]),
            "rank": int(np.flatnonzero(self._ranks == at)[0]) + 1,
            "helps": [effect for effect in effects if effect["value"] > 0][:SHOWN],
            "hurts": [effect for effect in effects[::-1] if effect["value"] < 0][:SHOWN],
            "of": self._on_queries[0].shape[1],
            "query": f"sample:{sample}",
        }

    def _effects(self, at: int) -> list[Json]:
        """What one sample adds to each query's prediction, largest first; only the ends."""
        values, outputs = self._on_queries
        order = np.argsort(-values[at], kind="stable")
        ends = np.unique(np.r_[np.arange(len(order))[:SHOWN], np.arange(len(order))[-SHOWN:]])
        cards = self._cards(order[ends].tolist())
        return [
            {"query": card, "output": int(outputs[q]), "value": float(values[at, q])}
            for card, q in zip(cards, order[ends], strict=True)
        ]

    @cached_property
    def _on_queries(self) -> tuple[Array, NDArray[np.int64]]:
        """(samples, queries) at the last layer, for the output each query has most of."""
        return self.reader.on_queries(min(len(self.exhibit), MOST_EFFECTS))

    def _suspects(self, given: Given) -> Json:
        some = given.page(self._ranks.tolist(), MOST_LISTED)
        lines = [self.line(at, float(self.suspicion[at])) for at in some]
        return {"total": len(self._ranks), "samples": lines}

    def _subtract(self, given: Given) -> Json:
        """What is asked without some samples: an account, and an estimate where it is wanted."""
        ids = [self.run.sample_id(name) for name in given.several("id", MOST_SUBTRACTED)]
        found, places = self.found(given), [self._place_of(name) for name in ids]
        of_layer = found.question.ask in ("layer", "keys")
        asked = given.without("place", "at", "span", "label")
        if not of_layer:
            asked = given.without("layer", "place", "at", "span", "label") | {"ask": "network"}
        elif found.question.ask == "keys":
            asked |= {"ask": "layer"}
        account = self.found(Given(asked | self._same_place(found)))
        output = account.question.output or 0
        before, left = float(account.outputs[output]), self._left(account, places)
        after = {output: left}
        if of_layer:
            key = ("subtract", account.question, *ids)
            outputs = self._kept.get(key, lambda: self.reader.layer_without(account, ids))
            after = dict(enumerate(outputs.tolist())) | after
        wanted = given.text("estimate", "") == "1" or found.question.ask == "removed"
        return {
            "ids": ids,
            "note": LAYER_ACCOUNT if of_layer else ACCOUNT,
            "before": [{"output": at, "value": float(account.outputs[at])} for at in after],
            "after": [{"output": at, "value": value} for at, value in after.items()],
            "asked": {
                "output": output,
                "before": before,
                "after": left,
                "retrained": self._retrained(found, given, places) if wanted else None,
                "estimate": ESTIMATE,
            },
        }

    def _same_place(self, found: Found) -> dict[str, str]:
        """The place that was asked about, for another question about the same output."""
        return {} if found.question.place is None else {"place": str(found.question.place)}

    def _retrained(self, found: Found, given: Given, places: Sequence[int]) -> float | None:
        """The estimate; None where what is asked is no output of the model."""
        if not self.reader.gives_output(found):
            return None
        asked = given.without("layer", "place", "at", "span", "label")
        asked |= {"ask": "removed", "output": str(found.question.output)}
        if found.shared or found.question.ask != "layer":
            asked |= self._same_place(found)
        return self._left(self.found(Given(asked)), places)

    def _left(self, found: Found, places: Sequence[int]) -> float:
        """What is asked, less what the samples at some places add to it."""
        before = found.outputs[[found.question.output or 0]]
        return float(less(before, found.cells.sum(1, keepdims=True), places)[0])

    def _books(self, given: Given) -> Json:
        found: Json = self._kept.get("books", lambda: self.run.audit().to_dict())
        return found

    def _amounts(self, found: Found, given: Given) -> Array:
        """(samples,): the amounts, within the span of training that is asked about."""
        span = given.span(self._bins(found))
        cells = found.cells if span is None else found.cells[:, span[0] : span[1] + 1]
        amounts: Array = cells.sum(1)
        return amounts

    def _bins(self, found: Found) -> int:
        """How many parts of training it tells apart; 0 where it tells none."""
        return 0 if found.question.ask in ("removed", "keys") else found.cells.shape[1]

    def _side(self, amounts: Array, side: str) -> Json:
        own = amounts > 0 if side == "for" else amounts < 0
        lines = [self.line(at, float(amounts[at])) for at in strongest(amounts, side)]
        return {"sum": float(amounts[own].sum()), "count": int(own.sum()), "samples": lines}

    def _groups(self, amounts: Array, given: Given) -> list[Json]:
        members = self._members(given)
        return [group(label, amounts[places]) for label, places in members.items()]

    def _members(self, given: Given) -> dict[Any, NDArray[np.int64]]:
        """The places of the samples of each label, or value of another column."""
        column = given.choice("by", list(self.run.samples.columns))
        found: dict[Any, NDArray[np.int64]] = self._kept.get(
            ("column", column), lambda: members_of(self.exhibit, column)
        )
        return found

    def _restricted(self, amounts: Array, given: Given) -> Array:
        """The same, but nothing of samples that are not asked about."""
        return np.where(self._chosen(given), amounts, 0.0)

    def _chosen(self, given: Given) -> NDArray[np.bool_]:
        """(samples,): which are asked about: all, or those of one label."""
        label, known = given.text("label", ""), self._members(given)
        if not label:
            return np.ones(len(self.run.source.ids), dtype=bool)
        chosen = np.zeros(len(self.run.source.ids), dtype=bool)
        for value, members in known.items():
            chosen[members] = str(value) == label
        if not chosen.any():
            some = ", ".join([*map(str, list(known)[:8]), *(["…"] if len(known) > 8 else [])])
            raise ReadingError(f"label='{shorten(label, 40)}'; there are {some}.")
        return chosen

    def _only(self, found: Found, given: Given) -> list[str]:
        """What the amounts are restricted to, a sentence each."""
        label, by = given.text("label", ""), given.text("by", "label")
        span = given.span(self._bins(found))
        learned = ["Only what was learned in the chosen part of training."] if span else []
        return learned + ([f"Only samples whose {by} is {shorten(label, 40)}."] if label else [])

    def line(self, at: int, value: float = 0.0) -> Json:
        """What to show of a training sample, by its place, and its amount."""
        name = self.run.source.ids[at]
        shown = picture(self.run.samples.preview(name), f"sample {shorten(name, LONGEST_NAME)}")
        label = plain_label(self.run.samples.labels.get(name))
        return {"id": name, "label": label, "value": float(value), "preview": shown}

    def _place_of(self, sample: SampleId) -> int:
        if sample not in self._places:
            self.run.revisit([sample])  # refuses it, and says what there is
        return self._places[sample]

    @cached_property
    def _places(self) -> dict[SampleId, int]:
        return {name: at for at, name in enumerate(self.run.source.ids)}

    @cached_property
    def _errors(self) -> RowErrors:
        return row_errors(self.run.source, self.run.layers[-1])

    @cached_property
    def suspicion(self) -> Array:
        """(samples,): how suspicious each is, in the order of the ids."""
        values: Array = self.run.suspicion().values[:, 0]
        return values

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        """The samples, the most suspicious first."""
        return np.argsort(-self.suspicion, kind="stable")


def _asked(question: Question) -> str:
    if question.ask in ("network", "removed"):
        return f"output {question.output} of the model"
    return f"output {question.output} of layer {question.layer}"
