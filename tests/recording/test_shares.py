"""The law of attribution: what the ledger says a sample added is what its own loss added.

Under plain SGD, and without layers that mix samples, sample `i` moved each parameter by
`−lr Σ_t ∂(loss_i / B) / ∂W`. Here for the ways in which layers use their parameters.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests.recording.uses import BY_ROW, Case
from tests.told import told
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import dualform

SAMPLES, STEPS, RATE = 6, 3, 0.05


def losses(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of each sample."""
    return model(x).square().flatten(1).mean(1)


def direct(case: Case, model: nn.Module, x: Tensor) -> list[dict[str, Tensor]]:
    """What each sample's own loss moves the parameters by in a step, from autograd."""
    twin, found = case.make().double(), []
    twin.load_state_dict(model.state_dict())
    shares = losses(twin, x) / SAMPLES
    trained = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    names, parameters = zip(*trained.items(), strict=True)
    for share in shares:
        gradients = torch.autograd.grad(
            share, parameters, retain_graph=True, materialize_grads=True
        )
        found.append({name: -RATE * g for name, g in zip(names, gradients, strict=True)})
    return found


@pytest.mark.parametrize("name", BY_ROW)
def test_a_sample_added_what_its_loss_did(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = BY_ROW[name]
    model = case.make().double()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    added: list[dict[str, Tensor]] = [{} for _ in range(SAMPLES)]
    with dualform.record(model, sgd, tmp_path / "run") as recorder:
        for _ in range(STEPS):
            x = case.inputs(SAMPLES)
            x = x.double() if x.is_floating_point() else x
            for total, step in zip(added, direct(case, model, x), strict=True):
                total.update({n: total.get(n, 0) + g for n, g in step.items()})
            recorder.samples(range(SAMPLES))
            losses(model, x).mean().backward()
            sgd.step()
            sgd.zero_grad()
    run = dualform.open(tmp_path / "run")
    audit = run.audit()
    assert audit.coverage >= 0.95, audit
    assert audit.remainder < 1e-12, audit
    full = run.state_dict()
    for sample, expected in enumerate(added):
        without = run.subtract([sample])
        for book in (book for book in audit.books if book.granularity == "row"):
            share, wanted = full[book.name] - without[book.name], expected[book.name]
            size = max(float(other[book.name].norm()) for other in added)
            assert float((share - wanted).norm()) <= 1e-10 * size, (book.name, sample)


@pytest.mark.parametrize("name", BY_ROW)
def test_recording_changes_nothing(name: str, tmp_path: Path) -> None:
    """Training is bit-identical, though weights are differentiated again meanwhile."""
    case, trained = BY_ROW[name], []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = case.make()
        sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        with dualform.record(model, sgd, tmp_path / "run") if recorded else nullcontext():
            for _ in range(STEPS):
                losses(model, case.inputs(SAMPLES)).mean().backward()
                sgd.step()
                sgd.zero_grad()
        trained.append(model.state_dict())
    for key, value in trained[0].items():
        assert torch.equal(value, trained[1][key]), key


def test_samples_gradients_in_full_are_kept_only_of_small_weights(tmp_path: Path) -> None:
    model = prune.random_unstructured(nn.Linear(600, 500), "weight", 0.3)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    with told(tmp_path / "run"), dualform.record(model, sgd, tmp_path / "run"):
        model(torch.randn(4, 600)).square().mean().backward()
        sgd.step()
    reasons = {book.name: book.reason for book in dualform.open(tmp_path / "run").audit().books}
    assert reasons["weight_orig"] == (
        "a weight is computed from it: its rows are every sample's gradient in full, and 300,000 "
        "numbers a sample are too many to keep; the most are 262,144"
    )


def test_a_hooked_original_is_not_differentiated_again(tmp_path: Path) -> None:
    """A hook of the user's own would run once for every sample, and change the training."""
    calls = []
    model = parametrizations.orthogonal(nn.Linear(5, 3))
    original = model.parametrizations.weight.original
    original.register_hook(lambda gradient: calls.append(len(calls)))
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    with told(tmp_path / "run"), dualform.record(model, sgd, tmp_path / "run"):
        for _ in range(STEPS):
            model(torch.randn(4, 5)).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
    assert len(calls) == STEPS
    books = {book.name: book for book in dualform.open(tmp_path / "run").audit().books}
    kept = books["parametrizations.weight.original"]
    assert (kept.granularity, kept.reason) == (
        "step",
        "a weight is computed from it in a way that leaves no rows, or under autocast",
    )
