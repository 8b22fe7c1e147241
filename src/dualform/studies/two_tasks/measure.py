"""What is trained with each seed, and what is read of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dualform
from dualform.read import Run, open_run
from dualform.studies.balance import audited
from dualform.studies.classifiers import train, trained_model
from dualform.studies.data import first_of_each
from dualform.studies.parts import Found
from dualform.studies.two_tasks.attention import ImageQueries, attention
from dualform.studies.two_tasks.overwriting import examples, margins, stage
from dualform.studies.two_tasks.tasks import (
    GROUPS,
    OUTPUTS,
    TASKS,
    Tasks,
    TwoTasksSetting,
)

POINTS = 10
"""How often the network is tested along a sequence, at equal distances."""
EXAMPLES = 4
"""How many forgotten digits are shown with the images that took them."""
FIRST = 12
"""How many forgotten digits are among the queries for the explorer."""
FORGOTTEN, KEPT = "forgotten", "kept"
"""What became of a digit that was right at the switch."""


@dataclass(frozen=True)
class TwoTasksMeasurement:
    """Trains, reads, and takes runs away again, but for that of the first sequence."""

    setting: TwoTasksSetting
    tasks: Tasks
    tests: Tasks
    device: str
    out: Path

    def together(self, seed: int) -> Found:
        """Training on both tasks at once."""
        training, steps = self.setting.training, self.setting.together
        path = self.out / f"scratch-together-{seed}"
        self._train(path, self.tasks.batches(training.batch, seed), steps, seed)
        run = open_run(path, self.device)
        seen = torch.cat([*islice(self.tasks.batches(training.batch, seed), steps)])
        visits = (seen < len(self.tasks.digits)).float().mean()
        found = {**self._read(run, float(visits)), "audit": audited(run.audit())}
        shutil.rmtree(path)
        return found

    def in_sequence(self, seed: int) -> Found:
        """Digits, then garments; read at the switch and after each of the setting's steps."""
        setting, switch = self.setting, self.setting.switch
        path = self.out / ("run" if seed == 0 else f"scratch-{seed}")
        batches = self.tasks.in_sequence(switch, setting.training.batch, seed)
        self._train(path, batches, max(setting.ends), seed)
        run = open_run(path, self.device)
        start, before = run.at(0), run.at(switch)
        ends = {end: run.at(end) for end in setting.ends}
        reads = {switch: before, **ends}
        digits = self._queries(setting.queries, digits=True)
        found: Found = {
            "reads": {step: self._read(read, switch / step) for step, read in reads.items()},
            "audit": audited(run.audit()),
            "path": self._path(run),
            "built": stage(start, before, self._model(before), digits, self._groups),
            "ends": {end: self._overwritten(before, after) for end, after in ends.items()},
        }
        if seed == 0:
            found["examples"] = self._examples(before, ends[max(ends)])
            self._describe(before, ends[max(ends)])
        else:
            shutil.rmtree(path)
        return found

    def _model(self, run: Run) -> nn.Module:
        """The network as of the step that a run is read at."""
        return trained_model(self.setting.training, run, self.device)

    def _train(self, path: Path, batches: Iterator[Tensor], steps: int, seed: int) -> None:
        training = replace(self.setting.training, steps=steps)
        train(self.tasks.images, batches, training, seed, path, device=self.device)

    def _read(self, run: Run, visits: float) -> dict[str, Any]:
        """Accuracy and attention as of a step; `visits` is the digits' share of all visits."""
        model = self._model(run)
        queries, explained = (
            self._queries(count) for count in (self.setting.queries, self.setting.explained)
        )
        return {
            "accuracy": self._accuracy(model),
            "visits": visits,
            "attention": attention(run, model, queries, explained, self._groups),
        }

    def _path(self, run: Run) -> list[dict[str, Any]]:
        """Accuracy, and the mean output of test digits for their class, along the training."""
        digits = self._queries(self.setting.queries, digits=True)
        even = np.linspace(0, run.steps, POINTS + 1).round().astype(int).tolist()
        found = []
        for step in sorted({*even, self.setting.switch, *self.setting.ends}):
            model = self._model(run.at(step))
            with torch.no_grad():
                outputs = model(digits.x).cpu().gather(1, digits.outputs[:, None])
            found.append({"step": step, "output": float(outputs.mean()), **self._accuracy(model)})
        return found

    def _overwritten(self, before: Run, after: Run) -> dict[str, Any]:
        """What was overwritten from the switch to a later step."""
        model, groups = self._model(after), self._groups
        digits = self._queries(self.setting.queries, digits=True)
        last = after.timeline(model, digits.x, output=digits.outputs).values.mean(1)
        found = {
            "stage": stage(before, after, model, digits, groups),
            "last layer": last.tolist(),
        }
        for name, chosen, rivals in self._outcomes(before, after):
            some = chosen[: self.setting.explained_margins]
            found[name] = {"of": len(chosen)}
            if len(some):
                own = self._images(some)
                found[name] |= margins(before, after, model, own, rivals[: len(some)], groups)
        return found

    def _outcomes(self, before: Run, after: Run) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Test digits that were right at the switch, by what became of them, and their rivals.

        The rival is the class with most output other than their own: the one that they are taken
        for if they are wrong.
        """
        y = self.tests.digits.y
        right = self._outputs(self._model(before))[: len(y)].argmax(1) == y
        outputs = self._outputs(self._model(after))[: len(y)]
        wrong = outputs.argmax(1) != y
        rivals = outputs.scatter(1, y[:, None], -torch.inf).argmax(1)
        for name, chosen in ((FORGOTTEN, right & wrong), (KEPT, right & ~wrong)):
            yield name, torch.nonzero(chosen).flatten(), rivals[chosen]

    def _examples(self, before: Run, after: Run) -> list[dict[str, Any]]:
        """Forgotten digits that are taken for different classes, and what took them."""
        _, lost, rivals = next(self._outcomes(before, after))
        if not len(lost):
            return []
        chosen = first_of_each(rivals, 1)[:EXAMPLES]
        images, own = lost[chosen], self._images(lost[chosen])
        names = images.tolist()
        return examples(before, after, self._model(after), own, rivals[chosen], names)

    def _describe(self, before: Run, after: Run) -> None:
        """Class names for the run's samples, and queries: what the explorer shows."""
        groups = self.tasks.groups.tolist()
        columns = {"task": [TASKS[group // OUTPUTS] for group in groups]}
        columns["output"] = [str(group % OUTPUTS) for group in groups]
        names = [GROUPS[group] for group in groups]
        dualform.describe(after.path, ids=range(len(groups)), labels=names, columns=columns)
        _, lost, rivals = next(self._outcomes(before, after))
        each = first_of_each(self.tests.groups, 1)
        shown = torch.cat([lost[:FIRST], each])
        labels = [GROUPS[group] for group in self.tests.groups[shown].tolist()]
        taken = [f", taken for output {rival}" for rival in rivals[:FIRST].tolist()]
        titles = [
            f"test image {at}: {name}" for at, name in zip(shown.tolist(), labels, strict=True)
        ]
        titles = [f"{title}{more}" for title, more in zip_longest(titles, taken, fillvalue="")]
        x = self._inputs[shown].cpu().numpy()
        shared = [f"{at}, {GROUPS[OUTPUTS + at]}" for at in range(OUTPUTS)]
        np.savez(
            self.out / "queries.npz",
            x=x,
            labels=np.array(labels),
            titles=np.array(titles),
            outputs=np.array(shared),
        )

    def _accuracy(self, model: nn.Module) -> dict[str, float]:
        """The share of test images that are right, by task."""
        right = self._outputs(model).argmax(1) == self.tests.images.y
        parts = torch.split(right, [len(self.tests.digits), len(self.tests.garments)])
        return {task: float(part.float().mean()) for task, part in zip(TASKS, parts, strict=True)}

    def _outputs(self, model: nn.Module) -> Tensor:
        """(images, outputs): what a network gives for all test images."""
        with torch.no_grad():
            found: Tensor = model(self._inputs).cpu()
        return found

    def _queries(self, count: int, digits: bool = False) -> ImageQueries:
        """So many test images of each class (of digits only)."""
        groups = self.tests.digits.y if digits else self.tests.groups
        return self._images(first_of_each(groups, count))

    def _images(self, chosen: Tensor) -> ImageQueries:
        """Some test images."""
        return ImageQueries(self._inputs[chosen.to(self.device)], self.tests.groups[chosen])

    @cached_property
    def _inputs(self) -> Tensor:
        return self.tests.images.inputs().to(self.device)

    @cached_property
    def _groups(self) -> dict[int, int]:
        """The class of each training sample."""
        return dict(enumerate(self.tasks.groups.tolist()))
