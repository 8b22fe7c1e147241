"""Weights that are computed from parameters: what is kept of them, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.told import told
from torch import nn
from torch.nn.utils import parametrizations, prune

import dualform

STEPS, RATE = 3, 0.05


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
