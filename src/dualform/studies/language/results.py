"""What all seeds found, and the tables of the study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dualform.studies.balance import balance_table
from dualform.studies.estimate import Estimate, estimate
from dualform.studies.language.measure import EXACT, KEYS, NETWORK
from dualform.studies.language.prompts import KINDS
from dualform.studies.language.tasks import LanguageSetting
from dualform.studies.parts import Found
from dualform.studies.report import Cell, NumberTable, Passage
from dualform.studies.texts import Corpus

AROUND = {"": (30, 20), " ": (8, 4)}
"""So many tokens before and after a place are printed: characters, or words."""
MATCHES = tuple(f"{kind}: {what}" for kind in KINDS for what in ("same next, %", "shared"))


@dataclass(frozen=True)
class LanguageResults:
    """Everything that was measured: by model, then by seed."""

    setting: LanguageSetting
    models: Mapping[str, Sequence[Found]]
    texts: Mapping[str, Corpus]
    """The training part of each model's text."""

    def mean(self, model: str, *path: str, scale: float = 1) -> Estimate:
        """A number that each seed found, by the names that lead to it."""
        return estimate((number_at(one, path) for one in self.models[model]), scale)

    def found(self, model: str, measure: str, kind: str, way: str, what: str) -> Estimate:
        """What the first positions have by one way of asking."""
        scale = 100 if what == "same next" else 1
        return self.mean(model, "measures", measure, kind, way, what, scale=scale)

    def layers(self, model: str) -> list[str]:
        """The layers that were asked: none where only summaries were kept."""
        found: list[str] = self.models[model][0]["layers"]
        return found

    def ways(self, model: str) -> Iterator[tuple[str, str]]:
        """The ways of asking, and what they are called."""
        for how, title in ((KEYS, "keys only"), (EXACT, "exact")):
            for layer in self.layers(model):
                yield f"{how} {layer}", f"{title}, {layer}"
        yield f"{EXACT} {NETWORK}", "exact, whole network"

    @property
    def compared(self) -> list[str]:
        """The models that were also recorded as summaries."""
        return [name for name, found in self.models.items() if "summaries" in found[0]]

    def tables(self) -> tuple[NumberTable, ...]:
        """All of them."""
        matches = [table(name) for name in self.models for table in (self._summed, self._single)]
        examples = [
            self._example(name, number, example)
            for name, found in self.models.items()
            for number, example in enumerate(found[0]["examples"], 1)
        ]
        accounts = [self._account()] if any(map(self.layers, self.models)) else []
        compared = [self._compared()] if self.compared else []
        tables = (self._models(), *matches, *accounts, self._layers(), *compared, self._books())
        return (*tables, *examples)

    def _models(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = [
            (
                name,
                *(self.mean(name, "quality", kind) for kind in KINDS),
                *(self.mean(name, "right", kind, scale=100) for kind in KINDS),
                self.mean(name, "bytes", scale=1e-6),
                self.mean(name, "attributed", "all", scale=100),
                self.mean(name, "missed", scale=100),
            )
            for name in self.models
        ]
        columns = (
            "model",
            *(f"loss, {kind} text" for kind in KINDS),
            *(f"right after {kind} prompts, %" for kind in KINDS),
            "run, MB",
            "attributed to samples, %",
            "missed by integration, %",
        )
        note = f"Loss in nats a token. Prompts: {self.setting.prompts} of each kind and seed."
        return NumberTable("the models and their runs", columns, tuple(rows), note)

    def _summed(self, model: str) -> NumberTable:
        """The first positions, where repeats are added up."""
        rows: list[tuple[Cell, ...]] = []
        for measure, title in self.ways(model):
            layer, common = measure.partition(" ")[2], None
            if layer in self.models[model][0]["common"]:
                common = self.mean(model, "common", layer, "test", scale=100)
            rows.append(
                (
                    title,
                    *self._matches(model, measure, "summed"),
                    common,
                    self._itself(model, measure),
                )
            )
        for title, shared in (
            ("any position", "shared"),
            ("any with the same next", "shared, same next"),
        ):
            cells: list[Cell] = []
            for kind in KINDS:
                same = self.mean(model, "chance", kind, "same next", scale=100)
                cells += [same if shared == "shared" else 100.0]
                cells += [self.mean(model, "chance", kind, shared)]
            rows.append((title, *cells, None, None))
        columns = ("first ten by", *MATCHES, "test: in both, %", "training: itself in ten, %")
        note = (
            "Repeats are added up. Same next: what is foretold follows that training position. "
            "Shared: so many tokens up to it are the last tokens of the prompt. In both: by keys "
            "only and exactly, in this layer. Itself: of training prompts that are foretold right, "
            "those whose own position is among the first ten; elsewhere it is left out."
        )
        return NumberTable(f"{model}: the first ten training positions", columns, tuple(rows), note)

    def _matches(self, model: str, measure: str, way: str) -> list[Estimate]:
        return [
            self.found(model, measure, kind, way, what)
            for kind in KINDS
            for what in ("same next", "shared")
        ]

    def _itself(self, model: str, measure: str) -> Estimate | None:
        own = (one["measures"][measure]["itself"] for one in self.models[model])
        found = [one["among the first"] for one in own if one["of"]]
        return estimate(found, 100) if found else None

    def _single(self, model: str) -> NumberTable:
        """The first updates: one visit of one position each."""
        rows: list[tuple[Cell, ...]] = [
            (
                title,
                *self._matches(model, measure, "single"),
                *(self.found(model, measure, "test", "single", n) for n in ("distinct", "step")),
            )
            for measure, title in self.ways(model)
        ]
        steps = self.setting.tasks[model].steps
        note = (
            "One update is what one step made of one position. Positions: so many different ones "
            f"are among ten updates. Step: when these updates were, on average, of {steps:,}."
        )
        columns = ("first ten by", *MATCHES, "test: positions", "test: step")
        return NumberTable(f"{model}: the first ten updates", columns, tuple(rows), note)

    def _account(self) -> NumberTable:
        names = {
            "before training": "before training",
            "followed by it": "positions followed by it",
            "others": "other positions",
            "no sample": "no sample",
            "remainder": "remainder",
            "output": "logit",
        }
        rows: list[tuple[Cell, ...]] = [
            (
                model,
                "whole network" if where == NETWORK else f"layer {where}",
                *(self.mean(model, "account", where, part) for part in names),
            )
            for model, found in self.models.items()
            for where in found[0]["account"]
        ]
        return NumberTable(
            "what the logit of the foretold token is made of",
            ("model", "where", *names.values()),
            tuple(rows),
            "Means over all prompts that were asked. Other positions: another token follows them.",
        )

    def _layers(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = []
        for model, found in self.models.items():
            for layer in found[0]["through"]:
                kept, less = self.mean(model, "attributed", layer, scale=100), None
                if model in self.compared:
                    less = self.mean(model, "summaries", "attributed", layer, scale=100)
                rows.append((model, layer, self.mean(model, "through", layer), kept, less))
        columns = ("model", "layer", "added to the logit", "attributed, %", "as summaries, %")
        return NumberTable(
            "layers: what they added, and what is attributed of their change",
            columns,
            tuple(rows),
            "Added: through the whole network, mean over the prompts. Attributed: of the change of "
            "the layer's parameters, the share that samples have; the rest belongs to no sample.",
        )

    def _compared(self) -> NumberTable:
        rows: list[tuple[Cell, ...]] = []
        for model in self.compared:
            sizes = [100 * one["summaries"]["bytes"] / one["bytes"] for one in self.models[model]]
            rows.append((model, "bytes, % of those of all rows", estimate(sizes)))
            for title, path, scale in (
                ("attributed to samples, %", ("attributed", "all"), 100.0),
                ("windows: correlation with all rows", ("windows",), 1.0),
                ("positions: in the first ten of both, %", ("positions",), 100.0),
                ("visits run again that agree by 0.9, %", ("agreeing",), 100.0),
                ("rows beyond the bases, % of those inside", ("beyond",), 100.0),
            ):
                rows.append((model, title, self.mean(model, "summaries", *path, scale=scale)))
        return NumberTable(
            "the same training recorded as summaries",
            ("model", "what", "found"),
            tuple(rows),
            "Windows: what each adds to the logit, through the whole network. Positions: those in "
            f"the {self.setting.zoomed} strongest visits of each prompt, which were run again.",
        )

    def _books(self) -> NumberTable:
        audits = {name: [one["audit"] for one in found] for name, found in self.models.items()}
        for name in self.compared:
            audits[f"{name}, summaries"] = [one["summaries"]["audit"] for one in self.models[name]]
        return balance_table(audits)

    def _example(self, model: str, number: int, example: Mapping[str, Any]) -> NumberTable:
        """A prompt, and the training positions that support what it foretells most."""
        train = self.texts[model]
        prompt = train.written(torch.tensor(example["x"]))
        foretold, following = (train.vocabulary[example[n]] for n in ("foretold", "following"))
        rows: list[tuple[Cell, ...]] = [
            ("the prompt", None, None, Passage(prompt + train.between, foretold, ""))
        ]
        for way, title in (("summed", "repeats added up"), ("single", "one update")):
            for name, places in example[way].items():
                where = (
                    "exact, whole network" if name == NETWORK else f"{_words(name)}, output layer"
                )
                for value, place, *step in places:
                    rows.append(
                        (
                            f"{where}, {title}",
                            step[0] if step else None,
                            value,
                            self._passage(train, place),
                        )
                    )
        said = "rightly" if foretold == following else f"where {following!r} follows"
        return NumberTable(
            f"{model}, {example['kind']} prompt {number}: {foretold!r} is foretold, {said}",
            ("first by", "step", "contribution", "text"),
            tuple(rows),
        )

    def _passage(self, corpus: Corpus, place: int) -> Passage:
        """A training position: the marked token was to be foretold there."""
        before, after = AROUND[corpus.between]
        parts = (
            corpus.tokens[max(0, place + 1 - before) : place + 1],
            corpus.tokens[place + 1 : place + 2],
            corpus.tokens[place + 2 : place + 2 + after],
        )
        left, marked, right = map(corpus.written, parts)
        return Passage(left + corpus.between, marked, corpus.between + right)


def number_at(found: Found, path: Sequence[str]) -> float:
    """What stands at the end of some names.

    >>> number_at({"a": {"b": 2}}, ("a", "b"))
    2.0
    """
    part: Any = found
    for name in path:
        part = part[name]
    return float(part)


def _words(how: str) -> str:
    return "keys only" if how == KEYS else "exact"
