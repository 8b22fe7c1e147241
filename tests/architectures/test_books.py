"""The books of whole architectures add up, and recording leaves training as it is."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.architectures.problems import (
    ARCHITECTURES,
    DECAY,
    LOOP,
    NAMES,
    OPTIMIZERS,
    RATE,
    SAMPLES,
    TOLERANCE,
    Trained,
    recording,
    train,
)
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
    made, architecture = trained(name, optimizer, dtype), ARCHITECTURES[name]
    audit = made.run.audit()
    before = {name: p.detach() for name, p in made.before.named_parameters()}
    after = {name: p.detach() for name, p in made.model.named_parameters()}
    trainable = {name for name, p in made.model.named_parameters() if p.requires_grad}
    noisy = [b for b in audit.books if b.granularity not in ("row", "frozen")]
    count = architecture.noisy_count if optimizer == "AdamW" else 0
    assert [b.reason for b in noisy] == [NOISY] * count, audit
    assert all(re.search(architecture.noisy, book.name) for book in noisy)
    assert (audit.coverage == 1.0) == (count == 0)
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_recording_changes_nothing(
    trained: Callable[..., Trained], name: str, optimizer: str
) -> None:
    """Bit for bit, dropout and running statistics included."""
    made = trained(name, optimizer, torch.float32)
    twin = copy.deepcopy(made.before)
    train(made.given, twin, optimizer)
    ours, theirs = made.model.state_dict(), twin.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_step_is_training_stopped_there(
    trained: Callable[..., Trained], name: str, optimizer: str
) -> None:
    made = trained(name, optimizer)
    twin = copy.deepcopy(made.before)
    train(made.given, twin, optimizer, steps=4)
    recorded = made.run.at(4).state_dict()
    for key, value in twin.named_parameters():
        torch.testing.assert_close(recorded[key], value.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_run_has_the_whole_state(trained: Callable[..., Trained], name: str) -> None:
    """Shared weights under all their names, buffers as well: it loads without a word."""
    made = trained(name, "SGD")
    fresh = copy.deepcopy(made.before)
    fresh.load_state_dict(made.run.state_dict())
    for key, value in made.model.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], value), key


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_without_all_samples_the_start_is_left(
    trained: Callable[..., Trained], name: str, optimizer: str
) -> None:
    """Decayed where the optimizer decays; what was kept by step stays."""
    made = trained(name, optimizer)
    left = made.run.subtract(made.run.ids)
    assert sorted(made.run.ids) == list(range(SAMPLES))
    decay = (1 - RATE * DECAY) ** LOOP.steps if optimizer == "AdamW" else 1.0
    before, after = dict(made.before.named_parameters()), dict(made.model.named_parameters())
    by_row = {book.name for book in made.run.audit().books if book.granularity == "row"}
    for key in before:
        expected = before[key].detach() * decay if key in by_row else after[key].detach()
        torch.testing.assert_close(left[key], expected, rtol=1e-9, atol=1e-11)


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
