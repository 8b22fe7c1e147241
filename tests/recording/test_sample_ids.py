"""Ids that are given are never mixed with numbers that are counted, and never changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import dualform
from dualform.errors import RecordingError, SampleIdsError

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


def problem() -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: SGD, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("ids", [[0, 1, 2], ["a", "b", "c"], torch.arange(3)])
def test_names_after_a_step_without(ids: list[int | str] | Tensor, tmp_path: Path) -> None:
    model, optimizer = problem()
    message = r"got ids \[.*\], but an earlier step had none.*numbered 0, 1, 2 … and would be taken"
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        step(model, optimizer, X[10:13])
        with pytest.raises(SampleIdsError, match=message):
            recorder.samples(ids)
    assert dualform.open(tmp_path / "run").ids == [0, 1, 2]


def test_names_after_a_pass_that_was_thrown_away(tmp_path: Path) -> None:
    """A warm-up that no step used has left nobody's rows."""
    model, optimizer = problem()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        model(X[10:13]).square().mean().backward()
        optimizer.zero_grad()
        recorder.samples([5, 6, 7])
        step(model, optimizer, X[:3])
    assert dualform.open(tmp_path / "run").ids == [5, 6, 7]


@pytest.mark.parametrize("first", [True, False])
def test_one_part_of_a_step_without_names(first: bool, tmp_path: Path) -> None:
    """Also in the very first step, and before anything was named."""
    model, optimizer = problem()
    with (  # noqa: PT012
        pytest.raises(RecordingError, match="not of one that this step trains on; call recorder"),
        dualform.record(model, optimizer, tmp_path / "run") as recorder,
    ):
        if not first:
            recorder.samples([7, 8])
            step(model, optimizer, X[:2])
        model(X[10:13]).square().mean().backward()
        recorder.samples([0, 1, 2])
        step(model, optimizer, X[:3])


def test_samples_that_are_described_but_never_named(tmp_path: Path) -> None:
    """Their labels would be given to whoever comes first."""
    message = r"samples are described \(dataset=… or recorder.describe\), but those of this step"
    model, optimizer = problem()
    with (  # noqa: PT012
        pytest.raises(SampleIdsError, match=message),
        dualform.record(model, optimizer, tmp_path / "one") as recorder,
    ):
        recorder.describe(range(20), labels=[i % 2 for i in range(20)])
        step(model, optimizer, X[5:8])
    with (
        pytest.raises(SampleIdsError, match=message),
        dualform.record(
            model, optimizer, tmp_path / "two", dataset=TensorDataset(X, torch.arange(20))
        ),
    ):
        step(model, optimizer, X[5:8])
    with dualform.record(model, optimizer, tmp_path / "three") as recorder:
        step(model, optimizer, X[5:8])
        with pytest.raises(
            SampleIdsError, match=r"got ids \[0, 1, 2\], but samples were not named"
        ):
            recorder.describe(range(20), labels=[i % 2 for i in range(20)])


def test_described_by_numbers_and_named_by_strings(tmp_path: Path) -> None:
    model, optimizer = problem()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.describe(range(20), labels=[i % 2 for i in range(20)])
        recorder.samples([3])
        step(model, optimizer, X[:1])
        message = r"got strings \(\['a', 'b'\], …\), but the samples are described .* by integers"
        with pytest.raises(SampleIdsError, match=message):
            recorder.samples(["a", "b"])


def test_a_run_with_names_goes_on_with_names(tmp_path: Path) -> None:
    model, optimizer = problem()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.samples([4, 9, 2])
        step(model, optimizer, X[:3])
    with (
        pytest.raises(RecordingError, match="named the samples of earlier forward passes"),
        dualform.record(model, optimizer, tmp_path / "run", resume=True),
    ):
        step(model, optimizer, X[:3])


@pytest.mark.parametrize("dtype", [torch.uint64, torch.int64, torch.uint8, torch.int16])
def test_ids_of_any_integer_type(dtype: torch.dtype, tmp_path: Path) -> None:
    model, optimizer = problem()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.samples(torch.tensor([7, 5, 100], dtype=dtype))
        step(model, optimizer, X[:3])
    assert dualform.open(tmp_path / "run").ids == [5, 7, 100]


def test_an_id_of_64_bits_without_a_sign_is_refused(tmp_path: Path) -> None:
    """Stored with a sign, it would become another."""
    model, optimizer = problem()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        with pytest.raises(SampleIdsError, match="integers fit into 64 bits, one of them the sign"):
            recorder.samples(torch.tensor([0, 1, 2**64 - 1], dtype=torch.uint64))
        recorder.samples([2**63 - 1, 1, 2])
        step(model, optimizer, X[:3])
    assert dualform.open(tmp_path / "run").ids == [1, 2, 2**63 - 1]


@pytest.mark.parametrize("ids", [[1.5, 2.0], [True, False], [2**64, 1], [1, "a"], [None, 1]])
def test_descriptions_of_what_cannot_be_an_id(ids: list[object], tmp_path: Path) -> None:
    model, optimizer = problem()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.samples([0])
        step(model, optimizer, X[:1])
        with pytest.raises(SampleIdsError, match=r"recorder.describe got \[.*ids are integers or"):
            recorder.describe(ids, labels=[0, 1])  # type: ignore[arg-type]
