"""What is sound of a damaged run becomes a run of its own; the damaged one is left as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.ledger.damaging import flip, logs, record
from tests.ledger.fuzz import record_run

import dualform
from dualform.cli import main
from dualform.errors import CorruptError, LedgerError
from dualform.ledger import Ledger, LedgerWriter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Twelve steps by two writers, a shard each, and weights at steps 5 and 12."""
    path = tmp_path / "run"
    record(path, 1, 5)
    record(path, 6, 12)
    return path


def shard_with(path: Path, step: int) -> Path:
    return next(shard.path for shard in Ledger(path).shards if shard.first == step)


def steps_of(path: Path) -> list[float]:
    return Ledger(path).column("fc/keys").flatten()[::2].tolist()


@pytest.mark.parametrize("step", [1, 3, 6, 9])
@pytest.mark.parametrize("cut", [False, True])
def test_the_steps_before_a_damaged_shard_are_kept(run: Path, step: int, cut: bool) -> None:
    file = shard_with(run, step)
    data = file.read_bytes()
    file.write_bytes(data[:-3] if cut else flip(data, len(data) - 1))
    found = dualform.repair(run)
    assert (found.steps, found.recorded, found.to) == (step - 1, 12, run.with_name("run.repaired"))
    assert [name for name, _ in found.damage] == [file]
    assert found.to is not None
    assert steps_of(found.to) == list(range(1, step))
    assert list(Ledger(found.to).check()) == []
    assert Ledger(found.to).unfinished  # recording did not end there
    assert file.read_bytes() != data  # nothing was mended in place


def test_recording_goes_on_in_what_was_repaired(run: Path) -> None:
    file = shard_with(run, 8)
    file.write_bytes(flip(file.read_bytes(), -1))
    found = dualform.repair(run, run.with_name("sound"))
    assert found.to is not None
    record(found.to, 8, 9)
    assert steps_of(found.to) == list(range(1, 10))
    assert Ledger(found.to).kept_steps == [0, 5, 9]


def test_damaged_weights_cost_no_step(run: Path) -> None:
    kept = Ledger(run)._weights[5].path
    kept.write_bytes(flip(kept.read_bytes(), -1))
    found = dualform.repair(run)
    assert found.to is not None
    assert (found.steps, Ledger(found.to).kept_steps) == (12, [0, 12])


def test_a_damaged_log_costs_what_follows_in_it(run: Path) -> None:
    first = logs(run)[0]
    lines = first.read_bytes().splitlines(keepends=True)
    lines[3] = flip(lines[3], 20)
    first.write_bytes(b"".join(lines))
    with pytest.raises(CorruptError, match="copied by `dualform repair`"):
        dualform.open(run)
    found = dualform.repair(run)
    assert found.to is not None
    assert steps_of(found.to) == [1, 2]


def test_books_of_a_repaired_run_balance(tmp_path: Path) -> None:
    """Of six steps by two sessions, with keys that are stored once, the first four are left."""
    path = tmp_path / "run"
    record_run(path)
    expected = Ledger(path).weights(4)
    shard_with(path, 5).write_bytes(b"")
    found = dualform.repair(path)
    assert found.to is not None
    left = dualform.open(found.to)
    assert left.steps == left.audit().measured_at == 4
    assert left.audit().remainder < 1e-5
    for name, weight in left.state_dict().items():
        torch.testing.assert_close(weight.float(), expected[name], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_repaired_is_said_and_nothing_is_written(run: Path) -> None:
    start = run / "initial.safetensors"
    start.write_bytes(flip(start.read_bytes(), -1))
    with pytest.raises(CorruptError, match=r"initial.safetensors' is damaged, without which"):
        dualform.repair(run)
    assert not run.with_name("run.repaired").exists()


def test_a_folder_in_the_way_is_left_alone(run: Path) -> None:
    file = shard_with(run, 2)
    file.write_bytes(flip(file.read_bytes(), -1))
    other = run.with_name("run.repaired")
    other.mkdir()
    with pytest.raises(LedgerError, match="exists already; move it away, or name another path"):
        dualform.repair(run)
    assert list(other.iterdir()) == []


def test_the_command(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["dualform", "repair", str(run)])
    main()
    assert "is sound: there is nothing to repair" in capsys.readouterr().out
    file = shard_with(run, 4)
    file.write_bytes(flip(file.read_bytes(), -1))
    main()
    said = " ".join(capsys.readouterr().out.split())
    assert "Steps 1 to 3 of 12 are sound. They are in" in said
    assert file.name in said
    assert LedgerWriter.resume(run.with_name("run.repaired"), 3).committed == 3
