"""The books of architectures balance where training changes their weights appreciably."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.architectures.problems import (
    LOOP,
    NAMES,
    OPTIMIZERS,
    RATE,
    TOLERANCE,
    Trained,
    recording,
)
from tests.cases.architectures import CASES
from torch import nn

import dualform
from dualform.recording.bookkeeping import NOISY


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_books_balance(
    trained: Callable[..., Trained], name: str, optimizer: str, dtype: torch.dtype
) -> None:
    """Everything by row, but for the named exceptions; the remainder is rounding."""
    made, case = trained(name, optimizer, dtype), CASES[name]
    audit = made.run.audit()
    before = {name: p.detach() for name, p in made.before.named_parameters()}
    after = {name: p.detach() for name, p in made.model.named_parameters()}
    trainable = {name for name, p in made.model.named_parameters() if p.requires_grad}
    noisy = [b for b in audit.books if b.granularity not in ("row", "frozen")]
    magnified = [name for name in trainable if case.noise and re.search(case.noise, name)]
    if optimizer == "SGD":
        magnified = []
    assert {b.name: b.reason for b in noisy} == dict.fromkeys(magnified, NOISY), audit
    assert (audit.coverage == 1.0) == (not magnified)
    assert {book.name for book in audit.books if book.granularity != "frozen"} == trainable
    if dtype == torch.float64:
        assert audit.remainder <= TOLERANCE[dtype], audit
    moved = 0
    for book in (book for book in audit.books if book.name in trainable):
        change = (after[book.name] - before[book.name]).norm() / after[book.name].norm()
        moved += bool(change >= 0.15)
        # of what hardly moved, the rounding of the weight itself is most of the change
        rounding = 0.0 if change >= 0.15 else LOOP.steps * torch.finfo(dtype).eps / float(change)
        assert book.remainder <= TOLERANCE[dtype] + min(rounding, 1.0), (book, float(change))
    assert moved > len(trainable) / 2


def test_offsets_without_a_gradient_are_found_wherever_they_are(tmp_path: Path) -> None:
    """The keys' third of attention's bias; here it begins at the 129th of 384 numbers."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(128, 2, 8, dropout=0.0, batch_first=True)
    adam, tokens = torch.optim.AdamW(model.parameters(), lr=RATE), torch.randn(4, 5, 128)
    with recording(model, adam, tmp_path / "run") as name_samples:
        for _ in range(3):
            name_samples(torch.arange(4))
            (model(tokens) * torch.randn(4, 5, 128)).sum().backward()
            adam.step()
            adam.zero_grad()
    audit = dualform.open(tmp_path / "run").audit()
    noisy = {book.name: book.reason for book in audit.books if book.granularity != "row"}
    assert noisy == {"self_attn.in_proj_bias": NOISY}, audit
