"""The law of attribution: what a sample added to a weight is the gradient of its own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.cases.case import Case
from tests.cases.optimizers import trained
from tests.laws.training import PARTS, new_model, recording
from torch import Tensor, nn

import dualform

Added = dict[tuple[Any, str], Tensor]
"""What each sample added to each parameter."""


def attribution_holds(
    case: Case,
    path: Path,
    reach: float = 1e-9,
    lr: float = 0.05,
    steps: int = 2,
    dtype: torch.dtype = torch.float64,
    training: bool = False,
) -> dualform.Audit:
    """Records plain descent, and compares what `subtract` takes away with gradients by sample."""
    model, twin = (new_model(case, dtype).train(training) for _ in range(2))
    optimizer = torch.optim.SGD(trained(model), lr=lr)
    truth: Added = {}
    with recording(model, optimizer, path) as name_samples:
        for step in range(steps):
            for number in range(PARTS * step, PARTS * (step + 1)):
                inputs = case.batch(number, dtype)
                ids = case.names(number, inputs)
                twin.load_state_dict(model.state_dict())
                for key, gradient in _gradients(twin, case, inputs, ids).items():
                    truth[key] = truth.get(key, 0) - lr * gradient
                name_samples(ids)
                case.losses(model, inputs).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return _compare(dualform.open(path), truth, case, reach)


def _gradients(model: nn.Module, case: Case, inputs: Any, ids: list[Any]) -> Added:
    """The gradient of each sample's share of the loss, for each parameter."""
    losses = case.losses(model, inputs)
    losses, samples = losses / len(losses), list(dict.fromkeys(ids))
    if len(losses) == len(ids):
        places = [[at for at, other in enumerate(ids) if other == sample] for sample in samples]
        own = [losses[at].sum() for at in places]
    else:
        own = list(losses)  # one for each sample, though it has several ids: a graph's nodes
    added = {}
    for sample, loss in zip(samples, own, strict=True):
        model.zero_grad()
        loss.backward(retain_graph=True)
        for name, parameter in model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            added[sample, name] = gradient.double().cpu()
    return added


def _compare(run: dualform.Run, truth: Added, case: Case, reach: float) -> dualform.Audit:
    audit, now = run.audit(), run.state_dict()
    by_row = [book for book in audit.books if book.granularity == "row"]
    by_step = [book for book in audit.books if book not in by_row and book.granularity != "frozen"]
    assert [book.name for book in by_row if case.reason(book.name) is not None] == [], audit
    for book in by_step:
        reason = case.reason(book.name)
        assert book.granularity == "step", audit
        assert reason is not None, audit
        assert book.reason.startswith(reason), audit
    for sample in dict.fromkeys(sample for sample, _ in truth) if by_row else ():
        without = run.subtract([sample])
        for book in by_row:
            size = max(float(truth[key].norm()) for key in truth if key[1] == book.name)
            added = now[book.name].double() - without[book.name].double()
            gap = float((added - truth[sample, book.name]).norm())
            assert gap <= reach * max(size, 1e-6), (book.name, sample, gap / max(size, 1e-30))
    return audit
