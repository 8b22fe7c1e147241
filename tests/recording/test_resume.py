"""Going on with a run: from checkpoints, over and over, with what is allowed to change."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.told import told
from torch import Tensor, nn
from torch.optim import SGD

import dualform
from dualform.errors import ModelMismatchError, RecordingWarning, SampleIdsError, UnknownStepError

X, Y = torch.randn(12, 6, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3


def fresh() -> tuple[nn.Sequential, SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(
    model: nn.Module, optimizer: SGD, count: int, recorder: dualform.Recorder, noise: float = 0
) -> None:
    for _ in range(count):
        recorder.samples(range(12))
        F.cross_entropy(model(X.double()), Y).backward()
        if noise:
            model[0].weight.grad += noise * torch.randn_like(model[0].weight)
        optimizer.step()
        optimizer.zero_grad()


def saved(model: nn.Module, optimizer: SGD) -> dict[str, dict[str, object]]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def test_a_run_resumed_twice_balances(tmp_path: Path) -> None:
    """Back to the first checkpoint after a second writer went further: its start is void, too."""
    model, optimizer = fresh()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        steps(model, optimizer, 4, recorder)
        recorder.checkpoint()
        early = saved(model, optimizer)
        steps(model, optimizer, 4, recorder)
        recorder.checkpoint()
        late = saved(model, optimizer)
        steps(model, optimizer, 2, recorder)
    for state, expected in ((late, 8), (early, 4)):
        model, optimizer = fresh()
        model.load_state_dict(state["model"])
        if expected == 8:  # the momentum is left behind once: the books must know
            optimizer.load_state_dict(state["optimizer"])
        with dualform.record(model, optimizer, tmp_path / "run", resume=True) as recorder:
            assert recorder.step == expected
            steps(model, optimizer, 3, recorder)
        run = dualform.open(tmp_path / "run")
        assert run.steps == expected + 3
        assert run.audit().remainder <= 1e-12


def test_what_was_kept_by_step_stays_so(tmp_path: Path) -> None:
    model, optimizer = fresh()
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run") as recorder:
        steps(model, optimizer, 3, recorder, noise=1.0)
    with dualform.record(model, optimizer, tmp_path / "run", resume=True) as recorder:
        steps(model, optimizer, 3, recorder)
    audit = dualform.open(tmp_path / "run").audit()
    assert {book.name for book in audit.books if book.granularity == "step"} == {
        "0.weight",
        "0.bias",
    }
    assert audit.remainder <= 1e-12


def test_a_model_from_nowhere(tmp_path: Path) -> None:
    model, optimizer = fresh()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        steps(model, optimizer, 2, recorder)
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(UnknownStepError, match=r"are those of none of its kept steps \[0, 2\]"):
        dualform.record(model, optimizer, tmp_path / "run", resume=True).__enter__()


def test_another_model_or_optimizer(tmp_path: Path) -> None:
    model, optimizer = fresh()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        steps(model, optimizer, 2, recorder)
    other = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    with pytest.raises(ModelMismatchError, match=r"its '0.weight' has shape \(8, 6\), the model's"):
        dualform.record(
            other, SGD(other.parameters(), lr=0.1), tmp_path / "run", resume=True
        ).__enter__()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ModelMismatchError, match="recorded by the rule 'sgd', and this optimizer"):
        dualform.record(model, adam, tmp_path / "run", resume=True).__enter__()


def test_ids_keep_their_kind(tmp_path: Path) -> None:
    model, optimizer = fresh()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        steps(model, optimizer, 2, recorder)
    with (  # noqa: PT012
        pytest.raises(SampleIdsError, match="this run's ids are integers"),
        dualform.record(model, optimizer, tmp_path / "run", resume=True) as recorder,
    ):
        recorder.samples([f"s{i}" for i in range(12)])
        F.cross_entropy(model(X.double()), Y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "ids", [[0.5] * 12, torch.rand(12), ["a", 1] * 6, torch.zeros(6, 2).long()]
)
def test_ids_that_are_none(ids: list[object] | Tensor, tmp_path: Path) -> None:
    model, optimizer = fresh()
    with (
        pytest.warns(RecordingWarning, match="the recorder saw no step"),
        dualform.record(model, optimizer, tmp_path / "run") as recorder,
        pytest.raises(SampleIdsError, match="ids are integers or strings, all of one kind"),
    ):
        recorder.samples(ids)


def test_names_after_numbers(tmp_path: Path) -> None:
    """Samples that were numbered in order cannot get names halfway."""
    model, optimizer = fresh()
    with (  # noqa: PT012
        pytest.raises(SampleIdsError, match="but an earlier step had none"),
        dualform.record(model, optimizer, tmp_path / "run") as recorder,
    ):
        for named in (False, True):
            if named:
                recorder.samples([f"s{i}" for i in range(12)])
            F.cross_entropy(model(X.double()), Y).backward()
            optimizer.step()
            optimizer.zero_grad()
