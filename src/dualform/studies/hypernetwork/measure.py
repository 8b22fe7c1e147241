"""A network is trained on a task, and tested on each of its parts; its latent codes are probed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dualform.diagnose import pair_codes, ridge_probe
from dualform.studies.hypernetwork.answers import answer_counts
from dualform.studies.hypernetwork.network import RuleReader
from dualform.studies.hypernetwork.problems import (
    Problems,
    Task,
    problems_of,
    random_stream,
)
from dualform.studies.hypernetwork.raven import MOST_FEATURES, RULES, Raven
from dualform.studies.hypernetwork.setting import HypernetworkSetting, TrainingSetting
from dualform.studies.hypernetwork.together import TrainedTogether, make_network, task_of
from dualform.studies.hypernetwork.training import train
from dualform.studies.parts import Found

AT_A_TIME = 256
"""Problems that a network is tested on at a time."""
COUNTED = 4000
"""Puzzles whose answers are counted, of each part."""


def measure_network(
    setting: HypernetworkSetting,
    training: TrainingSetting[Any],
    layer: str,
    seed: int,
    device: str,
    together: TrainedTogether | None = None,
) -> Found:
    """How right a trained network is on each part, and what its codes tell.

    Every seed has its own held-out rules, training problems, test problems and first weights; with
    one seed, all layers have the same.

    Args:
        together: who trains it with others. By default it is trained here, alone.
    """
    task = task_of(training, seed)
    model = make_network(training, layer, seed, device)
    untrained = probe(model, task, setting.probed, device)
    if together is None:
        [loss] = train({layer: [model]}, [task], training, device)[layer]
    else:
        loss = together.load(model, layer, seed)
    scores = {
        part: task.score(*answered(model, problems_of(task, part, setting.tests), device))
        for part in task.parts[1:]
    }
    found = {"untrained": untrained, "trained": probe(model, task, setting.probed, device)}
    return {"scores": scores, "loss": loss, "probe": found}


@torch.no_grad()
def answered(model: nn.Module, problems: Problems, device: str) -> tuple[Tensor, Tensor]:
    """What a network answers, and what is right."""
    model.eval()
    parts = torch.split(problems.x, AT_A_TIME)
    return torch.cat([model(x.to(device)).cpu() for x in parts]), problems.y


def probe(model: RuleReader, task: Task, count: int, device: str) -> dict[str, Any]:
    """What a ridge probe tells of the rules of test problems, from the codes of asked tokens."""
    problems = problems_of(task, "test", count)
    codes = torch.cat(
        [asked_codes(model, task, x, device) for x in torch.split(problems.x, AT_A_TIME)]
    )
    labels = task.labels(problems.rules)
    groups = torch.arange(count)[:, None].expand_as(labels)
    found = ridge_probe(codes.flatten(0, 1), labels.flatten(), groups.flatten())
    return {"accuracy": found.accuracy, "interval": found.interval, "chance": found.chance}


def asked_codes(model: RuleReader, task: Task, x: Tensor, device: str) -> Tensor:
    """(problems, asked, features): the codes of each asked token with all tokens.

    Where it does not matter at which place tokens stand, a token's code with itself and the mean of
    those with others take the place of all.
    """
    found = pair_codes(model, x.to(device), queries=range(-model.asked, 0)).values()
    if task.has_places:
        return torch.cat([codes.flatten(2) for codes in found], -1).cpu()
    each = [torch.cat([codes[..., -1, :], codes[..., :-1, :].mean(-2)], -1) for codes in found]
    return torch.cat(each, -1).cpu()


def count_answers(task: Raven) -> Found:
    """How many puzzles have so many agreeing answers, by part and by their number of features.

    By rule, for single features: the share of puzzles with several answers.
    """
    parts, by_features = {}, {}
    for part in task.parts:
        panels, _ = task.panels(part, COUNTED, random_stream(task.seed, f"count {part}"))
        parts[part] = torch.bincount(answer_counts(panels)).tolist()
    for features in range(1, MOST_FEATURES + 1):
        every, stream = Raven(features, held_out=0), random_stream(task.seed, f"count {features}")
        panels, _ = every.panels("train", COUNTED, stream)
        by_features[features] = torch.bincount(answer_counts(panels)).tolist()
    single = Raven(features=1, held_out=0)
    panels, rules = single.panels("train", 20 * COUNTED, random_stream(task.seed, "count rules"))
    several = (answer_counts(panels) > 1).double()
    by_rule = {name: float(several[rules[:, 0] == rule].mean()) for rule, name in enumerate(RULES)}
    return {"parts": parts, "features": by_features, "rules": by_rule}
