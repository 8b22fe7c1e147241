"""Questions to whole networks that cannot be answered, and what is said instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.read.known_run import Known
from torch import Tensor, nn

import dualform
from dualform.errors import ModelMismatchError, ReadingError, UnknownSampleError
from dualform.read import ridge
from dualform.read.free_memory import free_memory
from dualform.read.samples_matrix.optimizer_metric import OptimizerMetric
from dualform.read.targets import Asked

METHODS = ["ridge", "fisher", "tracin", "accounting"]
BAD = {
    "unknown method": (
        {"method": "magic"},
        "method='magic' is not known; there are 'ridge', 'fisher', 'tracin', 'accounting'",
    ),
    "no damping": (
        {"damping": 0},
        r"damping=0: .*more than 0; it is given.*3.0 by default",
    ),
    "negative": ({"method": "fisher", "damping": -1.0}, r"damping=-1.0: .*and is 1.0 by default"),
    "nan": ({"damping": float("nan")}, r"damping=nan: what is inverted must be damped"),
    "rank": ({"rank": 0}, r"rank=0: keep at least one direction; 10 and more are exact"),
    "target": ({"target": 7}, r"target=7: the model has outputs 0 to 2"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_asked(bad: str, known: Callable[[str], Known]) -> None:
    made, (options, message) = known("SGD"), BAD[bad]
    with pytest.raises(ReadingError, match=message):
        made.run.influence(made.model, made.x[:3], **options)


class Folded(nn.Module):
    """Gives one output for every step of every sample, all in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.transpose(0, 1))[0].flatten(0, 1)


@pytest.mark.parametrize("target", [None, 1])
def test_queries_that_cannot_be_told_apart(target: int | None) -> None:
    message = r"dimension 1, the model gives \d+ outputs.*layers take time first; give x in that"
    with pytest.raises(ReadingError, match=message):
        Asked(Folded(), torch.randn(6, 5, 4), target)


def test_matrices_that_do_not_fit(
    known: Callable[[str], Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is scanned; what is advised fits."""
    made = known("SGD")
    run = dualform.open(made.run.path)
    monkeypatch.setattr(OptimizerMetric, "columns", lambda self, books: pytest.fail("scanned"))
    monkeypatch.setattr(ridge, "free_memory", lambda: 500.0)
    wanted = r"the Gram matrix of a line of 6 needs 0.0 GB, and 0.0 GB are free; fewer.*: rank=16"
    with pytest.raises(ReadingError, match=wanted):
        run.influence(made.model, made.x[:3], 1)
    monkeypatch.setattr(ridge, "free_memory", lambda: 8e9)
    with pytest.raises(ReadingError, match=r"needs 60.0 GB, and 8.0 GB are free.*: rank=1024"):
        ridge.check_memory(50_000, 50_000)
    ridge.check_memory(50_000, 1024)
    with pytest.raises(
        ReadingError, match=r"basis of 8,000 directions of a line of 50,000 needs 9.6"
    ):
        ridge.check_memory(50_000, 8000)
    assert free_memory() > 0


def test_runs_and_models_that_do_not_fit(recorded: Any, known: Callable[[str], Known]) -> None:
    made, unknown = known("SGD"), recorded("unknown")
    other = copy.deepcopy(made.model)
    other[0].weight.data.mul_(1.1)
    for read in (made.run.explain, made.run.influence):
        with pytest.raises(ModelMismatchError, match=r"'0.weight' differs.*load_state_dict"):
            read(other, made.x[:2], 1)
        with pytest.raises(ModelMismatchError, match=r"its '0.weight' has shape \(5, 4\)"):
            read(nn.Sequential(nn.Linear(4, 5)).double(), made.x[:2], 1)
    for method in METHODS:
        with pytest.raises(UnknownSampleError, match=r"no samples: no layer.*audit\(\) says why"):
            unknown.run.influence(unknown.model, unknown.x[:2], 1, method=method)


@pytest.mark.parametrize("tolerance", [0, 1, -1e-3, float("nan")])
def test_tolerances(tolerance: float, known: Callable[[str], Known]) -> None:
    made = known("SGD")
    message = rf"tolerance={tolerance}: give a share between 0 and 1, such as 1e-3"
    with pytest.raises(ReadingError, match=message):
        made.run.explain(made.model, made.x[:2], 1, tolerance=tolerance)


def test_layers_and_times_that_are_not_there(
    known: Callable[[str], Known], recorded_case: Any
) -> None:
    made = known("SGD")
    found = made.run.explain(made.model, made.x[:2], 1)
    for ask in (found.layer, found.positions):
        with pytest.raises(ReadingError, match=r"layer 'fc9' was not.*; those were '0', '2'\."):
            ask("fc9")
    with pytest.raises(ReadingError, match=r"timeline by 'week': there are 'step' and 'epoch'"):
        found.timeline("week")
    by_step = recorded_case("Weight norm", "SGD")
    found = by_step.run.explain(by_step.model, by_step.x[:2], lambda out: out.sum())
    with pytest.raises(ReadingError, match=r"by row in this run; those were '0', .*, '2'\."):
        found.layer("parametrizations.weight")
