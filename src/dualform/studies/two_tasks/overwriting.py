"""What the later task took from the earlier one: outputs on the timeline, and digits forgotten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.read import Run
from dualform.read.grouping import BySample, ByStep
from dualform.read.scores import Array
from dualform.studies.class_parts import by_group
from dualform.studies.two_tasks.attention import ImageQueries
from dualform.studies.two_tasks.change import by_layer, change_between
from dualform.studies.two_tasks.tasks import GROUPS, OUTPUTS

TOGETHER = 100
"""How many averaged gradients are held at a time."""
ROLES = ("digits of its class", "other digits", "garments with its output", "other garments")
"""Training samples, as a test digit sees them that is asked for the output of its class."""
CULPRITS = (
    "garments with its rival's output",
    "garments with its own output",
    "other garments",
    "digits, by momentum",
)
"""Training samples, as a digit sees them; its rival is another class that it may be taken for."""
SHOWN = 6
"""How many training images are shown of each example."""


@dataclass(frozen=True)
class Changes:
    """What changed some numbers between two steps: by class, by layer and by step."""

    before: Array
    after: Array
    """(queries,): the numbers at both steps."""
    layers: Mapping[str, Array]
    """(classes, queries) for each layer: what the training samples of a class changed."""
    steps: Array
    """(steps,): what each step of training changed, mean over the queries."""

    @property
    def classes(self) -> Array:
        """(classes, queries): through all layers."""
        total: Array = np.sum(list(self.layers.values()), 0)
        return total


def outputs_of(output: Tensor, labels: Tensor) -> Tensor:
    """An output, or the margin between two of them.

    >>> outputs_of(torch.tensor([[1.0, 3.0]]), torch.tensor([[0, 1]]))
    tensor([-2.])
    """
    found = output.gather(1, labels.to(output.device))
    return found[:, 0] - found[:, 1:].sum(1)


def changes_between(
    early: Run, late: Run, model: nn.Module, x: Tensor, labels: Tensor, groups: Mapping[int, int]
) -> Changes:
    """What rows changed of outputs, or margins, between two steps.

    Args:
        labels: (queries, 1) or (queries, 2): the outputs that `outputs_of` is asked for.
    """
    before, after, steps = [], [], np.zeros(late.steps)
    parts: list[dict[str, Array]] = []
    for some, own in zip(torch.split(x, TOGETHER), torch.split(labels, TOGETHER), strict=True):
        change = change_between(early, late, model, some, (outputs_of, own))
        sums = by_layer(change.sums(by_group(late, groups)))
        parts.append({layer: part[: len(GROUPS)] for layer, part in sums.items()})
        before.append(change.line.initial.numpy())
        after.append(change.line.final.numpy())
        by_step = np.sum(list(change.mean.sums(ByStep(late.steps)).values()), 0)
        steps += by_step[1:, 0] * len(some) / len(x)
    layers = {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}
    return Changes(np.concatenate(before), np.concatenate(after), layers, steps)


def stage(
    early: Run, late: Run, model: nn.Module, digits: ImageQueries, groups: Mapping[int, int]
) -> dict[str, Any]:
    """How the output of test digits for their class changed between two steps, on average."""
    own, labels = digits.outputs.numpy(), digits.outputs[:, None]
    found = changes_between(early, late, model, digits.x, labels, groups)
    at, sums = np.arange(len(own)), found.classes
    from_digits, from_garments = sums[:OUTPUTS].sum(0), sums[OUTPUTS:].sum(0)
    same, sharing = sums[own, at], sums[OUTPUTS + own, at]
    roles = (same, from_digits - same, sharing, from_garments - sharing)
    return {
        "before": found.before.mean(),
        "after": found.after.mean(),
        "roles": {role: part.mean() for role, part in zip(ROLES, roles, strict=True)},
        "layers": {name: part.sum(0).mean() for name, part in found.layers.items()},
        "steps": found.steps.tolist(),
    }


def margins(
    early: Run,
    late: Run,
    model: nn.Module,
    digits: ImageQueries,
    rivals: Tensor,
    groups: Mapping[int, int],
) -> dict[str, Any]:
    """What changed the margins of digits between two steps, on average.

    A margin is the output for a digit's class minus that for its rival.

    Args:
        model: as of the later step.
        rivals: (digits,): a class for each, other than its own.
    """
    labels = torch.stack([digits.outputs, rivals], 1)
    found = changes_between(early, late, model, digits.x, labels, groups)
    own, other, at = digits.outputs.numpy(), rivals.numpy(), np.arange(len(rivals))
    sums, garments = found.classes, found.classes[OUTPUTS:].sum(0)
    rival, sharing = sums[OUTPUTS + other, at], sums[OUTPUTS + own, at]
    parts = (rival, sharing, garments - rival - sharing, sums[:OUTPUTS].sum(0))
    table = np.zeros((OUTPUTS, OUTPUTS))
    np.add.at(table, other, sums[OUTPUTS:].T)
    return {
        "count": len(own),
        "before": found.before.mean(),
        "after": found.after.mean(),
        "culprits": {name: part.mean() for name, part in zip(CULPRITS, parts, strict=True)},
        "layers": {name: part.sum(0).mean() for name, part in found.layers.items()},
        "remainder": np.abs(found.after - found.before - sums.sum(0)).max(),
        "rival is strongest": (sums[OUTPUTS:].argmin(0) == other).mean(),
        "rivals": np.bincount(other, minlength=OUTPUTS).tolist(),
        "table": table.tolist(),
    }


def examples(
    early: Run,
    late: Run,
    model: nn.Module,
    digits: ImageQueries,
    rivals: Tensor,
    names: Sequence[int],
) -> list[dict[str, Any]]:
    """For a few digits, the training images that took most of their margin.

    Args:
        names: what the test images are called.
    """
    labels = torch.stack([digits.outputs, rivals], 1)
    change = change_between(early, late, model, digits.x, (outputs_of, labels))
    source = late.source
    values = np.sum(list(change.sums(BySample(source.numbers)).values()), 0)
    against = np.argsort(values, 0)[:SHOWN]
    return [
        {
            "image": names[at],
            "group": int(digits.groups[at]),
            "rival": int(rivals[at]),
            "change": float(change.total[at]),
            "against": [int(source.ids[sample]) for sample in against[:, at]],
            "values": values[against[:, at], at].tolist(),
        }
        for at in range(len(names))
    ]
