"""Every view of the explorer as JSON: what a page, a report and a notebook show alike.

contract.py says what each view answers. All numbers come through one door, `dualform.read.ask`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dualform.errors import ReadingError
from dualform.explore.attention import attention_view
from dualform.explore.attention_contract import AttentionView
from dualform.explore.cache import ResultCache
from dualform.explore.cards import sample_cards, shorten
from dualform.explore.contract import (
    ActsView,
    AnswerView,
    BooksView,
    EffectCard,
    EvidenceView,
    HighlightsView,
    LayersView,
    QueriesView,
    RunView,
    SampleView,
    SubtractView,
    SuspectsView,
)
from dualform.explore.encoding import pieces
from dualform.explore.exhibit import Exhibit
from dualform.explore.facts import grid, members_of, run_facts
from dualform.explore.parameters import Parameters
from dualform.explore.summaries import SHOWN, check_parts, groups, largest, ranked, sides
from dualform.ledger.samples import SampleId
from dualform.read import ask
from dualform.read.ask import Answer, Question, RowErrors
from dualform.read.removal import ACCOUNT, ESTIMATE, LAYER_ACCOUNT
from dualform.read.scores import Array

Json: TypeAlias = dict[str, Any]

MOST_EFFECTS = 256
"""Over how many queries a training sample's effects are looked for."""
MOST_LISTED = 500
MOST_SUBTRACTED = 10_000
MOST_HIGHLIGHTED = 100


class Explorer:
    """Answers for one exhibit; answers are cached, as far as memory allows.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> explorer = Explorer(Exhibit(run, model, x[:2]))
    >>> sorted(explorer.view("answer", {"query": "0"})["check"])
    ['by_step', 'evidence', 'initial', 'remainder', 'total']
    >>> explorer.view("anwser", {})
    Traceback (most recent call last):
    dualform.errors.ReadingError: there is no view 'anwser'; there are acts, answer, ...
    """

    def __init__(self, exhibit: Exhibit) -> None:
        self.exhibit, self.run = exhibit, exhibit.run
        self._cache, self._ridge = ResultCache(), Lock()
        self._views: dict[str, Callable[[Parameters], Any]] = {
            "acts": self._acts,
            "answer": self._answer,
            "attention": self._attention,
            "books": self._books,
            "evidence": self._evidence,
            "highlights": self._highlights,
            "layers": self._layers,
            "queries": self._queries,
            "run": self._run,
            "sample": self._sample,
            "subtract": self._subtract,
            "suspects": self._suspects,
        }

    def view(self, name: str, parameters: Mapping[str, str | Sequence[str]]) -> Json:
        """One view as JSON."""
        if name not in self._views:
            raise ReadingError(f"there is no view '{name}'; there are {', '.join(self._views)}.")
        found: Json = self._views[name](Parameters.read(parameters))
        return found

    def ask(self, query: str, question: Question) -> Answer:
        """What the run answers to a question about a query; it is read once."""
        answer: Answer = self._cache.get((query, question), lambda: self._read(query, question))
        for place in (question.place, answer.question.place):  # asked in full, it is the same
            full = replace(answer.question, place=place, samples=())
            self._cache.put((query, full), answer)
        return answer

    def suspects_csv(self) -> str:
        """All samples, the most suspicious first, as a table for other programs."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(["id", "label", "suspicion"])
        for at in self._ranks:
            name = self.run.source.ids[at]
            writer.writerow([name, self.run.samples.labels.get(name, ""), self.suspicion[at]])
        return out.getvalue()

    @cached_property
    def suspicion(self) -> Array:
        """(samples,): how suspicious each is, in the order of the ids."""
        values: Array = self.run.suspicion().values[:, 0]
        return values

    def _read(self, query: str, question: Question) -> Answer:
        subject = self.exhibit.subject(query)
        samples = () if subject.sample is None else (subject.sample,)
        if question.ask in ("layer", "keys") and question.layer is None:
            if not self.run.layers:
                raise ReadingError("no layer of this run was booked by row; the books say why.")
            question = replace(question, layer=self.run.layers[-1])
        complete = replace(question, samples=samples)
        if question.ask != "removed":
            return ask.ask(self.run, complete, self.exhibit.model, subject.x)
        with self._ridge:  # what does not depend on the query is made once, not twice at a time
            return ask.ask(self.run, complete, self.exhibit.model, subject.x)

    def _run(self, asked: Parameters) -> RunView:
        found: RunView = self._cache.get("run", lambda: run_facts(self.exhibit))
        return found

    def _books(self, asked: Parameters) -> BooksView:
        found: BooksView = self._cache.get("books", lambda: self.run.audit().to_dict())
        return found

    def _attention(self, asked: Parameters) -> AttentionView:
        found: AttentionView = self._cache.get("attention", lambda: attention_view(self.exhibit))
        return found

    def _queries(self, asked: Parameters) -> QueriesView:
        exhibit = self.exhibit
        chosen = [at for at in range(exhibit.listed) if asked.search in exhibit.words(at)]
        if asked.wrong:
            chosen = [at for at in chosen if exhibit.right(at) is False]
        some = exhibit.some(asked.page(chosen, MOST_LISTED))
        return {"total": len(chosen), "queries": [exhibit.card(subject) for subject in some]}

    def _answer(self, asked: Parameters) -> AnswerView:
        answer = self.ask(asked.query, asked.question)
        question, check = answer.question, answer.scores.check
        amounts, span = self._amounts(answer, asked)
        members = self._members(asked.by)
        chosen = self._chosen(asked, members)
        own = np.where(chosen, amounts, 0.0)
        only = ["Only what was learned in the chosen part of training."] if span else []
        if asked.label:
            only.append(f"Only samples whose {asked.by} is {shorten(asked.label, 40)}.")
        notes = only if only and check else [*only, answer.note]
        subject = self.exhibit.subject(asked.query)
        marks = None if answer.marks is None else answer.marks.tolist()
        layer = None if question.ask in ("network", "removed") else question.layer
        return {
            "query": self.exhibit.card(subject),
            "ask": question.ask,
            "layer": question.layer,
            "output": answer.output,
            "asked": f"output {self.exhibit.output_name(answer.output, layer)} of "
            + ("the model" if layer is None else f"layer {layer}"),
            "outputs": largest(answer.outputs),
            "check": None if only else check_parts(check),
            "attributed": None if only or check is None else float(check.attributed[0]),
            "error": None if only else answer.missed,
            "note": " ".join(notes),
            "unit": "similarity" if question.ask == "keys" else "units of the output",
            "sides": sides(self.run, own),
            "timeline": answer.cells[chosen].sum(0).tolist() if answer.bins else None,
            "groups": groups(amounts, members),
            "places": 1 if marks is None else len(marks),
            "place": None if marks is None else question.place,
            "shared": answer.shared,
            "marks": marks,
            "tokens": None if marks is None else pieces(subject.query.preview, len(marks)),
        }

    def _evidence(self, asked: Parameters) -> EvidenceView:
        if asked.side not in ("for", "against"):
            raise ReadingError(f"side='{shorten(asked.side, 40)}'; there are for, against.")
        amounts, _ = self._amounts(self.ask(asked.query, asked.question), asked)
        amounts = np.where(self._chosen(asked, self._members(asked.by)), amounts, 0.0)
        listed = ranked(amounts, asked.side)
        some = asked.page(listed, MOST_LISTED)
        return {"total": len(listed), "samples": sample_cards(self.run, some, amounts)}

    def _layers(self, asked: Parameters) -> LayersView:
        question = replace(asked.question, ask="network", layer=None, at=None)
        answer = self.ask(asked.query, question)
        parts = check_parts(answer.scores.check)
        assert parts is not None
        return {
            "output": answer.output,
            "shares": [{"layer": name, "value": value} for name, value in answer.shares.items()],
            "initial": parts["initial"],
            "by_step": parts["by_step"],
            "remainder": parts["remainder"],
            "total": parts["total"],
        }

    def _acts(self, asked: Parameters) -> ActsView:
        answer = self.ask(asked.query, asked.question)
        sample = self.run.sample_id(asked.one_id)
        at = self._place_of(sample)
        where = self._where(answer, [sample], asked)
        preview, layer = self.run.samples.preview(sample), answer.question.layer or ""
        (card,) = sample_cards(self.run, [at], self._amounts(answer, asked)[0])
        return {
            "id": card["id"],
            "label": card["label"],
            "value": card["value"],
            "preview": card["preview"],
            "timeline": answer.cells[at].tolist() if answer.bins else None,
            "places": None if where is None else where[0].tolist(),
            "tokens": None if where is None else pieces(preview, where.shape[1]),
            "grid": None if where is None else grid(self.run.info.stream(layer)),
        }

    def _highlights(self, asked: Parameters) -> HighlightsView:
        """What each piece of some samples' texts adds, where there is a position a piece."""
        answer = self.ask(asked.query, asked.question)
        chosen = [self.run.sample_id(name) for name in asked.some_ids(MOST_HIGHLIGHTED)]
        previews = {name: self.run.samples.preview(name) for name in chosen}
        texts = {name: p for name, p in previews.items() if p and p.kind == "text"}
        where = self._where(answer, list(texts), asked) if texts else None
        if where is None:
            return {"samples": {}}
        cut = {name: pieces(text, where.shape[1]) for name, text in texts.items()}
        marked = zip(cut.items(), where.tolist(), strict=True)
        return {
            "samples": {
                str(name): {"tokens": tokens, "places": amounts}
                for (name, tokens), amounts in marked
                if tokens
            }
        }

    def _where(self, answer: Answer, chosen: Sequence[SampleId], asked: Parameters) -> Array | None:
        """(samples, positions): what each position adds, where the layer has positions."""
        question = answer.question
        if question.ask != "layer" or ask.layer_places(self.run, question.layer or "") < 2:
            return None
        span, at = asked.span(answer.bins), [self._place_of(name) for name in chosen]
        model, x = self.exhibit.model, self.exhibit.subject(asked.query).x
        found: Array = self._cache.get(
            ("where", asked.query, question, span, *at),
            lambda: ask.positions(self.run, question, at, span, model, x),
        )
        return found

    def _sample(self, asked: Parameters) -> SampleView:
        sample = self.run.sample_id(asked.one_id)
        at = self._place_of(sample)
        errors = self._errors
        mine = np.flatnonzero(errors.samples == at)
        bins = np.digitize(errors.steps[mine], self.run.bins.edges[1:-1], right=True)
        effects = self._effects(at)
        (card,) = sample_cards(self.run, [at], np.zeros(at + 1))
        return {
            "id": card["id"],
            "label": card["label"],
            "value": card["value"],
            "preview": card["preview"],
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

    def _effects(self, at: int) -> list[EffectCard]:
        """What one sample adds to each query's prediction, largest first; only the ends."""
        values, outputs = self._on_queries
        order = np.argsort(-values[at], kind="stable")
        ends = np.unique(np.r_[np.arange(len(order))[:SHOWN], np.arange(len(order))[-SHOWN:]])
        some = self.exhibit.some(order[ends].tolist())
        return [
            {
                "query": self.exhibit.card(subject),
                "output": int(outputs[q]),
                "value": float(values[at, q]),
            }
            for subject, q in zip(some, order[ends], strict=True)
        ]

    @cached_property
    def _on_queries(self) -> tuple[Array, NDArray[np.int64]]:
        """(samples, queries) at the last layer, for the output each query has most of."""
        count, model = min(len(self.exhibit), MOST_EFFECTS), self.exhibit.model
        if not count or model is None:
            return np.zeros((len(self.run.ids), 0)), np.zeros(0, dtype=np.int64)
        return ask.effects(self.run, model, self.exhibit.inputs(count), count)

    @cached_property
    def _errors(self) -> RowErrors:
        return ask.errors(self.run)

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        """The samples, the most suspicious first."""
        return np.argsort(-self.suspicion, kind="stable")

    def _suspects(self, asked: Parameters) -> SuspectsView:
        some = asked.page(self._ranks.tolist(), MOST_LISTED)
        return {"total": len(self._ranks), "samples": sample_cards(self.run, some, self.suspicion)}

    def _subtract(self, asked: Parameters) -> SubtractView:
        """What is asked without some samples: an account, and an estimate where it is wanted."""
        ids = [self.run.sample_id(name) for name in asked.some_ids(MOST_SUBTRACTED)]
        found, places = self.ask(asked.query, asked.question), [self._place_of(n) for n in ids]
        kind, place = found.question.ask, found.question.place
        model, x = self.exhibit.model, self.exhibit.subject(asked.query).x
        same = replace(asked.question, ask="layer", place=place, at=None)
        if kind not in ("layer", "keys"):
            same = replace(same, ask="network", layer=None)
        account = self.ask(asked.query, same)
        outputs, output = account.outputs, account.output
        after = {output: account.without(places)}
        if same.ask == "layer":
            rest: Array = self._cache.get(
                ("subtract", asked.query, account.question, *ids),
                lambda: ask.layer_without(self.run, account, ids, model, x),
            )
            after = dict(enumerate(rest.tolist())) | after
        retrained = None
        if (asked.estimate or kind == "removed") and ask.gives_output(found, model, x):
            there = place if found.shared or kind != "layer" else None
            removed = replace(same, ask="removed", layer=None, place=there)
            removed = replace(removed, output=found.question.output)
            retrained = self.ask(asked.query, removed).without(places)
        return {
            "ids": ids,
            "note": LAYER_ACCOUNT if same.ask == "layer" else ACCOUNT,
            "before": [{"output": at, "value": float(outputs[at])} for at in after],
            "after": [{"output": at, "value": value} for at, value in after.items()],
            "asked": {
                "output": output,
                "before": float(outputs[output]),
                "after": after[output],
                "retrained": retrained,
                "estimate": ESTIMATE,
            },
        }

    def _amounts(self, answer: Answer, asked: Parameters) -> tuple[Array, tuple[int, int] | None]:
        """(samples,): the amounts within the span of training that is asked about; that span."""
        span, cells = asked.span(answer.bins), answer.cells
        return (cells if span is None else cells[:, span[0] : span[1] + 1]).sum(1), span

    def _members(self, column: str) -> dict[Any, NDArray[np.int64]]:
        """The places of the samples of each label, or value of another column; None without."""
        columns = self.run.samples.columns
        if column not in columns:
            raise ReadingError(f"by='{shorten(column, 40)}'; there are {', '.join(columns)}.")
        made: dict[Any, NDArray[np.int64]] = self._cache.get(
            ("column", column), lambda: members_of(self.run, column)
        )
        return made

    def _chosen(
        self, asked: Parameters, members: Mapping[Any, NDArray[np.int64]]
    ) -> NDArray[np.bool_]:
        """(samples,): which are asked about: all, or those of one label."""
        chosen = np.full(len(self.run.source.ids), not asked.label)
        if asked.label:
            for value, places in members.items():
                chosen[places] = str(value) == asked.label
            if not chosen.any():
                some = ", ".join([*map(str, list(members)[:8]), *["…"][: len(members) > 8]])
                raise ReadingError(f"label='{shorten(asked.label, 40)}'; there are {some}.")
        return chosen

    def _place_of(self, sample: SampleId) -> int:
        if sample not in self._places:
            self.run.revisit([sample])  # refuses it, and says what there is
        return self._places[sample]

    @cached_property
    def _places(self) -> dict[SampleId, int]:
        return {name: at for at, name in enumerate(self.run.source.ids)}
