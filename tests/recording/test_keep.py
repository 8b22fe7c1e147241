"""`keep=`: how much is stored of each parameter's rows, by name or for all."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import RecordingError
from dualform.ledger import Ledger
from dualform.recording.keep import ASKED, Keep, policies


def train(path: Path, keep: Keep, *, resume: bool = False, steps: int = 5) -> nn.Module:
    """A few steps; a second call with `resume` goes on with the weights of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if resume:
        model.load_state_dict(dualform.open(path).state_dict())
    with dualform.record(model, optimizer, path, keep=keep, resume=resume, strict=True):
        for _ in range(steps):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("policy", policies())
def test_a_policy_for_all(policy: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was asked for is no surprise
        train(tmp_path / "run", policy)
    audit = dualform.open(tmp_path / "run").audit()
    assert audit.remainder <= 2e-6
    assert audit.coverage == (0.0 if policy == "steps" else 1.0)
    assert {book.reason for book in audit.books} == {ASKED if policy == "steps" else ""}


def test_training_is_the_same_whatever_is_kept(tmp_path: Path) -> None:
    ends = [train(tmp_path / policy, policy).state_dict() for policy in policies()]
    for end in ends[1:]:
        assert all(torch.equal(end[name], weight) for name, weight in ends[0].items())


def test_the_first_pattern_that_matches_decides(tmp_path: Path) -> None:
    train(tmp_path / "run", {"2.bias": "steps", "2": "half", "*": "int8"})
    (shard,) = Ledger(tmp_path / "run").shards
    assert (shard.codec("0").name, shard.codec("2").name) == ("int8", "bfloat16")
    audit = dualform.open(tmp_path / "run").audit()
    kept = {book.name: book.granularity for book in audit.books}
    assert kept == {"0.weight": "row", "0.bias": "row", "2.weight": "row", "2.bias": "step"}
    assert audit.remainder <= 2e-6


def test_rows_that_are_shared_are_kept_as_exactly_as_anybody_asks(tmp_path: Path) -> None:
    train(tmp_path / "run", {"*.bias": "rows", "*": "int8"})
    (shard,) = Ledger(tmp_path / "run").shards
    assert shard.codec("0").name == "exact"


@pytest.mark.parametrize(
    ("keep", "problem"),
    [
        (
            "zip",
            "keep='zip' is unknown; there are 'auto', 'rows', 'half', 'int8', 'summaries', 'steps'",
        ),
        (
            {"0": "zip"},
            "keep='zip' is unknown; there are 'auto', 'rows', 'half', 'int8', 'summaries', 'steps'",
        ),
        ({"head": "half"}, r"pattern 'head', and no parameter or module .* '0.weight', '0.bias'"),
        (8, "keep=8 is no policy; give one of 'auto', .* or a dict of patterns"),
    ],
)
def test_what_cannot_be_kept_so_is_refused_before_training(
    keep: Keep, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(RecordingError, match=problem):
        train(tmp_path / "run", keep)
    assert not (tmp_path / "run").exists()


def test_a_run_may_go_on_with_less(tmp_path: Path) -> None:
    """Rows, then smaller rows, then steps; from there on it stays by step, and says why."""
    path = tmp_path / "run"
    train(path, "rows")
    train(path, "int8", resume=True)
    audit = dualform.open(path).audit()
    assert (audit.coverage, audit.remainder <= 2e-6) == (1.0, True)
    train(path, {"0.weight": "steps"}, resume=True)
    train(path, "rows", resume=True)
    first, *others = dualform.open(path).audit().books
    assert (first.granularity, first.reason) == ("row, then step", ASKED)
    assert all(book.granularity == "row" for book in others)
    assert max(book.remainder for book in [first, *others]) <= 2e-6


def test_a_run_that_began_by_step_stays_so(tmp_path: Path) -> None:
    train(tmp_path / "run", "steps")
    train(tmp_path / "run", "rows", resume=True)
    audit = dualform.open(tmp_path / "run").audit()
    assert {book.granularity for book in audit.books} == {"step"}
    assert audit.remainder <= 2e-6
