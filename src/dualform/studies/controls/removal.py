"""What retraining says: do reads foretell it (LDS), and what is lost without what they rank first.

The outputs of a retrained network are two numbers for each query: its margin, which the reads are
asked about, and its lead, which is negative where the network is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.evaluate import GroundTruth, Retraining
from dualform.evaluate.scores import ScoresLike, by_position
from dualform.evaluate.workers import Ids, Job, train_all
from dualform.read import Run
from dualform.read.scores import Array
from dualform.studies.controls.experiment import Experiment, lead, margin
from dualform.studies.controls.reads import Reads, cosines
from dualform.studies.parts import Found

FRESH = 1000
"""Added to the seeds of retrained networks: none is that of a network that is explained."""
STACKED = 125
"""How many networks an accelerator trains at once."""
DRAWS = 3
"""How many sets are removed at random, where that is measured for all queries at once."""
ALL, CHANCE, CLASS = "with all", "at random", "at random of its class"


def scores(run: Run, model: nn.Module, experiment: Experiment) -> Reads:
    """(samples, queries) for each read: how much a sample should count for a query's margin."""
    x, y = experiment.queries(experiment.setting.explained)
    last, count = run.layers[-1], len(run.ids)
    keys = by_position(run.spotlight(model, x)[last].keys_only(), count)
    near = cosines(experiment.inputs(), x)
    signs = np.where(experiment.images.y.numpy()[:, None] == y.numpy(), 1.0, -1.0)
    found: dict[str, ScoresLike] = {
        f"keys only, layer {last}": keys,
        f"keys only, layer {last}, sign of the label": signs * keys,
        f"exact, layer {last}": run.spotlight(model, x, _toward(model, x, y))[last].samples(),
        "explain": run.explain(model, x, (margin, y)),
        "influence": run.influence(model, x, (margin, y)),
        "cosine, input space": near,
        "cosine, sign of the label": signs * near,
    }
    return {name: by_position(values, count) for name, values in found.items()}


def _toward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(queries, outputs): the gradient of each margin along the network's outputs."""
    outputs = model(x).detach().requires_grad_()
    found: Tensor
    (found,) = torch.autograd.grad(margin(outputs, y).sum(), outputs)
    return found.cpu()


@dataclass(frozen=True)
class Outcomes:
    """A task of `dualform.evaluate`: trains on some samples, and measures all queries."""

    experiment: Experiment

    @property
    def at_once(self) -> int:
        """An accelerator trains many networks in the time of a few."""
        return 0 if self.experiment.device == "cpu" else STACKED

    def __call__(self, ids: Ids, seed: int) -> Array:
        """Margins of all queries, then their leads."""
        x, y = self._queries
        model = self.experiment.train(FRESH + seed, torch.from_numpy(ids))
        with torch.no_grad():
            return _measured(model(x), y)

    def stacked(self, ids: Sequence[Ids], seeds: Sequence[int]) -> list[Array]:
        """The same for several sets of samples at once."""
        x, y = self._queries
        chosen = [torch.from_numpy(one) for one in ids]
        models = self.experiment.train_stacked(chosen, [FRESH + seed for seed in seeds])
        with torch.no_grad():
            return [_measured(outputs, y) for outputs in models(x.expand(len(ids), *x.shape))]

    @property
    def _queries(self) -> tuple[Tensor, Tensor]:
        return self.experiment.queries(self.experiment.setting.explained)


def _measured(outputs: Tensor, labels: Tensor) -> Array:
    both: Array = torch.cat([margin(outputs, labels), lead(outputs, labels)]).double().cpu().numpy()
    return both


def retrained(experiment: Experiment, folder: Path, workers: int | None) -> GroundTruth:
    """The margins after training on random halves; trainings that are in the folder are kept."""
    setting = experiment.setting
    found = Retraining(
        Outcomes(experiment),
        len(experiment.images),
        folder,
        setting.halves,
        setting.repeats,
        workers=workers,
    ).run()
    margins, _ = np.split(found.runs, 2, axis=2)
    return GroundTruth(found.members, margins)


@dataclass(frozen=True)
class Removals:
    """Trains without the samples that a read ranks first, for a query of each class."""

    experiment: Experiment
    scores: Mapping[str, Array]
    chosen: Sequence[int]
    """The queries that are asked about, as places among those of the scores."""
    workers: int | None

    def at_random(self) -> Found:
        """All queries at once: trained with all samples, and without some at random."""
        jobs = [Job(f"{ALL}, seed {seed}", self._everybody, seed) for seed in self._seeds]
        chance = np.random.default_rng(0)
        for count in self._counts:
            for draw in range(DRAWS):
                left = np.sort(chance.permutation(self._everybody)[count:])
                for seed in self._seeds:
                    jobs.append(Job(f"{CHANCE} {count}, draw {draw}, seed {seed}", left, seed))
        found = self._trained(jobs)
        return {
            ALL: [found[f"{ALL}, seed {seed}"].tolist() for seed in self._seeds],
            CHANCE: {
                str(count): [
                    [found[f"{CHANCE} {count}, draw {d}, seed {s}"].tolist() for d in range(DRAWS)]
                    for s in self._seeds
                ]
                for count in self._counts
            },
        }

    def of_query(self, place: int) -> Found:
        """Margin and lead of one query without what each read ranks first: by read and count."""
        query = self.chosen[place]
        orders = dict(self._orders(query))
        jobs = {
            (name, count, seed): Job(f"{name}, {count}, seed {seed}", np.sort(order[count:]), seed)
            for name, order in orders.items()
            for count in self._counts
            for seed in self._seeds
        }
        found = self._trained(list(jobs.values()))
        return {
            name: {
                str(count): [
                    found[jobs[name, count, seed].name].reshape(2, -1)[:, query].tolist()
                    for seed in self._seeds
                ]
                for count in self._counts
            }
            for name in orders
        }

    def _orders(self, query: int) -> Iterator[tuple[str, Ids]]:
        """All samples, those first that are removed first."""
        for name, values in self.scores.items():
            yield name, np.argsort(-values[:, query], kind="stable")
        chance = np.random.default_rng(1 + query).permutation(self._everybody)
        same = self.experiment.images.y.numpy() == int(self._labels[query])
        yield CLASS, np.concatenate([chance[same[chance]], chance[~same[chance]]])

    def _trained(self, jobs: Sequence[Job]) -> dict[str, Any]:
        found: dict[str, Array] = {}
        task = Outcomes(self.experiment)
        train_all(task, jobs, lambda job, outputs: found.update({job.name: outputs}), self.workers)
        return found

    @cached_property
    def _everybody(self) -> Ids:
        return np.arange(len(self.experiment.images))

    @cached_property
    def _labels(self) -> Tensor:
        return self.experiment.queries(self.experiment.setting.explained)[1]

    @property
    def _counts(self) -> Sequence[int]:
        return self.experiment.setting.removed

    @property
    def _seeds(self) -> range:
        return range(self.experiment.setting.removals)


def least_sure(margins: Array, labels: Tensor) -> list[int]:
    """Of each class, the query with the least margin that is not negative; else the largest.

    >>> least_sure(np.array([3.0, -1.0, 2.0, -2.0]), torch.tensor([0, 0, 0, 1]))
    [2, 3]
    """
    found = []
    for one in sorted(set(labels.tolist())):
        own = np.flatnonzero(labels.numpy() == one)
        fine = own[margins[own] >= 0]
        found.append(int(fine[margins[fine].argmin()] if len(fine) else own[margins[own].argmax()]))
    return found
