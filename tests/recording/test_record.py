"""What people do in training loops, and that the books still balance."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.told import told
from torch import Tensor, nn
from torch.optim import SGD

import dualform
from dualform.errors import (
    NonFiniteError,
    RecordingEndedWarning,
    RecordingError,
    RecordingWarning,
    SampleIdsError,
)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def balanced(path: Path, tolerance: float = 1e-6) -> dualform.Audit:
    audit = dualform.open(path).audit()
    assert audit.remainder <= tolerance, audit
    return audit


def test_parameter_groups_schedulers_and_rates_by_hand(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    model, (x, y) = mlp(), data
    groups = [
        {"params": model[0].parameters(), "lr": 0.2, "momentum": 0.9, "weight_decay": 0.01},
        {"params": [model[2].weight], "lr": 0.1},
        {"params": [model[2].bias], "lr": 0.3, "momentum": 0.5},
    ]
    optimizer = SGD(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for number in range(10):
            step(model, optimizer, x, y)
            scheduler.step()
            if number == 4:
                optimizer.param_groups[1]["lr"] = 0.07
                optimizer.param_groups[0]["momentum"] = 0.0
    assert balanced(tmp_path / "run").coverage == 1.0


def test_a_group_added_on_the_way(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for number in range(8):
            step(model, optimizer, x, y)
            model.zero_grad()
            if number == 3:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
    balanced(tmp_path / "run")


def test_frozen_and_thawed(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for number in range(8):
            step(model, optimizer, x, y)
            if number == 3:
                model[2].weight.requires_grad_(True)
    lines = {book.name: book for book in balanced(tmp_path / "run").books}
    assert lines["0.weight"].granularity == "frozen"
    assert lines["2.weight"].granularity == lines["2.bias"].granularity == "row"


def test_a_loss_scale_and_skipped_steps(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    """torch's own scaler on the CPU; two steps overflow and are skipped."""
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    taken = 0
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for number in range(10):
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss * (torch.inf if number in (2, 6) else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            taken += number not in (2, 6)
        assert recorder.step == taken == 8
    assert balanced(tmp_path / "run").coverage == 1.0


def test_a_backward_pass_that_was_thrown_away(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for number in range(6):
            F.mse_loss(model(x[:5]), y[:5]).backward()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            step(model, optimizer, x, y)
    audit = balanced(tmp_path / "run")
    assert audit.coverage == 1.0
    assert {book.rows for book in audit.books} == {6 * 12}


def test_each_layer_clipped_by_itself(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(8):
            F.mse_loss(model(x), y).backward()
            for layer in (model[0], model[2]):
                nn.utils.clip_grad_norm_(layer.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
    assert balanced(tmp_path / "run").coverage == 1.0


def test_a_closure(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with dualform.record(model, optimizer, tmp_path / "run"):
        for number in range(6):
            assert (optimizer.step(closure) if number % 2 else optimizer.step(closure=closure)) > 0
    assert balanced(tmp_path / "run").coverage == 1.0


def test_an_optimizer_with_momentum_from_before(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    """Recording starts in the middle: the momentum brought along has its share."""
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        step(model, optimizer, x, y)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(5):
            step(model, optimizer, x, y)
    balanced(tmp_path / "run")


def test_evaluation_in_between_leaves_no_rows(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            model(x)
            with torch.no_grad():
                model(x)
            step(model, optimizer, x[:4], y[:4])
    assert {book.rows for book in balanced(tmp_path / "run").books} == {12}
    assert dualform.open(tmp_path / "run").ids == list(range(12))


def test_inputs_reused_in_place(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    """A loader that fills the same buffer every time, through numpy behind torch's back."""
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    buffer = torch.empty(4, 6)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for number in range(6):
            part = slice(4 * (number % 3), 4 * (number % 3) + 4)
            buffer.numpy()[:] = x[part].numpy()
            step(model, optimizer, buffer, y[part])
    balanced(tmp_path / "run")


def test_sequence_first(tmp_path: Path) -> None:
    """(time, batch, width): rows still know whose they are."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(5, 4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.samples(["a", "b", "c", "d"])
        model(x).square().mean().backward()
        optimizer.step()
    run = dualform.open(tmp_path / "run")
    balanced(tmp_path / "run")
    rows = run.spotlight(model, x[:1, :1])["model"].rows(20)
    by_key = {(row.id, row.position) for row in rows.rows}
    assert by_key == {(name, position) for name in "abcd" for position in range(5)}


class Penalized(nn.Module):
    """Its output depends on a weight in a way that no row explains."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) * self.one.weight.square().mean()


class Distances(nn.Module):
    """A parameter in a call that no kind knows."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.head = nn.Parameter(torch.randn(6, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cdist(x, self.matrix.T))


@pytest.mark.parametrize(
    ("make", "reasons"),
    [
        (
            Penalized,
            {
                "one.weight": "its gradient is not the sum of the rows that were seen",
                "one.bias": "its gradient is not the sum of the rows that were seen",
            },
        ),
        (
            Distances,
            {"matrix": "no call was seen in which 'matrix' of Distances leaves rows"},
        ),
    ],
)
def test_what_has_no_rows_is_booked_by_step(
    make: Callable[[], nn.Module],
    reasons: dict[str, str],
    tmp_path: Path,
    data: tuple[Tensor, Tensor],
) -> None:
    torch.manual_seed(0)
    model, (x, y) = make().double(), (part.double() for part in data)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(6):
            step(model, optimizer, x, y)
    audit = balanced(tmp_path / "run")
    assert {b.name: b.reason for b in audit.books if b.granularity == "step"} == reasons
    by_row = sum(torch.Size(b.shape).numel() for b in audit.books if b.granularity == "row")
    assert audit.coverage == by_row / sum(p.numel() for p in model.parameters())
    assert 0 < audit.coverage < 1


class SubclassedAdam(torch.optim.Adam):
    """Might do anything."""


def test_an_optimizer_without_a_rule_is_booked_by_step(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    model, (x, y) = mlp(), data
    optimizer = SubclassedAdam(model.parameters(), lr=0.01)
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(6):
            step(model, optimizer, x, y)
    audit = balanced(tmp_path / "run")
    assert audit.coverage == 0.0
    own = "SubclassedAdam is a subclass of Adam and may do anything; by row is Adam itself"
    assert {book.reason for book in audit.books} == {own}


@pytest.mark.parametrize("often", [True, False])
def test_a_gradient_that_stops_being_its_rows(
    often: bool, tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    """Noise added to gradients from step 5 on; found at once, or only when the loop is over."""
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for number in range(12):
            F.mse_loss(model(x), y).backward()
            if number >= 4:
                model[0].weight.grad += torch.randn_like(model[0].weight)
            optimizer.step()
            optimizer.zero_grad()
            if often:
                recorder.checkpoint()
    lines = {book.name: book for book in dualform.open(tmp_path / "run").audit().books}
    assert lines["0.weight"].granularity == ("row, then step" if often else "step")
    assert "not the sum of the rows" in lines["0.weight"].reason
    assert lines["2.weight"].granularity == "row"
    assert lines["0.weight"].remainder <= 1e-6
    assert lines["2.weight"].remainder <= 1e-6


def test_recording_is_bit_identical_and_leaves_the_random_state_alone(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    (x, y), results = data, []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

        def run(
            model: nn.Module = model, optimizer: SGD = optimizer
        ) -> tuple[dict[str, Tensor], Tensor]:
            for _ in range(5):
                step(model, optimizer, x, y)
            return copy.deepcopy(model.state_dict()), torch.rand(3)

        if recorded:
            with dualform.record(model, optimizer, tmp_path / "run"):
                results.append(run())
            assert not model[0]._forward_hooks
            assert not model._forward_pre_hooks
            assert not optimizer._optimizer_step_pre_hooks
        else:
            results.append(run())
    (plain, plain_random), (recorded_state, recorded_random) = results
    assert all(torch.equal(plain[name], recorded_state[name]) for name in plain)
    assert torch.equal(plain_random, recorded_random)


class Tied(nn.Module):
    """One weight under two names, and a layer that is no plain linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.down.weight = self.up.weight
        self.recurrent, self.head = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(self.up(self.norm(x)).tanh())
        return self.head(self.recurrent(hidden[:, None])[0][:, 0])


@pytest.mark.parametrize("make", [mlp, Tied])
def test_copies_made_in_the_loop_take_nothing_of_the_recorder_with_them(
    tmp_path: Path, data: tuple[Tensor, Tensor], make: Callable[[], nn.Module]
) -> None:
    (x, y), audits = data, []
    for copies in (False, True):
        torch.manual_seed(0)
        model = make()
        optimizer = SGD(model.parameters(), lr=0.1)
        with dualform.record(model, optimizer, tmp_path / str(copies)):
            for _ in range(3):
                step(model, optimizer, x, y)
                if copies:
                    file = io.BytesIO()
                    torch.save(model, file)
                    assert b"dualform" not in file.getvalue()
                    file.seek(0)
                    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
                        F.mse_loss(twin(x), y).backward()
                        assert torch.equal(twin(x), model(x))
        audits.append(dualform.open(tmp_path / str(copies)).audit())
    assert str(audits[0]) == str(audits[1])


def test_an_exception_in_the_loop_leaves_a_readable_run(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        dualform.record(model, optimizer, tmp_path / "run") as recorder,
    ):
        for number in range(6):
            recorder.samples(range(12))
            F.mse_loss(model(x), y).backward()
            1 / (4 - number)
            optimizer.step()
            optimizer.zero_grad()
    assert dualform.open(tmp_path / "run").steps == 4
    balanced(tmp_path / "run")


def test_ids_of_the_wrong_length(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with (  # noqa: PT031
        pytest.warns(RecordingWarning, match="the recorder saw no step"),
        dualform.record(model, optimizer, tmp_path / "run") as recorder,
    ):
        recorder.samples(range(11))
        message = (
            r"recorder.samples got 11 ids, but the model was given a batch of shape \(12, 6\); "
            "give one id for each sample of the batch, or for each entry of its first dimension"
        )
        with pytest.raises(SampleIdsError, match=message):
            step(model, optimizer, x, y)


def test_ids_of_two_kinds(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with (  # noqa: PT012
        pytest.raises(SampleIdsError, match=r"got strings .*but this run's ids are integers"),
        dualform.record(model, optimizer, tmp_path / "run") as recorder,
    ):
        recorder.samples(range(12))
        step(model, optimizer, x, y)
        recorder.samples([f"s{i}" for i in range(12)])
        step(model, optimizer, x, y)


def test_ids_forgotten(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.samples(range(12))
        step(model, optimizer, x, y)
        with torch.no_grad():
            model(x)
        with pytest.raises(
            RecordingError, match="named the samples of earlier forward passes, but not of"
        ):
            step(model, optimizer, x, y)


def test_a_checkpoint_between_backward_and_step(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(4):
            for part in (slice(0, 6), slice(6, 12)):
                F.mse_loss(model(x[part]), y[part]).backward()
                recorder.checkpoint()
            optimizer.step()
            optimizer.zero_grad()
    audit = balanced(tmp_path / "run")
    assert audit.coverage == 1.0
    assert {book.rows for book in audit.books} == {4 * 12}


def test_a_small_buffer_makes_many_shards(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", buffer_bytes=4096):
        for _ in range(20):
            step(model, optimizer, x, y)
    assert len(list(tmp_path.glob("run/writer-*/*.safetensors"))) > 5
    balanced(tmp_path / "run")


def test_a_failed_start_leaves_the_run_free(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        RecordingError, match="the dataset is a int, whose items cannot be read by number"
    ):
        dualform.record(model, optimizer, tmp_path / "run", dataset=7).__enter__()
    with (
        pytest.warns(RecordingWarning, match="the recorder saw no step"),
        dualform.record(model, optimizer, tmp_path / "run", overwrite=True),
    ):
        pass


def test_a_recorder_that_does_not_record(tmp_path: Path) -> None:
    model = mlp()
    recorder = dualform.record(model, SGD(model.parameters(), lr=0.1), tmp_path / "run")
    with pytest.raises(RecordingError, match="is not recording; use it inside `with"):
        recorder.samples([1, 2])
    other = SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(RecordingError, match="the optimizer has none of the model's parameters"):
        dualform.record(model, other, tmp_path / "run").__enter__()


def test_a_change_smaller_than_rounding(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    """A bias in front of BatchNorm has no gradient but noise; the audit says so."""
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), data
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(20):
            step(model, optimizer, x, y)
    audit = balanced(tmp_path / "run")
    assert {b.name for b in audit.books if "no more than rounding" in b.reason} == {"0.bias"}


def test_asking_does_not_change_the_model(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)]
    model, (x, y) = nn.Sequential(*layers), data
    optimizer = SGD(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(5):
            step(model, optimizer, x, y)
    run, before = dualform.open(tmp_path / "run"), copy.deepcopy(model.state_dict())
    first, second = (run.spotlight(model, x)["3"].total for _ in range(2))
    assert (first == second).all()
    assert model.training
    assert layers[2].training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_nan_in_the_loss(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    message = r"is not finite at step 4 \(NaN in the loss\?\)"
    with (  # noqa: PT012
        pytest.raises(NonFiniteError, match=message),
        dualform.record(model, optimizer, tmp_path / "run", strict=True),
    ):
        for number in range(20):
            step(model, optimizer, x * (torch.nan if number == 3 else 1), y)
    assert dualform.open(tmp_path / "run").steps == 3
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with (  # noqa: PT031
        pytest.warns(RecordingEndedWarning, match=message),
        dualform.record(model, optimizer, tmp_path / "run", overwrite=True) as recorder,
    ):
        for number in range(20):
            step(model, optimizer, x * (torch.nan if number == 3 else 1), y)
            if number == 10:
                recorder.checkpoint()
    assert dualform.open(tmp_path / "run").steps == 3


def test_previews_and_labels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images, labels = torch.rand(6, 1, 8, 8), torch.arange(6) % 3
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    dataset = torch.utils.data.TensorDataset(images, labels)
    with dualform.record(model, optimizer, tmp_path / "run", dataset=dataset) as recorder:
        recorder.samples(range(6))
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        recorder.describe([5], labels=["renamed"], previews=["a text"], columns={"from": ["us"]})
    samples = dualform.open(tmp_path / "run").samples
    assert samples.labels == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: "renamed"}
    first, last = samples.preview(0), samples.preview(5)
    assert first is not None
    assert first.kind == "image"
    assert first.data.shape == (8, 8)
    assert (first.data.float() / 255 - images[0, 0]).abs().max() < 0.02
    assert last is not None
    assert (last.kind, last.data) == ("text", "a text")
    assert samples.preview(99) is None
    assert samples.columns["from"] == {5: "us"}
    with (
        pytest.raises(SampleIdsError, match="got 2 ids but 3 labels; give one each"),
        dualform.record(model, optimizer, tmp_path / "other") as recorder,
    ):
        recorder.describe([0, 1], labels=[1, 2, 3])
    with (
        pytest.raises(SampleIdsError, match="got 2 ids but 1 from; give one each"),
        dualform.record(model, optimizer, tmp_path / "third") as recorder,
    ):
        recorder.describe([0, 1], columns={"from": ["us"]})
    with (
        pytest.raises(SampleIdsError, match="the column 'label' is given as labels=…"),
        dualform.record(model, optimizer, tmp_path / "fourth") as recorder,
    ):
        recorder.describe([0], columns={"label": [1]})


def test_autocast_switched_on_the_way(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    """Rows of two precisions in one shard; those of 16 bits as the kernel saw them."""
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for number in range(8):
            with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 0):
                output = model(x)
            F.mse_loss(output.float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert balanced(tmp_path / "run", 1e-2).coverage == 1.0


class Buffered(nn.Module):
    """Has buffers of unusual kinds, a scalar parameter, and a layer called model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("codes", torch.tensor([1, 2], dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * self.gain


def test_buffers_scalars_and_a_layer_called_model(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    torch.manual_seed(0)
    model, (x, y) = Buffered(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(4):
            step(model, optimizer, x, y)
    balanced(tmp_path / "run")
    run = dualform.open(tmp_path / "run")
    assert abs(run.spotlight(model, x[:2])["model"].remainder).max() < 1e-5
    Buffered().load_state_dict(run.state_dict())


def test_an_optimizer_that_calls_its_closure_often(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    model, (x, y) = mlp(), data
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            optimizer.step(closure)
        assert recorder.step == 3
    balanced(tmp_path / "run")


class Decaying(SGD):
    """Does more than its parent, before and after it."""

    def step(self, closure: None = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(0.001)


def test_an_optimizer_built_on_another(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = Decaying(model.parameters(), lr=0.1)
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(4):
            step(model, optimizer, x, y)
        assert recorder.step == 4
    audit = balanced(tmp_path / "run")
    own = "Decaying is a subclass of SGD and may do anything; by row is SGD itself"
    assert {book.reason for book in audit.books} == {own}


class Twice(SGD):
    """Calls its parent twice, and fails in between when it is told to."""

    fails = False

    def step(self, closure: None = None) -> None:
        super().step()
        if self.fails:
            raise ArithmeticError
        super().step()


def test_steps_inside_of_steps_are_none_of_their_own(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    """Nor does a step that raised make later ones look as if they were inside of it."""
    model, (x, y) = mlp(), data
    SGD(model.parameters(), lr=0.1)  # from now on, torch calls hooks for the parent's steps too
    optimizer = Twice(model.parameters(), lr=0.1)
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run") as recorder:
        step(model, optimizer, x, y)
        optimizer.fails = True
        with pytest.raises(ArithmeticError) as kept:  # and with it every frame of the step
            step(model, optimizer, x, y)
        optimizer.fails = False
        step(model, optimizer, x, y)
        assert recorder.step == 2
        assert kept.value.__traceback__ is not None
    balanced(tmp_path / "run")


class Later(SGD):
    pass


def test_a_step_that_was_put_in_later(
    tmp_path: Path, data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch calls no hooks for it, but for the parent's step inside of it."""
    model, (x, y) = mlp(), data
    SGD(model.parameters(), lr=0.1)
    optimizer = Later(model.parameters(), lr=0.1)
    monkeypatch.setattr(Later, "step", lambda self, closure=None: SGD.step(self), raising=False)
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            step(model, optimizer, x, y)
        assert recorder.step == 3
    balanced(tmp_path / "run")


def test_a_bias_the_optimizer_does_not_have(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD([model[0].weight, model[2].weight], lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(4):
            step(model, optimizer, x, y)
            model.zero_grad()
    lines = {book.name: book.granularity for book in balanced(tmp_path / "run").books}
    expected = ["row", "frozen", "row", "frozen"]
    assert list(lines.values()) == expected


@pytest.mark.parametrize("width", [1, 2, 3, 40, 300])
def test_layers_of_any_width_notice_a_gradient_that_is_not_theirs(
    width: int, tmp_path: Path
) -> None:
    """A probe must have enough numbers not to agree by accident."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, width), torch.randn(12, 6)
    optimizer = SGD(model.parameters(), lr=0.1)
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            model(x).square().mean().backward()
            model.weight.grad += torch.randn_like(model.weight)
            optimizer.step()
            optimizer.zero_grad()
    audit = balanced(tmp_path / "run")
    assert {book.granularity for book in audit.books} == {"step"}


def test_a_run_without_steps(tmp_path: Path) -> None:
    model = mlp()
    with (
        pytest.warns(RecordingWarning, match="the recorder saw no step"),
        dualform.record(model, SGD(model.parameters(), lr=0.1), tmp_path / "run"),
    ):
        pass
    run = dualform.open(tmp_path / "run")
    assert (run.steps, run.ids, run.audit().remainder) == (0, [], 0.0)
    assert "0" in repr(run)


class Wandering(torch.optim.Optimizer):
    """Needs no gradients at all."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.1 * torch.randn_like(parameter))


def test_an_optimizer_without_gradients(tmp_path: Path) -> None:
    model = mlp()
    optimizer = Wandering(model.parameters())
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(3):
            optimizer.step()
    audit = balanced(tmp_path / "run")
    assert {book.granularity for book in audit.books} == {"step"}


def test_a_layer_without_a_kind_joins_on_the_way(
    tmp_path: Path, data: tuple[Tensor, Tensor]
) -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), data
    optimizer = SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run"):
        for number in range(6):
            if number == 2:
                optimizer.add_param_group({"params": list(model[1].parameters())})
            step(model, optimizer, x, y)
    balanced(tmp_path / "run")


def test_ids_beyond_the_reach_of_floats(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    ids = [2**60 + i for i in range(12)]
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.samples(ids)
        step(model, optimizer, x, y)
    reading = dualform.open(tmp_path / "run").spotlight(model, x[:1]).last
    assert sorted(reading.rows(12).ids) == ids


def test_the_smallest_layer_and_an_empty_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run"):
        for number in range(4):
            model(torch.randn(0 if number == 2 else 5, 1)).square().sum().backward()
            model.bias.grad.mul_(3)  # no one factor explains this
            optimizer.step()
            optimizer.zero_grad()
    audit = balanced(tmp_path / "run")
    assert {book.granularity for book in audit.books} == {"step"}


def test_stale_ids_are_noticed_in_any_layer(tmp_path: Path, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = mlp(), data
    optimizer = SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.samples(range(12))
        F.mse_loss(model[2](model[1](model[0](x))), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        F.mse_loss(model[0](x), torch.zeros(12, 8)).backward()
        with pytest.raises(RecordingError, match="named the samples of earlier forward passes"):
            optimizer.step()


@pytest.mark.parametrize("model", [mlp(), nn.LSTM(6, 4, batch_first=True)], ids=["mlp", "lstm"])
def test_another_default_device(model: nn.Module, tmp_path: Path) -> None:
    """What the recorder makes for itself is in main memory, wherever the loop makes its tensors."""
    model.double()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [torch.randn(12, 3, 6).double() for _ in range(3)]
    path = tmp_path / "run"
    with torch.device("meta"), dualform.record(model, optimizer, path, strict=True) as recorder:
        for x in batches:
            recorder.samples(range(12))
            out = model(x if isinstance(model, nn.LSTM) else x[:, 0])
            (out[0] if isinstance(out, tuple) else out).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.checkpoint()
    audit = dualform.open(path).audit()
    assert audit.coverage == 1
    assert audit.remainder < 1e-12


def test_a_source_tree_that_is_not_installed_records(tmp_path: Path) -> None:
    """`PYTHONPATH=src` is enough: the version comes from the source."""
    package = Path(dualform.__file__).parent
    (tmp_path / "dualform").symlink_to(package)
    program = (
        "from importlib import metadata\n"
        "known = metadata.distribution\n"
        "def found(name):\n"
        "    if name == 'dualform': raise metadata.PackageNotFoundError(name)\n"
        "    return known(name)\n"
        "metadata.distribution = found\n"
        "import torch, dualform\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with dualform.record(model, optimizer, 'run'):\n"
        "    model(torch.ones(3, 2)).sum().backward(); optimizer.step()\n"
        "print(dualform.open('run').audit().remainder < 1e-6, dualform.__version__)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.stdout.split() == ["True", dualform.__version__], ended.stderr
