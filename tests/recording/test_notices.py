"""What the user is told while recording, when, and how often."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam

import dualform
from dualform.errors import CoverageWarning, RecordingWarning
from dualform.recording.notices import Notices
from dualform.recording.plan import Plan


def warned(train: Callable[[], None]) -> list[str]:
    """The texts of all warnings of dualform, in order."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.simplefilter("always", dualform.DualformWarning)
        train()
    return [f"{w.category.__name__}: {w.message}" for w in caught]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def epochs(sizes: list[int], reduction: str, path: Path, make: type = SGD) -> Callable[[], None]:
    """Batches of these sizes, over and over."""

    def train() -> None:
        model = network()
        optimizer = make(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(0)
        with dualform.record(model, optimizer, path):
            for size in sizes * 3:
                x = torch.randn(size, 6, generator=generator)
                F.cross_entropy(model(x), torch.arange(size) % 3, reduction=reduction).backward()
                optimizer.step()
                optimizer.zero_grad()

    return train


@pytest.mark.parametrize("short", [1, 2, 5])
def test_a_short_last_batch_under_a_mean_loss(short: int, tmp_path: Path) -> None:
    (text,) = warned(epochs([32, 32, 32, short], "mean", tmp_path / "run"))
    assert text == (
        f"RecordingWarning: the batch of step 4 has {short} samples, others have 32: under a mean "
        f"loss each of its samples counts about {32 / short:.0f} times as much. Use "
        "drop_last=True, or multiply the loss by len(batch) / 32."
    )


@pytest.mark.parametrize(
    ("sizes", "reduction"),
    [([32, 32, 5], "sum"), ([32, 32, 1], "sum"), ([32, 32, 16], "mean"), ([32, 30], "mean")],
)
def test_no_word_where_samples_count_alike(
    sizes: list[int], reduction: str, tmp_path: Path
) -> None:
    assert warned(epochs(sizes, reduction, tmp_path / "run")) == []


def test_a_short_batch_is_told_of_across_parcels(tmp_path: Path) -> None:
    def train() -> None:
        model = network()
        optimizer = Adam(model.parameters(), lr=0.01)
        with dualform.record(model, optimizer, tmp_path / "run", buffer_bytes=1000) as recorder:
            for size in (32, 32, 4):
                model(torch.randn(size, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.checkpoint()

    (text,) = warned(train)
    assert "the batch of step 3 has 4 samples, others have 32" in text


class Partly(nn.Module):
    """A layer whose weight is squared before it is used: no call leaves rows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.head = nn.Linear(6, 10, bias=False), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.odd.weight.square()).tanh())


def test_coverage_is_told_of_at_the_first_step(tmp_path: Path) -> None:
    """Which parameters, how much of all, since when, and why; once."""
    torch.manual_seed(0)
    model = Partly()
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for number in range(3):
            model(torch.randn(5, 6)).square().mean().backward()
            if number:
                optimizer.step()
            else:
                message = (
                    r"57.7% of the trained parameters are recorded by step, not by sample; .*\. "
                    r"'odd.weight' from step 1 on: no call was seen in which 'weight' of Linear"
                )
                with pytest.warns(CoverageWarning, match=message):
                    optimizer.step()
            optimizer.zero_grad()


def test_coverage_that_falls_further_is_told_of_at_the_end(tmp_path: Path) -> None:
    def train() -> None:
        torch.manual_seed(0)
        model = Partly()
        optimizer = SGD(model.parameters(), lr=0.1)
        with dualform.record(model, optimizer, tmp_path / "run"):
            for number in range(6):
                model(torch.randn(5, 6)).square().mean().backward()
                if number > 2:
                    model.head.weight.grad[0] = 1.0
                optimizer.step()
                optimizer.zero_grad()

    first, last = warned(train)
    assert "'odd.weight' from step 1 on: no call was seen" in first
    assert "head" not in first
    assert last.startswith("CoverageWarning: 100.0% of the trained parameters are recorded by step")
    assert "'head.bias', 'head.weight' from step 4 on: its gradient is not the sum of" in last


def test_many_parameters_for_one_reason_are_one_sentence(tmp_path: Path) -> None:
    def train() -> None:
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)])
        optimizer = LBFGS(model.parameters())
        x = torch.randn(4, 3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        with dualform.record(model, optimizer, tmp_path / "run"):
            optimizer.step(closure)

    (text,) = warned(train)
    names = "'0.weight', '0.bias', '1.weight', '1.bias' and 6 more"
    assert f"{names} from step 1 on: LBFGS has no rule yet." in text


def test_what_is_only_rounding_is_not_worth_a_warning(tmp_path: Path) -> None:
    """A bias before a batch normalization has no gradient but rounding."""

    def train() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = Adam(model.parameters(), lr=0.01)
        with dualform.record(model, optimizer, tmp_path / "run"):
            for _ in range(3):
                model(torch.randn(8, 4)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    assert warned(train) == []
    assert dualform.open(tmp_path / "run").audit().coverage < 1


def test_a_remark_is_made_once() -> None:
    notices = Notices(Plan({}, (), {}), "SGD", list, harmless=())
    notices.remark("look here")
    for expected in (["RecordingWarning: look here"], []):
        assert warned(lambda: notices.give()) == expected
    assert issubclass(RecordingWarning, dualform.DualformWarning)
