"""`dualform.plan` and keep="auto": what a recording takes, told before and decided by itself."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import dualform
from dualform.cli import cli
from dualform.errors import LedgerError, RecordingError, RecordingWarning
from dualform.ledger import Ledger
from dualform.recording import planning, turns
from dualform.recording.automatic import CHEAP, Automatic
from dualform.recording.keep import NOT_RECORDED, policies
from dualform.recording.spot_checks import WITHIN, SpotChecks

STEPS = 40
STORING = [policy for policy in policies() if policy != "auto"]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on how steady the seconds are."""
    monkeypatch.setattr(turns, "SECONDS", 0.0)
    monkeypatch.setattr(turns, "LEAST", 16)
    monkeypatch.setattr(turns, "TURNS", 2)
    monkeypatch.setattr(turns, "FEWEST", 2)


class Words(nn.Module):
    """A tiny transformer."""

    def __init__(self, width: int = 32, words: int = 60) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.table(x)))
        return found


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 30), nn.Linear(30, 5))


def conv() -> nn.Module:
    first = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 24, 3, stride=2))
    return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(64, 40)),
    "conv": (conv, lambda: torch.randn(12, 3, 11, 11)),
    "transformer": (Words, lambda: torch.randint(0, 60, (8, 20))),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=1e-3),
}


def train(
    model: nn.Module, optimizer: Any, batch: Callable[[], Tensor], path: Path, **given: Any
) -> None:
    steps = given.pop("steps", STEPS)
    with dualform.record(model, optimizer, path, strict=True, **given):
        for _ in range(steps):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


IN_TURN = {("mlp", "sgd"), ("conv", "adamw"), ("transformer", "adamw")}


@pytest.mark.filterwarnings("ignore::dualform.errors.CoverageWarning")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in IN_TURN else pytest.mark.long)
        for name in CASES
        for kind in OPTIMIZERS
    ],
)
def test_bytes_are_those_of_the_run(name: str, kind: str, tmp_path: Path) -> None:
    """Every policy, within a tenth; in fact within a hundredth, if the machine is not busy."""
    make, batch = CASES[name]
    torch.manual_seed(0)
    model = make()
    found = dualform.plan(
        model, batch(), optimizer=OPTIMIZERS[kind](model.parameters()), steps=STEPS
    )
    assert list(found.policies) == STORING
    for policy, costs in found.policies.items():
        model = make()
        train(model, OPTIMIZERS[kind](model.parameters()), batch, tmp_path / policy, keep=policy)
        files = [file for file in (tmp_path / policy).rglob("*") if file.is_file()]
        real = sum(file.stat().st_size for file in files)
        assert costs.bytes == pytest.approx(real, rel=0.1), policy
        assert costs.seconds is not None
        assert costs.ratio is not None
        assert costs.seconds == pytest.approx(costs.ratio * found.plain_seconds)
        assert costs.seconds_once is not None
        assert min(costs.seconds, costs.seconds_once) > 0
        assert (costs.rows == 0) == (policy == "steps")


def test_nothing_of_the_user_s_is_changed() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(8, 6)
    model(x).square().mean().backward()
    optimizer.step()
    before = (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [p.grad.clone() for p in model.parameters() if p.grad is not None],
        json.dumps(optimizer.state_dict(), default=lambda t: t.tolist()),
        x.clone(),
    )
    states = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    dualform.plan(model, x, optimizer=optimizer)
    assert all(torch.equal(model.state_dict()[name], then) for name, then in before[0].items())
    now = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(now, before[1], strict=True))
    assert json.dumps(optimizer.state_dict(), default=lambda t: t.tolist()) == before[2]
    assert torch.equal(x, before[3])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]


def test_what_a_plan_says() -> None:
    found = dualform.plan(mlp(), torch.randn(16, 40), steps=10, keep=dualform.summaries(4, 8))
    assert found.asked == "summaries(4, 8, numbers='int8', offsets='summaries')"
    assert list(found.policies) == [*STORING, found.asked]
    assert found.recommended == "rows"
    assert "which is little" in found.reason
    text = repr(found)
    assert all(policy in text for policy in STORING)
    assert f"keep='rows': {found.reason}"[:60] in text
    assert found.to_dict()["policies"]["half"]["rows"] == found.policies["half"].rows
    json.dumps(found.to_dict())
    assert "<pre" in found._repr_html_()


def test_batches_and_losses_of_all_kinds() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            return {"out": self.fc(a + b)}

    a, b = torch.randn(4, 3), torch.randn(4, 3)
    loss = lambda output: output["out"].mean()  # noqa: E731
    for batch in ((a, b), {"a": a, "b": b}):
        assert dualform.plan(Two(), batch, loss=loss).policies["rows"].rows == 4
    with pytest.raises(RecordingError, match="gives a dict, and plan does not know its loss"):
        dualform.plan(Two(), (a, b))
    with pytest.raises(RecordingError, match=r"loss= gave \(4, 2\); expected a scalar"):
        dualform.plan(Two(), (a, b), loss=lambda output: output["out"])
    with pytest.raises(RecordingError, match="steps=0 is no number of steps"):
        dualform.plan(Two(), (a, b), steps=0)


def test_a_disk_that_is_too_small_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"steps": 1000, "path": tmp_path / "not" / "there"}
    model, x = mlp(), torch.randn(64, 40)
    costs = dualform.plan(model, x, **given).policies
    assert costs["steps"].bytes is not None
    assert costs["rows"].bytes is not None
    free = (costs["rows"].bytes + min(c.bytes or 0 for c in costs.values())) // 2
    monkeypatch.setattr(planning, "free_bytes", lambda path: free)
    found = dualform.plan(model, x, **given)
    assert found.recommended != "rows"
    assert "fit into the" in found.reason
    with pytest.raises(
        LedgerError, match=r"free, and 1,000 steps with keep='rows' take .* or make"
    ):
        dualform.plan(model, x, keep="rows", **given)
    monkeypatch.setattr(planning, "free_bytes", lambda path: 1000)
    with pytest.raises(LedgerError, match=r"has 1.0 kB free, .* No policy takes less: make room"):
        dualform.plan(model, x, **given)
    assert dualform.plan(model, x, steps=1000, path="s3://bucket/run").free is None


def test_rows_that_are_too_large_to_try_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec's own word is what a recording finds."""
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(64, 40)
    tried = dualform.plan(model, x, optimizer=SGD(model.parameters(), lr=0.1)).policies
    monkeypatch.setattr(planning, "TRIED", 0)
    computed = dualform.plan(model, x, optimizer=SGD(model.parameters(), lr=0.1)).policies
    for policy in ("rows", "half", "int8"):
        assert computed[policy].seconds is computed[policy].ratio is None
        near = pytest.approx(tried[policy].bytes_a_step, rel=0.1)
        assert computed[policy].bytes_a_step == near, policy


def test_auto_keeps_rows_while_they_are_cheap(tmp_path: Path) -> None:
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer, lambda: torch.randn(64, 40), tmp_path / "run", steps=3)
    (shard,) = Ledger(tmp_path / "run").shards
    assert shard.codec("0").name == "exact"
    assert not any(stream.layer for stream in Ledger(tmp_path / "run").info.streams)


def test_auto_summarizes_what_takes_much_and_says_so_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 100))
    optimizer = SGD(model.parameters(), lr=0.1)

    def batch() -> Tensor:
        return torch.randn(40, 700, 200)  # 28,000 rows of 900 numbers: 101 MB

    with pytest.warns(RecordingWarning) as caught:
        train(model, optimizer, batch, tmp_path / "run", steps=2)
    (text,) = [str(one.message) for one in caught]
    assert text.startswith("the rows of a step would take 100.8 MB: keep='auto' stores summaries")
    assert "keep='rows' stores all rows" in text
    run = dualform.open(tmp_path / "run")
    assert run.nbytes < 5e6
    assert not run.audit().beyond_rounding


def test_auto_counts_before_any_row_is_held() -> None:
    """A forward pass tells what its rows will take; a layer stays as it was first met."""
    automatic = Automatic({"a": "auto", "b": "int8", "c": "auto"})

    class Call:
        def __init__(self, size: int) -> None:
            self.outputs, self.key = (torch.empty(size, 1),), torch.empty(size, 1)

        def rows(self, errors: Any) -> Any:
            raise AssertionError

    automatic.expect(Call(1000))
    assert automatic.policies(["a", "b"]) == {"a": "rows", "b": "int8"}
    assert automatic.numbers({"a": "rows"}) == ""
    automatic.expect(Call(CHEAP // 8))
    assert automatic.policies(["c"]) == {"c": dualform.summaries()}
    assert automatic.numbers({"c": dualform.summaries()}) == "int8"
    assert automatic.summarized == {"c"}
    ours = Automatic({"a": "auto", "b": "auto"}, of=2)
    ours.expect(Call(CHEAP // 24))  # a third, and as much of the other process: rows, it guesses
    assert ours.policies(["a"]) == {"a": "rows"}
    ours.decide(ours.expected + CHEAP)  # but the other has more
    assert ours.policies(["a", "b"]) == {"a": dualform.summaries(), "b": dualform.summaries()}
    assert ours.expected == 0


def test_layers_are_recorded_by_name_and_others_by_step(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was asked for is no surprise
        given: dict[str, Any] = {"layers": ["3", "*.bias"], "steps": 4}
        train(model, optimizer, lambda: torch.randn(8, 40), tmp_path / "run", **given)
    audit = dualform.open(tmp_path / "run").audit()
    kept = {book.name: (book.granularity, book.reason) for book in audit.books}
    assert kept["3.weight"] == kept["0.bias"] == ("row", "")
    assert kept["0.weight"] == kept["2.weight"] == ("step", NOT_RECORDED)
    assert not audit.beyond_rounding
    assert audit.coverage < 0.1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"layers": "tail"}, "layers has the pattern 'tail', and no parameter or module"),
        ({"layers": []}, r"layers=\[\] records nothing; name the layers"),
        (
            {"keep": dualform.summaries(64, 4096)},
            r"summaries\(64, 4096\) has 262,144 numbers, and no weight that '\*' matches has more; "
            r"the largest are '0.weight' \(96×40\), '2.weight' \(30×96\), .* Give fewer outputs",
        ),
        ({"keep": {"3": dualform.summaries(16, 16)}}, "no weight that '3' matches has more"),
    ],
)
def test_what_cannot_be_recorded_so_is_refused(
    given: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(RecordingError, match=problem):
        train(model, optimizer, lambda: torch.randn(8, 40), tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_summaries_that_are_larger_than_some_weights_only_are_fine(tmp_path: Path) -> None:
    model = mlp()
    keep = dualform.summaries(8, 64)
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer, lambda: torch.randn(64, 40), tmp_path / "run", keep=keep, steps=4)
    assert not dualform.open(tmp_path / "run").audit().beyond_rounding


def test_rows_that_the_temporary_folder_has_no_room_for_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "free_bytes", lambda path: 1 << 20)
    costs = dualform.plan(mlp(), torch.randn(64, 40)).policies
    assert costs["rows"].seconds is None
    assert costs["summaries"].seconds is not None


def test_the_command_takes_a_batch_from_a_file_or_all_of_it_from_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 8)))
    (tmp_path / "to_plan.py").write_text(
        "import torch\n"
        "def model():\n    return torch.nn.Linear(8, 3)\n"
        "def named():\n    return {'model': model(), 'batch': torch.ones(4, 8), 'loss': sum_up}\n"
        "def sum_up(output):\n    return output.sum()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    file = ("to_plan:model", "--input", str(tmp_path / "x.npy"))
    for given in (file, ("to_plan:named",)):
        result = CliRunner().invoke(cli, ["plan", "--model", *given, "--json"])
        facts = json.loads(result.stdout)
        assert facts["recommended"] == "rows"
        assert facts["policies"]["rows"]["rows"] == 4
    far = ("--steps", "1000000000000", "--path", str(tmp_path / "runs" / "mine"))
    result = CliRunner().invoke(cli, ["plan", "--model", *file, *far])
    assert isinstance(result.exception, LedgerError)
    assert "No policy takes less: make room, or record fewer steps." in str(result.exception)


def test_a_ratio_is_that_of_turns_and_spot_checks_come_as_seldom_as_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that the steps themselves turn: what is recorded takes thrice as long."""
    clock = 0.0
    after_step = SpotChecks.after_step

    def timed(checks: SpotChecks) -> dict[str, dict[str, Tensor]]:
        nonlocal clock
        found = after_step(checks)
        clock += 128.0 * (WITHIN in found)
        return found

    monkeypatch.setattr(SpotChecks, "after_step", timed)
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)

    def plain() -> None:
        nonlocal clock
        clock += 1.0

    def recorded() -> None:
        nonlocal clock
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        clock += 3.0

    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        steps = recorder._require_recording()
        recorded()
        found = turns.time_in_turns(steps, recorded, plain, lambda: clock)
    assert found.plain == 1.0
    assert found.spot_check == 128.0
    assert found.ratio == pytest.approx(4.0)
    assert found.seconds == pytest.approx(4.0)
