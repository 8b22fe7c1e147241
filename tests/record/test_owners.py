"""Whose row is it? What a sample added is the gradient of its own loss, whatever the structure."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.record.structures import STRUCTURES, Structure
from torch import Tensor, nn

import dualform

LR, STEPS = 0.05, 4


def direct(model: nn.Module, case: Structure, x: object, ids: list) -> dict:
    """What each sample adds to each parameter in a step of plain descent."""
    losses = case.losses(model, x) / len(case.losses(model, x))
    samples = list(dict.fromkeys(ids))
    names, parameters = zip(*model.named_parameters(), strict=True)
    if len(losses) == len(ids):
        own = [losses[[i for i, other in enumerate(ids) if other == s]].sum() for s in samples]
    else:
        own = list(losses)  # one loss for each sample, whose ids come several times
    found = {}
    for sample, loss in zip(samples, own, strict=True):
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            found[sample, name] = -LR * (
                torch.zeros_like(parameter) if gradient is None else gradient
            )
    return found


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_a_sample_added_is_its_own_gradient(name: str, tmp_path: Path) -> None:
    case = STRUCTURES[name]
    model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    truth: dict[tuple[object, str], Tensor] = {}
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(STEPS):
            x, ids = case.inputs(step), case.ids(step)
            for key, change in direct(copy.deepcopy(model), case, x, ids).items():
                truth[key] = truth.get(key, 0) + change
            recorder.samples(ids)
            case.losses(model, x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    compare(dualform.open(tmp_path / "run"), truth, case.by_step)


def compare(run: dualform.Run, truth: dict, by_step: dict[str, str], reach: float = 1e-9) -> None:
    audit, now = run.audit(), run.state_dict()
    samples = list(dict.fromkeys(sample for sample, _ in truth))
    without = {sample: run.forget([sample]) for sample in samples}
    for book in audit.books:
        reason = next((by_step[start] for start in by_step if book.name.startswith(start)), None)
        assert (book.granularity == "step") == (reason is not None), audit
        if reason is not None:
            assert book.reason.startswith(reason), book
            continue
        size = max(float(truth[sample, book.name].norm()) for sample in samples)
        for sample in samples:
            added = now[book.name] - without[sample][book.name]
            gap = float((added - truth[sample, book.name]).norm())
            assert gap <= reach * max(size, 1e-6), (book.name, sample, gap / max(size, 1e-30))
