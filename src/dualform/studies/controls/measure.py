"""What is trained with each seed, and what is read of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dualform
from dualform.read import Run, open_run
from dualform.studies.balance import audited
from dualform.studies.controls.experiment import Experiment, lead, others, right
from dualform.studies.controls.left_out import left_out
from dualform.studies.controls.reads import (
    Reads,
    agreement,
    answered,
    exact,
    explained,
    in_input_space,
    keys_only,
    nearest,
    readings,
    similar,
)
from dualform.studies.controls.removal import least_sure, scores
from dualform.studies.data import Images
from dualform.studies.parts import Found

TRUE, RANDOM, UNTRAINED = "true labels", "random labels", "untrained"
"""What a network was trained on."""


@dataclass(frozen=True)
class ControlsMeasurement:
    """Trains, reads, and takes runs away again, but for those of the first seed."""

    experiment: Experiment
    out: Path

    def true_labels(self, seed: int) -> Found:
        """A network trained on digits; also what the plain formula says of it, and its scores."""
        experiment, setting = self.experiment, self.experiment.setting
        path = self._path("run", seed)
        model = experiment.train(seed, path=path)
        run = open_run(path, experiment.device)
        found = self._read(run, model, seed, experiment.images)
        x, y = experiment.queries(setting.explained)
        found["left out"] = left_out(run, readings(run, model, x, y))
        np.savez(self._scores(seed), **scores(run, model, experiment))  # type: ignore[arg-type]
        with torch.no_grad():
            leads = lead(model(x), y).double().cpu().numpy()
        found["least sure"] = least_sure(leads, y)
        if seed == 0:
            self._describe(run, model, experiment.images)
        else:
            shutil.rmtree(path)
        return found

    def random_labels(self, seed: int) -> Found:
        """A network trained on the same digits, with the labels of others."""
        experiment = self.experiment
        path, images = self._path("random-labels", seed), experiment.shuffled_labels(seed)
        model = experiment.train(seed, None, experiment.setting.memorizing, images, path)
        run = open_run(path, experiment.device)
        found = self._read(run, model, seed, images)
        if seed == 0:
            self._describe(run, model, images)
        else:
            shutil.rmtree(path)
        return found

    def untrained(self, seed: int) -> Found:
        """The network before its first step: it has no ledger, so its layers are compared."""
        experiment = self.experiment
        model = experiment.untrained(seed)
        x, y = self._tested
        found = similar(model, experiment.inputs(), x) | self._without_ledger(model)
        wanted = {"target": y, "output": answered(model, x)}
        return {
            "accuracy": self._accuracy(model, experiment.images),
            "by class": agreement(found, experiment.images.y, wanted),
        }

    def load_scores(self, seed: int) -> Reads:
        """The scores that a part has kept: (samples, queries) for each read."""
        with np.load(self._scores(seed), allow_pickle=False) as kept:
            return dict(kept)

    def _read(self, run: Run, model: nn.Module, seed: int, images: Images) -> Found:
        """How often each read's answer is the target, or the network's, or what it was asked for.

        Training images count for their label, as it was given, and for their true class.
        """
        x, y = self._tested
        output = answered(model, x)
        found = keys_only(run, model, x) | self._without_ledger(model)
        found |= exact(run, model, x, output)
        few, own = self.experiment.queries(self.experiment.setting.explained)
        through = explained(run, model, few, answered(model, few))
        result: Found = {
            "accuracy": self._accuracy(model, images),
            "audit": audited(run.audit()),
            "asked": self._asked_for_another(run, model, seed, images),
        }
        for name, labels in (("by label", images.y), ("by class", self.experiment.images.y)):
            wanted = {"target": y, "output": output}
            whole = {"target": own, "output": answered(model, few)}
            result[name] = agreement(found, labels, wanted) | agreement(through, labels, whole)
        return result

    def _asked_for_another(
        self, run: Run, model: nn.Module, seed: int, images: Images
    ) -> dict[str, dict[str, float]]:
        """The answers of exact reads that are asked about a class which is not the network's."""
        found: dict[str, dict[str, float]] = {}
        for count, read in (
            (self.experiment.setting.tested, exact),
            (self.experiment.setting.explained, explained),
        ):
            x, _ = self.experiment.queries(count)
            output = answered(model, x)
            another = others(output, seed)
            wanted = {"asked for": another, "output": output}
            found |= agreement(read(run, model, x, another), images.y, wanted)
        return found

    def _without_ledger(self, model: nn.Module) -> Reads:
        """The reads that need no ledger, but for the keys of the layers."""
        keys, (x, _) = self.experiment.inputs(), self._tested
        return nearest(model, keys, x) | in_input_space(keys, x)

    def _accuracy(self, model: nn.Module, images: Images) -> dict[str, float]:
        experiment = self.experiment
        return {
            "training": right(model, images, experiment.device),
            "test": right(model, experiment.test, experiment.device),
            "tested": float((answered(model, self._tested[0]) == self._tested[1]).float().mean()),
        }

    def _describe(self, run: Run, model: nn.Module, images: Images) -> None:
        """True classes for the run's samples, and queries: what the explorer shows."""
        classes = self.experiment.images
        columns: dict[str, Any] = {"digit": [str(label) for label in classes.y.tolist()]}
        dualform.describe(run.path, ids=range(len(images)), labels=images.y, columns=columns)
        x, y = self.experiment.queries(self.experiment.setting.explained)
        titles = [
            f"test digit {label}" + (f", taken for {own}" if own != label else "")
            for label, own in zip(y.tolist(), answered(model, x).tolist(), strict=True)
        ]
        np.savez(
            run.path.with_suffix(".npz"),
            x=x.cpu().numpy(),
            labels=y.numpy(),
            titles=np.array(titles),
        )

    def _path(self, name: str, seed: int) -> Path:
        return self.out / (name if seed == 0 else f"scratch-{name}-{seed}")

    def _scores(self, seed: int) -> Path:
        return self.out / f"scores-{seed}.npz"

    @cached_property
    def _tested(self) -> tuple[Tensor, Tensor]:
        return self.experiment.queries(self.experiment.setting.tested)
