"""A compacted run is the run that would have been recorded with less; the old one stays at hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.compaction.runs import LAYERS, STEPS, contents, recorded
from tests.in_turn import in_turn
from tests.read.test_ranks import deal
from torch import nn

import dualform
from dualform import compaction
from dualform.compaction import front_door, rounding
from dualform.compaction.folders import Folders
from dualform.errors import (
    CorruptError,
    LedgerError,
    NotARunError,
    RecordingError,
    RunLockedError,
)
from dualform.ledger import Ledger
from dualform.ledger.format import COMPACTED_FILE
from dualform.recording.keep import Keep

POLICIES: dict[str, Keep] = {
    "half": "half",
    "int8": "int8",
    "summaries": dualform.summaries(4, 8),
}
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-12}
"""As for runs that are recorded with less: tests/recording/test_entries.py."""


WHOLE = {("conv", "summaries"): ("0~weight/", "0.weight/residual", "2~weight/key")}
"""Of a weight that is kept whole, which a recorder rounds and a compaction does not; and keys of no
numbers, which streams share that are stored alike."""
CASES = [(layer, optimizer) for layer in LAYERS for optimizer in ("momentum", "adamw")]


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    layer, optimizer = request.param
    return layer, optimizer


def remainder(run: dualform.Run) -> float:
    """The largest, but for summaries of 8 bits, which miss the gradients in their bases by more."""
    audit = run.audit()
    summarized = {book.name for book in run.info.books if run.source.ledger.is_summarized(book)}
    for line in audit.books:
        assert line.name not in summarized or not line.remainder > line.rounding, audit
    return max(line.remainder for line in audit.books if line.name not in summarized)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compacted_run_is_the_one_recorded_with_less(
    policy: str, case: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Array by array; only factors, which were measured with all rows, are better.

    Accounts are of other steps. A compaction keeps the bases of the first rows.
    """
    monkeypatch.setattr("dualform.recording.bases.RENEWED", ())
    recorded(tmp_path / "run", *case)
    recorded(tmp_path / "small", *case, keep=POLICIES[policy])
    assert dualform.compact(tmp_path / "run", POLICIES[policy]).changed
    found, expected = Ledger(tmp_path / "run"), Ledger(tmp_path / "small")
    assert found.info.streams == expected.info.streams
    assert found.info.books == expected.info.books
    apart = WHOLE.get((case[0], policy), ())
    for own, other in zip(found.shards, expected.shards, strict=True):
        names, others = (
            {name for name in shard.file.arrays if not name.startswith(apart)}
            for shard in (own, other)
        )
        assert names == others
        for name in names:
            if name.endswith(("/accounts", "/account_steps")):
                continue
            mine, theirs = own.file.read(name), other.file.read(name)
            if name == "factors":
                assert torch.allclose(mine, theirs, rtol=1e-5)
            else:
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs), name


@pytest.mark.parametrize(("case", "policy", "dtype"), in_turn(CASES, POLICIES, TOLERANCE))
def test_the_books_stay(
    policy: str, dtype: torch.dtype, case: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    model, x = recorded(path, *case, dtype=dtype)
    (path / "remarks.txt").write_text("mine")
    run = dualform.open(path)
    info, audit, nbytes, marks = (
        (path / "run.json").read_bytes(),
        run.audit(),
        run.nbytes,
        _marks(path),
    )
    ids, samples = run.ids, Ledger(path).samples()
    result = dualform.compact(path, POLICIES[policy])
    assert result.changed
    run = dualform.open(path)
    assert run.check() == []
    assert run.audit().coverage == 1.0
    assert remainder(run) <= audit.remainder + TOLERANCE[dtype]
    assert run.nbytes < nbytes
    assert (path / "run.json").read_bytes() == info
    assert (path / "remarks.txt").read_text() == "mine"
    assert _marks(path) == marks
    assert run.ids == ids
    assert torch.equal(Ledger(path).samples(), samples)
    assert run.samples.labels == {"s1": 4, "s2": 5}
    for name, weight in model.state_dict().items():
        assert torch.equal(run.state_dict()[name], weight)
    for reading in run.spotlight(model, x[:3]).values():
        parts = reading.check
        size = np.abs(parts.total).max() + np.abs(parts.evidence).max()
        assert np.abs(parts.remainder).max() <= 10 * max(TOLERANCE[dtype], audit.remainder) * size


def _marks(path: Path) -> tuple[dict[int, str], list[dict[str, Any]], bool]:
    ledger = Ledger(path)
    return ledger.marks, ledger.notes, ledger.unfinished


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("policy", ["half", "int8"])
def test_rounded_reads_agree_with_those_of_all_rows(
    policy: str, optimizer: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    model, x = recorded(path, "linear", optimizer)
    found = []
    for _ in range(2):
        run = dualform.open(path)
        explained = run.explain(model, x[:2], target=0)
        found.append((explained.values, run.spotlight(model, x[:2])["2"].samples().values))
        if len(found) == 1:
            dualform.compact(path, policy)
    for exact, rounded in zip(*found, strict=True):
        assert 0 < np.abs(exact - rounded).max() / np.abs(exact).max() < 0.03


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_summaries_in_all_directions_are_the_rows(optimizer: str, tmp_path: Path) -> None:
    """Without a basis, and without rounding, nothing is lost but the rows of a sample."""
    path = tmp_path / "run"
    model, x = recorded(path, "tokens", optimizer)
    exact = dualform.open(path).explain(model, x[:2], target=lambda y: y.sum()).values
    dualform.compact(path, dualform.summaries(24, 24, "rows", "sums"))
    run = dualform.open(path)
    summed = run.explain(model, x[:2], target=lambda y: y.sum()).values
    assert np.abs(exact - summed).max() < 1e-5 * np.abs(exact).max()
    assert run.audit().books[0].residual == 0


def test_a_table_that_no_basis_makes_smaller_is_rounded(tmp_path: Path) -> None:
    """Its errors have no more numbers than directions are asked for: a residual is exact."""
    path = tmp_path / "run"
    recorded(path, "embedding", "adamw")
    dualform.compact(path, dualform.summaries(16, 64))
    run = dualform.open(path)
    assert remainder(run) <= 5e-6
    assert Ledger(path).shards[0].codec("0").name == "int8"


def test_policies_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run"
    recorded(path)
    dualform.compact(path, {"2": "rows", "*": "int8"})
    (first, _) = Ledger(path).shards
    assert (first.codec("0").name, first.codec("2").name) == ("int8", "exact")


def test_a_run_becomes_smaller_in_several_turns(tmp_path: Path) -> None:
    """What the second rounding loses is added to what the first one lost."""
    path = tmp_path / "run"
    recorded(path, "tokens", "adamw")
    sizes = [dualform.open(path).nbytes]
    for keep in ("half", "int8", dualform.summaries(4, 8)):
        result = dualform.compact(path, keep)
        result.confirm()
        assert remainder(dualform.open(path)) <= 5e-6
        sizes.append(dualform.open(path).nbytes)
    assert sizes == sorted(sizes, reverse=True)
    before = contents(path)
    for keep in ("rows", "half", "int8", "summaries"):
        result = dualform.compact(path, keep)
        assert not result.changed
        assert f"left as it is: keep={keep!r} would not make it smaller" in " ".join(
            str(result).split()
        )
    assert contents(path) == before
    assert not Folders.of(path).before.exists()


def test_what_would_take_more_space_stays(tmp_path: Path) -> None:
    """A residual is as large as its parameter: it does not pay for a batch of two."""
    torch.manual_seed(0)
    path, model = tmp_path / "run", nn.Linear(50, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path, strict=True):
        for _ in range(3):
            model(torch.randn(2, 50)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not dualform.compact(path, "int8").changed


@pytest.mark.parametrize("policy", POLICIES)
def test_sessions_and_what_they_void(policy: str, tmp_path: Path) -> None:
    """A run that went on from an earlier step, with a killed session in between."""
    path = tmp_path / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3))
    saved = None
    for count in (6, 3, 4):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if saved is not None:
            model.load_state_dict(_copy(saved[0]))
            optimizer.load_state_dict(_copy(saved[1]))
        with dualform.record(model, optimizer, path, resume=saved is not None) as recorder:
            for step in range(count):
                model(torch.randn(64, 20)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 3 and saved is None:
                    recorder.checkpoint()
                    saved = (_copy(model.state_dict()), _copy(optimizer.state_dict()))
    old = dualform.open(path)
    assert remainder(old) <= 3e-6
    facts = (old.steps, old.kept_steps, old.ids, len(Ledger(path).starts))
    dualform.compact(path, POLICIES[policy])
    new = dualform.open(path)
    assert (new.steps, new.kept_steps, new.ids, len(Ledger(path).starts)) == facts
    assert remainder(new) <= 3e-6
    assert new.check() == []
    with dualform.record(model, optimizer, path, resume=True, strict=True):
        for _ in range(2):
            model(torch.randn(64, 20)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert remainder(dualform.open(path)) <= 3e-6
    with pytest.raises(LedgerError, match=r"recording went on in .* after it was compacted"):
        compaction.undo(path)
    compaction.confirm(path)


def _copy(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_copy(value) for value in state]
    return state.clone() if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks(policy: str, tmp_path: Path) -> None:
    """A run of two ranks gives what the same run of one rank gives."""
    model, x = recorded(tmp_path / "one", "tokens", "adamw")
    deal(tmp_path / "one", tmp_path / "two")
    keep = dualform.summaries(24, 24, "rows", "sums") if policy == "summaries" else policy
    found = []
    for name in ("one", "two"):
        assert dualform.compact(tmp_path / name, keep).changed
        run = dualform.open(tmp_path / name)
        assert remainder(run) <= 5e-6
        scores = run.explain(model, x[:2], target=lambda y: y.sum())
        found.append(scores.values[np.argsort(np.array(scores.ids))])
    assert np.allclose(*found, atol=1e-4 * np.abs(found[0]).max())


def test_rows_of_16_bits(tmp_path: Path) -> None:
    """They have no digits to lose to "half"; "int8" makes them smaller."""
    torch.manual_seed(0)
    path, model = tmp_path / "run", nn.Linear(30, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path, strict=True):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(400, 30)).float().square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    assert not dualform.compact(path, "half").changed
    before = dualform.open(path).audit().remainder
    assert dualform.compact(path, "int8").changed
    (shard,) = Ledger(path).shards
    assert shard.codec("model").to_json() == {
        "name": "int8",
        "keys": "bfloat16",
        "values": "bfloat16",
    }
    assert remainder(dualform.open(path)) <= before + 1e-6


@pytest.mark.parametrize("policy", POLICIES)
def test_undo_gives_back_every_byte(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    recorded(path)
    before = contents(path)
    result = dualform.compact(path, POLICIES[policy])
    assert contents(path) != before
    assert contents(result.old) == before
    result.undo()
    assert contents(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    with pytest.raises(LedgerError, match="nothing to undo"):
        compaction.undo(path)


def test_confirm_deletes_the_old_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    recorded(path)
    size = dualform.open(path).nbytes
    dualform.compact(path, "int8")
    with pytest.raises(LedgerError, match="compacted already, and that was not confirmed"):
        dualform.compact(path, "summaries")
    assert compaction.confirm(path) == size
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert not (path / COMPACTED_FILE).exists()
    for action, word in ((compaction.undo, "undo"), (compaction.confirm, "confirm")):
        with pytest.raises(LedgerError, match=f"nothing to {word}"):
            action(path)


def test_a_link_to_a_run(tmp_path: Path) -> None:
    recorded(tmp_path / "runs" / "one")
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "one")
    dualform.compact(tmp_path / "link", "int8").confirm()
    assert (tmp_path / "link").is_symlink()
    assert dualform.open(tmp_path / "link").check() == []


def test_the_folder_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    assert dualform.compact(".", "int8").old == tmp_path / "run.before-compact"
    monkeypatch.chdir(tmp_path)
    assert compaction.undo("run/") is None
    assert dualform.open("run").check() == []


def test_a_run_that_is_overwritten_is_no_compacted_one(tmp_path: Path) -> None:
    path = tmp_path / "run"
    recorded(path)
    dualform.compact(path, "int8")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path, overwrite=True):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    with pytest.raises(LedgerError, match="before-compact' is in the way"):
        compaction.undo(path)
    assert dualform.open(path).steps == 1
    assert dualform.open(Folders.of(path).before).steps == STEPS


def test_a_run_that_is_recorded_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "run", nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        with pytest.raises(RunLockedError, match="when its recording has ended"):
            dualform.compact(path, "int8")


@pytest.mark.parametrize(
    ("keep", "error", "problem"),
    [
        ("zip", RecordingError, "keep='zip' is unknown; there are 'auto', 'rows', 'half', 'int8'"),
        (
            "steps",
            RecordingError,
            "cannot be made of a run .* A compaction knows 'auto', 'rows', 'half'",
        ),
        ({"head": "half"}, RecordingError, "pattern 'head', and no parameter or module"),
        (7, RecordingError, "keep=7 is no policy"),
        ("summaries", LedgerError, "by the rule 'rmsprop' cannot become summaries.*keep='half'"),
    ],
)
def test_bad_policies(keep: Any, error: type[Exception], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    recorded(path, optimizer="rmsprop")
    before = contents(path)
    keep = dualform.summaries(4, 8) if keep == "summaries" else keep
    with pytest.raises(error, match=problem):
        dualform.compact(path, keep)
    assert contents(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_what_is_no_run(tmp_path: Path) -> None:
    for action in (lambda p: dualform.compact(p, "int8"), compaction.undo, compaction.confirm):
        with pytest.raises(NotARunError, match="there is nothing at that path"):
            action(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_damaged_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    recorded(path)
    (log,) = path.glob("writer-*/commits.jsonl")
    log.write_bytes(log.read_bytes().replace(b'"kind":"rows"', b'"kind":"rowz"', 1))
    with pytest.raises(CorruptError, match="is damaged"):
        dualform.compact(path, "int8")


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "run"
    recorded(path)
    other = Folders.of(path).before
    other.mkdir()
    (other / "thesis.tex").touch()
    with pytest.raises(LedgerError, match=r"in the way: .* holds thesis.tex"):
        dualform.compact(path, "int8")
    assert (other / "thesis.tex").exists()


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    recorded(path)
    usage = shutil.disk_usage(path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(LedgerError, match=r"would take \d+ MB, and its disk has 1 MB free"):
        dualform.compact(path, "int8")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("spoiled", ["write", "audit"])
def test_a_copy_that_fails_leaves_the_run(
    spoiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full after all, and a copy that does not balance."""
    path = tmp_path / "run"
    recorded(path)
    before = contents(path)

    if spoiled == "write":
        monkeypatch.setattr(front_door, "copy_run", _full_disk)
        problem = "cannot write the copy .* The run is as it was"
    else:
        lost: Callable[..., Any] = lambda *_: iter(())  # noqa: E731
        monkeypatch.setattr(rounding, "residuals", lost)
        problem = "is not the same run: '0.weight' has the remainder .* Please report this"
    with pytest.raises(LedgerError, match=problem):
        dualform.compact(path, "int8")
    assert contents(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def _full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")
