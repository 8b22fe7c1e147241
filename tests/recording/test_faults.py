"""Faults at every stage of recording: the recording ends, and the training does not notice."""

from __future__ import annotations

import errno
import functools
import importlib
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from dualform.errors import (
    DualformError,
    LedgerError,
    RecorderFailedError,
    RecordingEndedWarning,
    RecordingError,
    RecordingWarning,
    SampleIdsError,
)

STEPS, BATCH = 8, 4
X = torch.randn(12, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(12) % 3


class Net(nn.Module):
    """Calls of every sort that is seen in its own way, and chance, which a fault must not move."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True)
        self.rnn = nn.GRU(6, 5, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x)
        return self.head(F.dropout(self.rnn(mixed)[0][:, -1], 0.1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(path: Path | None, **options: Any) -> tuple[Net, dualform.Recorder | None]:
    """A loop that does all that recorders are asked to do."""
    model = Net()
    optimizer = sgd(model)
    torch.manual_seed(5)
    random.seed(5)
    recording = (
        nullcontext() if path is None else dualform.record(model, optimizer, path, **options)
    )
    with recording as recorder:
        for number in range(STEPS):
            ids = [(number * BATCH + at) % 12 for at in range(BATCH)]
            if recorder is not None:
                recorder.samples(ids)
            F.cross_entropy(model(X[ids]), Y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if recorder is not None and number % 3 == 1:
                recorder.describe(ids, labels=Y[ids])
                recorder.checkpoint()
    return model, recorder


@functools.cache
def plain() -> tuple[dict[str, Tensor], Tensor]:
    """What training comes to without a recorder, and the random state after it."""
    model, _ = train(None)
    return model.state_dict(), torch.get_rng_state()


FAULTS = {
    "forward: the batch": "recording.watch.Batches.begin",
    "forward: a kind of layer": "layers.linear.Linear.use",
    "forward: a recurrent layer": "layers.recurrent.Recurrence.of",
    "forward: a composed function": "layers.composite.undelegated",
    "forward: a hook on the graph": "recording.watch.when_errors_come",
    "experiment: its start": "owners.table.Owners.begin",
    "experiment: a call": "owners.twins.Twins._worlds",
    "experiment: a call in a world": "owners.twins.Twins._keep",
    "experiment: random states": "owners.twins.same_randomness",
    "experiment: rows": "owners.trial.Trial.observe",
    "experiment: its end": "owners.trial.Trial.close",
    "backward: rows": "layers.recurrent.rows_of",
    "backward: a stream": "recording.streams.Streams.of",
    "backward: a page": "recording.pages.PageWriter.write",
    "before the step: gradients": "recording.observer.StepObserver.observe",
    "before the step: what is seen": "recording.step_recorder.StepRecorder.observe",
    "before the step: a spot check": "recording.spot_checks.SpotChecks.before_step",
    "after the step: changes": "recording.observer.StepObserver.finish",
    "after the step: a spot check": "recording.spot_checks.SpotChecks.after_step",
    "after the step: the watch": "recording.watch.Watch.end_step",
    "writer: bookkeeping": "recording.bookkeeping.Bookkeeper.book",
    "writer: a block": "ledger.writer.LedgerWriter.append",
    "disk: a shard": "ledger.writer.write_tensors",
    "disk: the log": "ledger.writer.LedgerWriter._commit_rows",
    "disk: a description": "recording.recorder.describe_samples",
    "checkpoint: weights": "recording.snapshots.snapshot",
    "checkpoint: waiting": "recording.delivery.Delivery.wait",
    "the end": "recording.recorder.Recorder._finish",
    "naming samples": "recording.watch.Batches.name",
}


def inject(monkeypatch: pytest.MonkeyPatch, where: str, at: int) -> list[Exception]:
    """Makes a function of dualform fail from its call number `at` on; returns what it raised."""
    raised: list[Exception] = []
    calls = 0
    owner, name = _found(where)
    usual = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < at:
            return usual(*args, **kwargs)
        full = OSError(errno.ENOSPC, "No space left on device")
        raised.append(
            full if name in ("write_tensors", "describe_samples") else KeyError("a defect")
        )
        raise raised[-1]

    bound = hasattr(usual, "__self__")  # a class method
    monkeypatch.setattr(owner, name, staticmethod(failing) if bound else failing)
    return raised


def _found(where: str) -> tuple[Any, str]:
    *path, name = where.split(".")
    for cut in range(len(path), 0, -1):
        try:
            owner = importlib.import_module("dualform." + ".".join(path[:cut]))
        except ImportError:
            continue
        return functools.reduce(getattr, path[cut:], owner), name
    raise AssertionError(where)


AT = [1, 3]
ONCE = ("the end", "forward: a composed function", "experiment: its end")


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_ends_the_recording_and_not_the_training(
    fault: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, random_state = plain()
    start = 1 + (fault == "disk: a shard")  # the first is the start's own
    raised = inject(monkeypatch, FAULTS[fault], start if fault in ONCE else start - 1 + at)
    with pytest.warns(RecordingEndedWarning) as warned:
        model, recorder = train(tmp_path / "run")
    monkeypatch.undo()
    assert raised, "the fault was not met"
    assert recorder is not None
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())
    assert torch.equal(torch.get_rng_state(), random_state)

    (warning,) = [each for each in warned if each.category is RecordingEndedWarning]
    message = str(warning.message)
    run = dualform.open(tmp_path / "run")
    assert f"is readable up to step {run.steps}." in message
    assert str(recorder.failure) in message
    assert "No space left" in message or "is full" in message or "KeyError" in message
    if fault != "checkpoint: weights":  # then there are none to hold the books against
        assert run.audit().remainder <= 1e-10
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with (
        pytest.warns(RecordingWarning, match="saw no step"),
        dualform.record(model, sgd(model), tmp_path / "run", overwrite=True),
    ):
        pass  # the run is free again


@pytest.mark.parametrize("fault", FAULTS)
def test_with_strict_every_failure_is_raised_as_ours(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = 1 + (fault == "disk: a shard")
    inject(monkeypatch, FAULTS[fault], start)
    with pytest.raises(DualformError, match=r"defect|No space left|is full"):
        train(tmp_path / "run", strict=True)
    if fault != "checkpoint: weights":
        assert dualform.open(tmp_path / "run").audit().remainder <= 1e-10


@pytest.mark.parametrize("mistaken", [[0, 1], ["a", 1, 2, 3], 7])
def test_a_mistake_is_raised_where_it_is_made(mistaken: Any, tmp_path: Path) -> None:
    """Also without `strict`: the recording goes on when the mistake is mended."""
    model = Net()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        with pytest.raises(SampleIdsError):
            _step(model, optimizer, recorder, mistaken)
        _step(model, optimizer, recorder, range(BATCH))
        assert recorder.failure is None
    assert dualform.open(tmp_path / "run").steps == 1


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Any, ids: Any) -> None:
    recorder.samples(ids)
    F.cross_entropy(model(X[:BATCH]), Y[:BATCH]).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_failure_keeps_nothing_of_the_training_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, "recording.pages.PageWriter.write", 2)
    with pytest.warns(RecordingEndedWarning):
        _, recorder = train(tmp_path / "run")
    assert recorder is not None
    error: BaseException | None = recorder.failure
    while error is not None:
        assert error.__traceback__ is None
        error = error.__cause__ or error.__context__


class Remembering(nn.Linear):
    """Keeps something in the state dict that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"seen": 3}


def eight_bits(*, parameter: bool) -> nn.Module:
    model = nn.Linear(5, 3)
    tensor = torch.arange(6.0).to(torch.float8_e4m3fn)
    if parameter:
        model.frozen = nn.Parameter(tensor, requires_grad=False)
    else:
        model.register_buffer("q", tensor)
    return model


@pytest.mark.parametrize(
    "model",
    [Remembering(5, 3), eight_bits(parameter=True), eight_bits(parameter=False)],
    ids=["extra state", "float8 parameter", "float8 buffer"],
)
def test_what_a_state_dict_may_hold(model: nn.Module, tmp_path: Path) -> None:
    optimizer = sgd(model)
    for resume in (False, True):
        with dualform.record(model, optimizer, tmp_path / "run", resume=resume):
            model(torch.randn(6, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = dualform.open(tmp_path / "run")
    assert run.audit().remainder <= 1e-6
    assert run.state_dict().keys() == {
        n for n, t in model.state_dict().items() if torch.is_tensor(t)
    }


ODD = {
    "float8_e4m3fnuz": (torch.zeros(2).to(torch.float8_e4m3fnuz), "has dtype float8_e4m3fnuz, and"),
    "complex": (torch.zeros(2, dtype=torch.complex64), "complex64, and runs hold real numbers"),
    "sparse": (torch.eye(2).to_sparse(), "is sparse_coo, and runs hold dense tensors"),
}


@pytest.mark.parametrize("name", ODD)
def test_buffers_that_no_run_can_hold(name: str, tmp_path: Path) -> None:
    tensor, message = ODD[name]
    model = nn.Linear(5, 3)
    model.register_buffer("odd", tensor)
    with pytest.raises(
        RecordingError, match=f"'odd' .*{message}.*register it with persistent=False"
    ):
        dualform.record(model, sgd(model), tmp_path / "run").__enter__()


def test_a_start_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before training nothing is lost, so it is raised, whatever it is, as one of ours."""
    model = Net()
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(LedgerError, match=rf"cannot write to '{path}'.*that can be written"):
            dualform.record(model, sgd(model), path).__enter__()
    with pytest.raises(LedgerError, match=r"path=None is no path; give the run's folder as a str"):
        dualform.record(model, sgd(model), None)  # type: ignore[arg-type]
    with pytest.raises(DualformError, match=r"cannot start: ValueError: embedded null byte"):
        dualform.record(model, sgd(model), "a\0b").__enter__()
    with pytest.raises(DualformError, match=r"cannot start: AttributeError: 'str' object has no"):
        dualform.record("model", sgd(model), tmp_path / "run").__enter__()  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        inject(patch, "ledger.writer.write_tensors", 1)
        with pytest.raises(LedgerError, match=r"No space left on device; make room\."):
            dualform.record(model, sgd(model), tmp_path / "run").__enter__()
    with monkeypatch.context() as patch:
        inject(patch, "recording.stages.StepObserver", 1)
        with pytest.raises(RecorderFailedError, match=r"cannot start: KeyError: 'a defect'"):
            dualform.record(model, sgd(model), tmp_path / "run").__enter__()
    with (
        pytest.warns(RecordingWarning, match="saw no step"),
        dualform.record(model, sgd(model), tmp_path / "run", overwrite=True),
    ):
        pass  # nothing is in its way


@pytest.mark.parametrize("make", [sgd, lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3)])
def test_a_failure_inside_a_closure(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer that calls the loop's closure does so as before, whatever comes of ours."""
    inject(monkeypatch, "recording.observer.StepObserver.observe", 3)
    weights = []
    for path in (None, tmp_path / "run"):
        model = Net()
        optimizer = make(model)
        torch.manual_seed(5)
        recording = nullcontext() if path is None else dualform.record(model, optimizer, path)
        expected = nullcontext() if path is None else pytest.warns(RecordingEndedWarning)
        with expected, recording:
            for _ in range(4):
                optimizer.step(functools.partial(_closure, model, optimizer))
        weights.append(model.head.weight)
    assert torch.equal(*weights)
    assert dualform.open(tmp_path / "run").steps <= 2


def _closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(X[:BATCH]), Y[:BATCH])
    loss.backward()
    return loss
