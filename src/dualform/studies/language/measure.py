"""What is trained with each seed, and what is read of it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dualform.read import Audit, Run, open_run
from dualform.read.explain import Explanation, by_layer
from dualform.read.scores import Array, Check
from dualform.recording.keep import Keep, summaries
from dualform.studies.balance import audited
from dualform.studies.language.asking import explained, last_readings, network_questions
from dualform.studies.language.evidence import (
    PlaceEvidence,
    RowEvidence,
    ZoomedEvidence,
    zoomed_evidence,
)
from dualform.studies.language.matches import TrainingPlaces, itself, mean_of, measured, overlap
from dualform.studies.language.prompts import KINDS, Prompts, draw_prompts
from dualform.studies.language.tasks import (
    LanguageData,
    LanguageSetting,
    LanguageTask,
    load_task,
)
from dualform.studies.language.training import train_language_model, window_loss
from dualform.studies.parts import Found
from dualform.studies.texts import Windows, visible

SUMMARIES = summaries(numbers="rows")
"""Not rounded, so that they are those of the gradients to 1e-5."""
NETWORK = "network"
"""What stands for the whole network among the layers."""
KEYS, EXACT = "keys", "exact"
SHOWN = 2
"""Of how many prompts of each kind the evidence is printed."""
PRINTED = 3
"""How many training positions are printed for each way of asking."""
TESTED = 50
"""How many windows the loss is measured on."""


@dataclass(frozen=True)
class LanguageMeasurement:
    """Trains one model with each seed, reads it, and takes runs away again, but for the first."""

    setting: LanguageSetting
    name: str
    folder: Path
    """Where the data are."""
    device: str
    out: Path

    def measure(self, seed: int) -> Found:
        """All that is found with one seed."""
        path = self.out / (self.name if seed == 0 else f"scratch-{self.name}-{seed}")
        model = self._train(seed, path, self.task.keep)
        run = open_run(path, self.device)
        prompts, audit = self._prompts(model, seed), run.audit()
        found: Found = {
            "quality": self._quality(model),
            "bytes": audit.bytes,
            "audit": audited(audit),
            "attributed": _attributed(run, audit),
            "right": {
                kind: float(prompts.right[prompts.of_kind(kind)].float().mean()) for kind in KINDS
            },
        }
        if self.task.keep == "rows":
            found |= self._read(run, model, prompts, seed)
        else:
            found |= self._read_summaries(run, model, prompts)
        if seed == 0:
            self._save_queries(prompts)
        else:
            shutil.rmtree(path)
        return found

    @cached_property
    def task(self) -> LanguageTask:
        """The model's text and training."""
        return self.setting.tasks[self.name]

    @cached_property
    def data(self) -> LanguageData:
        """Its text."""
        return load_task(self.folder, self.task, self.setting.context)

    @property
    def trained(self) -> int:
        """At how many places of its text it is trained."""
        task, windows = self.task, self.data.windows
        return task.batch * (len(windows) // task.batch) * task.unroll

    def _train(self, seed: int, path: Path, keep: Keep) -> nn.Module:
        return train_language_model(self.data, self.task, seed, path, keep, self.device)

    def _prompts(self, model: nn.Module, seed: int) -> Prompts:
        setting = self.setting
        return draw_prompts(
            model, self.data, self.task, setting.prompts, setting.context, seed, self.device
        )

    def _places(self, prompts: Prompts) -> TrainingPlaces:
        return TrainingPlaces(self.data.train.tokens, self.trained, prompts)

    def _quality(self, model: nn.Module) -> dict[str, float]:
        """The loss, in nats a token, on windows of both texts."""
        test = Windows(self.data.test.tokens, self.task.unroll)
        pairs = zip(("training", "test"), (self.data.windows, test), strict=True)
        return {name: self._loss(model, windows) for name, windows in pairs}

    @torch.no_grad()
    def _loss(self, model: nn.Module, windows: Windows) -> float:
        some = range(min(TESTED, len(windows)))
        logits = model(windows.inputs(some).to(self.device)).cpu()
        return float(cross_entropy(logits.flatten(0, 1), windows.targets(some).flatten()))

    def _read(self, run: Run, model: nn.Module, prompts: Prompts, seed: int) -> Found:
        """Evidence by rows: of each layer, by keys and exactly, and of the whole network."""
        places, measures = self._places(prompts), dict[str, Any]()
        kinds = {kind: prompts.of_kind(kind) for kind in KINDS}
        steps = itertools.islice(self.task.batches(self.data.windows, seed), self.task.steps)
        seen = [ids for ids, _ in steps]
        rows = RowEvidence(run, seen, self.task.unroll, len(self.data.train))
        readings, kept, common = last_readings(run, model, prompts), dict[str, PlaceEvidence](), {}
        for layer, reading in readings.items():
            kept = {KEYS: rows.keys(reading), EXACT: rows.exact(reading)}
            for how, evidence in kept.items():
                measures[f"{how} {layer}"] = self._measured(evidence, places, kinds)
            common[layer] = {
                kind: overlap((kept[KEYS], kept[EXACT]), places, at) for kind, at in kinds.items()
            }
        some, each = prompts.some(self.setting.explained), self.setting.explained
        asked = network_questions(run, model, some)
        network, books = rows.network(asked)
        found = self._read_network(network, some)
        check, last = asked.check(network.values.sum(0)), [*readings][-1]
        at = [number for kind in KINDS for number in kinds[kind][:each]]
        ways = {name: evidence.only(at) for name, evidence in kept.items()} | {NETWORK: network}
        found |= {
            "layers": [*readings],
            "common": common,
            "account": {
                last: _account(kept[EXACT], readings[last].check, places),
                NETWORK: _account(network, check, self._places(some)),
            },
            "through": _means(by_layer(books, run.source.ledger.info.books)),
            "missed": float(asked.line.completeness.median()),
            "examples": self._examples(some, ways),
        }
        found["measures"] = measures | found["measures"]
        if self.name in self.setting.again:
            found["summaries"] = self._again(seed, network, some)
        return found

    def _read_network(self, network: PlaceEvidence, some: Prompts) -> Found:
        """What the evidence through the whole network has, and what is due to chance."""
        places, kinds = self._places(some), {kind: some.of_kind(kind) for kind in KINDS}
        chance = {
            kind: mean_of([places.chance(at) for at in chosen]) for kind, chosen in kinds.items()
        }
        measures = {f"{EXACT} {NETWORK}": self._measured(network, places, kinds)}
        return {"measures": measures, "chance": chance}

    def _measured(
        self, evidence: PlaceEvidence, places: TrainingPlaces, kinds: Mapping[str, Sequence[int]]
    ) -> dict[str, Any]:
        right = [at for at in kinds["training"] if bool(places.prompts.right[at])]
        found = {kind: measured(evidence, places, at) for kind, at in kinds.items()}
        return {**found, "itself": itself(evidence, places, right)}

    def _zoom(self, explanation: Explanation, run: Run, model: nn.Module) -> ZoomedEvidence:
        return zoomed_evidence(
            explanation,
            run,
            model,
            window_loss(self.data, self.task, self.device),
            self.setting.zoomed,
            self.task.unroll,
            len(self.data.train),
        )

    def _read_summaries(self, run: Run, model: nn.Module, prompts: Prompts) -> Found:
        """Evidence by summaries: the whole network, and the positions of the strongest visits."""
        some = prompts.some(self.setting.explained)
        explanation = explained(run, model, some)
        zoomed = self._zoom(explanation, run, model)
        layers = explanation.by_layer
        return self._read_network(zoomed.evidence, some) | {
            "layers": [],
            "common": {},
            "account": {},
            "through": _means(dict(zip(map(str, layers.ids), layers.values, strict=True))),
            "missed": float(np.median(explanation.completeness)),
            "examples": self._examples(some, {NETWORK: zoomed.evidence}),
            "zoomed": {"agreeing": zoomed.agreeing, "beyond": zoomed.beyond},
        }

    def _again(self, seed: int, exact: PlaceEvidence, some: Prompts) -> dict[str, Any]:
        """The same training recorded as summaries: what is left of the evidence, at what size."""
        path = self.out / f"scratch-{self.name}-{seed}-summaries"
        model = self._train(seed, path, SUMMARIES)
        run = open_run(path, self.device)
        explanation, audit = explained(run, model, some), run.audit()
        zoomed, places = self._zoom(explanation, run, model), self._places(some)
        whole = exact.sums[: len(self.data.windows) * self.task.unroll]
        whole = whole.reshape(-1, self.task.unroll, len(some)).sum(1)
        pairs = zip(whole[[int(i) for i in run.source.ids]].T, explanation.values.T, strict=True)
        found = {
            "bytes": audit.bytes,
            "audit": audited(audit),
            "attributed": _attributed(run, audit),
            "windows": float(np.mean([np.corrcoef(one, other)[0, 1] for one, other in pairs])),
            "positions": overlap((exact, zoomed.evidence), places, range(len(some))),
            "agreeing": zoomed.agreeing,
            "beyond": zoomed.beyond,
        }
        shutil.rmtree(path)
        return found

    def _examples(self, some: Prompts, ways: Mapping[str, PlaceEvidence]) -> list[dict[str, Any]]:
        """For a few prompts the positions that support them most, by each way of asking."""
        places = self._places(some)
        shown = [at for kind in KINDS for at in some.of_kind(kind)[:SHOWN]]
        return [
            {
                "kind": KINDS[int(some.places[at] >= 0)],
                "x": some.x[at].tolist(),
                "foretold": int(some.foretold[at]),
                "following": int(some.following[at]),
                "summed": {
                    name: [
                        (float(evidence.sums[place, at]), place)
                        for place in places.first(evidence.sums[:, at], at)[:PRINTED]
                    ]
                    for name, evidence in ways.items()
                },
                "single": {
                    name: evidence.largest(at, PRINTED, but=int(some.places[at]))
                    for name, evidence in ways.items()
                },
            }
            for at in shown
        ]

    def _save_queries(self, prompts: Prompts) -> None:
        """The prompts, for the explorer: with what is foretold, and their texts."""
        corpus = self.data.train
        texts = [corpus.written(x) for x in prompts.x]
        words = [corpus.vocabulary[token] for token in prompts.foretold.tolist()]
        kinds = [KINDS[int(place >= 0)] for place in prompts.places]
        titles = [
            f"{kind} prompt {at}, foretells '{visible(word)}'"
            for at, (kind, word) in enumerate(zip(kinds, words, strict=True))
        ]
        np.savez(
            self.out / f"{self.name}.npz",
            x=prompts.x.numpy(),
            titles=np.array(titles),
            texts=np.array(texts),
            outputs=np.array([visible(word) for word in corpus.vocabulary]),
        )


def _attributed(run: Run, audit: Audit) -> dict[str, float]:
    """The share of the change of each layer's parameters that samples have, and of all."""
    layers = dict[str, list[str]]()
    for book in run.source.ledger.info.books:
        layers.setdefault(next(iter(book.terms), ""), []).append(book.name)
    return {"all": audit.attributed} | {
        layer: replace(audit, books=[b for b in audit.books if b.name in books]).attributed
        for layer, books in layers.items()
    }


def _account(evidence: PlaceEvidence, check: Check, places: TrainingPlaces) -> dict[str, float]:
    """What the logit is made of on average; positions by whether what is foretold follows them."""
    same = [
        evidence.sums[: places.count, at][places.same_next(at)].sum()
        for at in range(len(places.prompts))
    ]
    return {
        "before training": float(check.initial.mean()),
        "followed by it": float(np.mean(same)),
        "others": float(check.evidence.mean() - np.mean(same)),
        "no sample": float(check.steps.mean()),
        "remainder": float(check.remainder.mean()),
        "output": float(check.total.mean()),
    }


def _means(values: Mapping[str, Array]) -> dict[str, float]:
    return {name: float(part.mean()) for name, part in values.items()}
