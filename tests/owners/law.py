"""The law of attribution: what a sample added to a weight is the gradient of its own loss."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.owners.structures import Structure
from tests.told import told
from torch import Tensor, nn

import dualform

Added = dict[tuple[Any, str], Tensor]
"""What each sample added to each parameter."""


def attribution_holds(
    case: Structure, path: Path, reach: float = 1e-9, lr: float = 0.05, steps: int = 4
) -> dualform.Audit:
    """Records plain descent, and compares what `subtract` takes away with gradients by sample."""
    model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    truth: Added = {}
    with told(path), dualform.record(model, optimizer, path) as recorder:
        for step in range(steps):
            x, ids = case.inputs(step), case.ids(step)
            for key, gradient in _gradients(copy.deepcopy(model), case, x, ids).items():
                truth[key] = truth.get(key, 0) - lr * gradient
            recorder.samples(ids)
            case.losses(model, x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return _compare(dualform.open(path), truth, case.by_step, reach)


def _gradients(model: nn.Module, case: Structure, x: Any, ids: Sequence[Any]) -> Added:
    """The gradient of each sample's share of the loss, for each parameter."""
    losses = case.losses(model, x)
    losses, samples = losses / len(losses), list(dict.fromkeys(ids))
    if len(losses) == len(ids):
        places = [[at for at, other in enumerate(ids) if other == sample] for sample in samples]
        own = [losses[at].sum() for at in places]
    else:
        own = list(losses)  # one for each sample, though it has several ids: a graph's nodes
    names, parameters = zip(*model.named_parameters(), strict=True)
    added = {}
    for sample, loss in zip(samples, own, strict=True):
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        for name, parameter, gradient in zip(names, parameters, found, strict=True):
            zero = torch.zeros_like(parameter)
            added[sample, name] = (zero if gradient is None else gradient).double().cpu()
    return added


def _compare(
    run: dualform.Run, truth: Added, by_step: Mapping[str, str], reach: float
) -> dualform.Audit:
    audit, now = run.audit(), run.state_dict()
    samples = list(dict.fromkeys(sample for sample, _ in truth))
    without = {sample: run.subtract([sample]) for sample in samples}
    for book in audit.books:
        reason = next((by_step[part] for part in by_step if part in book.name), None)
        assert (book.granularity == "step") == (reason is not None), audit
        if reason is not None:
            assert book.reason.startswith(reason), book
            continue
        size = max(float(truth[sample, book.name].norm()) for sample in samples)
        for sample in samples:
            added = now[book.name].double() - without[sample][book.name].double()
            gap = float((added - truth[sample, book.name]).norm())
            assert gap <= reach * max(size, 1e-6), (book.name, sample, gap / max(size, 1e-30))
    return audit
