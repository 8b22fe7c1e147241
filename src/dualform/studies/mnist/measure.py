"""What is trained with each seed, and what is read of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.read import Run, open_run
from dualform.recording import describe
from dualform.studies.class_parts import class_parts
from dualform.studies.classifiers import train, trained_model, whole_batches
from dualform.studies.data import Images, first_of_each
from dualform.studies.linear_layers import sensitivities
from dualform.studies.mnist.examples import examples
from dualform.studies.mnist.setting import CLASSES, WATCHED, MnistSetting
from dualform.studies.mnist.votes import (
    NETWORK,
    AskedImages,
    alike,
    by_influence,
    of_classes,
    said,
    scores_of,
    strongest_of_classes,
)
from dualform.studies.parts import Found

WRONG = 2
"""How many wrong test images are shown with the training images they attend to."""
ASKED = 12
"""How many wrong test images are among the queries for the explorer."""


@dataclass(frozen=True)
class MnistMeasurement:
    """Trains, reads, and takes runs away again, but for that of the first seed."""

    setting: MnistSetting
    images: Images
    tests: Images
    device: str
    out: Path

    def seed(self, seed: int) -> Found:
        """One training, and what its ledger says."""
        path = self.out / ("run" if seed == 0 else f"scratch-{seed}")
        training = self.setting.training
        train(self.images, self._batches(seed), training, seed, path, device=self.device)
        run = open_run(path, self.device)
        model = trained_model(training, run, self.device)
        outputs = self._outputs(model)
        asked = self._asked(outputs, seed)
        parts = class_parts(run, dict(enumerate(self.images.y.tolist())))
        amounts = parts.by_layer(model, asked.x)
        amounts[NETWORK] = parts.through_network(run, model, asked.x)
        found: Found = {
            "accuracy": float((outputs.argmax(1) == self.tests.y).float().mean()),
            "asked": _counts(asked),
            "audit": self._audit(run),
            "missed": self._missed(run, asked, outputs, amounts[NETWORK]),
            "said": [*self._said(run, model, asked, amounts, seed)],
            "alike": [*self._alike(run, model, asked.first(self.setting.compared))],
        }
        if seed == 0:
            shown = self._shown(asked)
            found["examples"] = examples(run, model, shown, self._labels(run))
            names = [self.images.classes[label] for label in self.images.y.tolist()]
            describe(path, ids=range(len(names)), labels=names)
            self._save_queries(asked)
        else:
            shutil.rmtree(path)
        return found

    def _said(
        self,
        run: Run,
        model: nn.Module,
        asked: AskedImages,
        amounts: Mapping[str, Tensor],
        seed: int,
    ) -> Iterator[Found]:
        """What classes say, by every measure.

        Args:
            amounts: (queries, outputs, classes) for each layer, and the network.
        """
        labels = self._labels(run)
        visits = torch.bincount(self.images.y, self._visits(seed), minlength=CLASSES)
        for layer, reading in run.spotlight(model, asked.x).items():
            values = torch.from_numpy(reading.keys_only().values)
            sums = of_classes(values, labels)
            yield said("keys", layer, sums, asked)
            yield said("keys mean", layer, sums / visits, asked)
            yield said("keys strongest", layer, strongest_of_classes(values, labels), asked)
        yield said("keys unscaled", run.layers[0], self._unscaled(asked, seed), asked)
        for where, own in amounts.items():
            for measure, scores in scores_of(own, asked).items():
                yield said(measure, where, scores, asked)
        if seed < self.setting.influence_seeds:
            few = asked.first(self.setting.influenced)
            scored = scores_of(by_influence(run, model, few, labels), few)
            for measure in ("own", "given"):
                yield said(f"{measure} influence", NETWORK, scored[measure], few)

    def _alike(self, run: Run, model: nn.Module, asked: AskedImages) -> Iterator[Found]:
        """Whether the strongest training images have the class of the test image."""
        labels = self._labels(run)
        directions = sensitivities(model, asked.x, asked.given)
        for layer, reading in run.spotlight(model, asked.x).items():
            yield alike("keys", layer, reading.keys_only().values, asked, labels)
        for layer, direction in directions.items():
            reading = run.spotlight(model, asked.x, direction)[layer]
            yield alike("given", layer, reading.samples().values, asked, labels)

    def _asked(self, outputs: Tensor, seed: int) -> AskedImages:
        """Test images by chance: as many as the setting says that are right, and that are wrong."""
        order = torch.randperm(len(self.tests), generator=torch.Generator().manual_seed(seed))
        x, given = self.tests.inputs().to(self.device), outputs.argmax(1)
        every = AskedImages(torch.arange(len(self.tests)), x, self.tests.y, given)
        return every.some(order).first(self.setting.asked)

    def _shown(self, asked: AskedImages) -> AskedImages:
        """The first that is right of the watched class, and some that are wrong."""
        right = asked.right & (asked.targets == WATCHED)
        first = torch.nonzero(right).flatten()[:1]
        return asked.some(torch.cat([first, torch.nonzero(~asked.right).flatten()[:WRONG]]))

    def _save_queries(self, asked: AskedImages) -> None:
        """For the explorer: some that are wrong, and one that is right of each class."""
        wrong = torch.nonzero(~asked.right).flatten()[:ASKED]
        right = torch.nonzero(asked.right).flatten()
        shown = asked.some(torch.cat([wrong, right[first_of_each(asked.targets[right], 1)]]))
        names = self.tests.classes
        titles = [
            f"test image {image}: {names[target]}"
            + (f", taken for {names[given]}" if given != target else "")
            for image, target, given in zip(
                *(part.tolist() for part in (shown.images, shown.targets, shown.given)), strict=True
            )
        ]
        labels = np.array([names[target] for target in shown.targets.tolist()])
        x = shown.x.cpu().numpy()
        np.savez(
            self.out / "queries.npz",
            x=x,
            labels=labels,
            titles=np.array(titles),
            outputs=np.array(names),
        )

    def _missed(self, run: Run, asked: AskedImages, outputs: Tensor, amounts: Tensor) -> float:
        """How much of the change of outputs the sums of all classes miss, relative to it."""
        before = self._outputs(trained_model(self.setting.training, run.at(0), self.device))
        change = (outputs - before)[asked.images]
        return float((amounts.sum(2) - change).norm() / change.norm())

    def _outputs(self, model: nn.Module) -> Tensor:
        """(images, classes): what a network gives for all test images."""
        with torch.no_grad():
            found: Tensor = model(self.tests.inputs().to(self.device)).cpu()
        return found

    def _audit(self, run: Run) -> dict[str, Any]:
        audit = run.audit()
        books = {
            book.name: {"remainder": book.remainder, "rounding": book.rounding}
            for book in audit.books
        }
        return {"coverage": audit.coverage, "books": books}

    def _labels(self, run: Run) -> Tensor:
        """The class of each training image, in the order of the run."""
        return self.images.y[torch.tensor([int(sample) for sample in run.ids])]

    def _batches(self, seed: int) -> Iterator[Tensor]:
        ids, batch = torch.arange(len(self.images)), self.setting.training.batch
        return whole_batches(ids, batch, torch.Generator().manual_seed(seed))

    def _unscaled(self, asked: AskedImages, seed: int) -> Tensor:
        """(queries, classes): the first layer's keys only, if pixels went from −1 to 1.

        What the first layer sees is known without training.
        """
        train, tests = (Images(part.pixels, part.y, ()) for part in (self.images, self.tests))
        similar = (train.inputs() @ tests.some(asked.images).inputs().T).abs()
        return of_classes(similar * self._visits(seed)[:, None], train.y)

    def _visits(self, seed: int) -> Tensor:
        """(training images,): how often training saw each."""
        seen = torch.cat([*islice(self._batches(seed), self.setting.training.steps)])
        return seen.bincount(minlength=len(self.images))


def _counts(asked: AskedImages) -> dict[str, int]:
    return {"right": int(asked.right.sum()), "wrong": int((~asked.right).sum())}
