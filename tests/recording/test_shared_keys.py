"""Keys are stored once; whatever is read of a run is the same, bit for bit, as if they were not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.compaction.runs import contents
from torch import Tensor, nn

import dualform
from dualform.compaction.rounding import read_rows
from dualform.errors import CorruptError
from dualform.ledger import Ledger
from dualform.ledger.shared_keys import SharedKeys
from dualform.recording.keep import Keep

SAMPLES, BATCH, EPOCHS = 24, 8, 4
ALONG_BASES = dualform.summaries(8, 16)


class Attention(nn.Module):
    """A first layer, and projections of one input to queries, keys and values of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(18, 20)
        self.q, self.k = nn.Linear(20, 8, bias=False), nn.Linear(20, 8, bias=False)
        self.v = nn.Linear(20, 12)
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        scores = self.q(x) @ self.k(x).mT
        found: Tensor = self.last(scores.softmax(-1) @ self.v(x)).mean(1)
        return found


class Convolutions(nn.Module):
    """Two convolutions of the input, which itself is data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(2, 4, 1)
        self.last = nn.Linear(4 * 25, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last((self.one(x).tanh() + self.other(x)).flatten(1))
        return found


class Words(nn.Module):
    """A table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(30, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.table(x)).tanh().mean(1)
        return found


class Wide(nn.Sequential):
    """One row a sample, of which summaries keep the numbers along their bases."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "attention": (Attention, (SAMPLES, 5, 18)),
    "convolutions": (Convolutions, (SAMPLES, 2, 5, 5)),
    "words": (Words, (SAMPLES, 9)),
    "wide": (Wide, (SAMPLES, 40)),
}


def data(name: str) -> Tensor:
    shape = MODELS[name][1]
    draw = torch.Generator().manual_seed(1)
    return (
        torch.randint(30, shape, generator=draw)
        if name == "words"
        else torch.randn(shape, generator=draw)
    )


def recorded(
    path: Path,
    name: str = "attention",
    keep: Keep = "rows",
    *,
    epochs: int = EPOCHS,
    named: bool = True,
    noise: float = 0.0,
    **given: Any,
) -> tuple[nn.Module, Tensor]:
    """Some epochs in another order each; a shard for each."""
    torch.manual_seed(0)
    model, x = MODELS[name][0](), data(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, path, keep=keep, strict=True, **given) as recorder:
        for _ in range(epochs):
            for batch in torch.randperm(SAMPLES).split(BATCH):
                if named:
                    recorder.samples(batch)
                seen = x[batch] + noise * torch.randn(x[batch].shape) if noise else x[batch]
                model(seen).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            recorder.checkpoint()
    return model, x


def everything(path: Path, model: nn.Module, x: Tensor) -> Iterator[tuple[str, Any]]:
    """All rows, and what reads by chunks, by visits and by samples give."""
    run, ledger = dualform.open(path), Ledger(path)
    for at, shard in enumerate(ledger.shards):
        for stream in ledger.info.streams:
            if f"{stream.name}/segments" in shard.file:
                rows = read_rows(shard, stream)
                yield f"keys of {stream.name} in {at}", rows.keys
                yield f"values of {stream.name} in {at}", rows.values
    for layer, reading in run.spotlight(model, x[:3]).items():
        yield f"spotlight {layer}", reading.samples().values
    yield "explain", run.explain(model, x[:3], target=0).values
    if not any(stream.layer for stream in ledger.info.streams):
        for layer, reading in run.revisit([3, 5]).items():
            yield f"revisit {layer}", reading.check.total
    yield "subtract", np.concatenate([w.numpy().ravel() for w in run.subtract([0]).values()])
    yield "remainder", run.audit().remainder
    yield "check", run.check()


def assert_same(path: Path, other: Path, model: nn.Module, x: Tensor) -> None:
    pairs = zip(everything(path, model, x), everything(other, model, x), strict=True)
    for (what, found), (also, expected) in pairs:
        assert what == also
        same = torch.equal if isinstance(found, Tensor) else np.array_equal
        assert same(found, expected), what


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Within its context, every stream stores all its keys."""
    with monkeypatch.context() as patch:
        yield patch


def leave_nothing_out(*_: Any) -> dict[str, str]:
    return {}


def lines(path: Path) -> list[dict[str, str]]:
    return [shard.record.get("same_keys", {}) for shard in Ledger(path).shards]


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("attention", "rows"),
        ("attention", "int8"),
        ("convolutions", "half"),
        ("words", "rows"),
        ("wide", ALONG_BASES),
    ],
    ids=str,
)
def test_reads_are_those_of_a_run_that_stores_all_keys(
    name: str, keep: Keep, tmp_path: Path, apart: pytest.MonkeyPatch
) -> None:
    model, x = recorded(tmp_path / "once", name, keep)
    apart.setattr(SharedKeys, "leave_out", leave_nothing_out)
    again, _ = recorded(tmp_path / "all", name, keep)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert_same(tmp_path / "once", tmp_path / "all", model, x)
    once, everywhere = (dualform.open(tmp_path / path).nbytes for path in ("once", "all"))
    assert once < everywhere


def test_what_is_left_out(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    ledger = Ledger(tmp_path / "run")
    assert lines(tmp_path / "run") == [{"k": "q", "v": "q"}] * EPOCHS
    assert [shard.file.rows("first/keys") for shard in ledger.shards] == [SAMPLES * 5, 0, 0, 0]
    assert [shard.file.rows("first/places") for shard in ledger.shards] == [0, *[SAMPLES] * 3]
    assert all(shard.file.rows("last/keys") == SAMPLES * 5 for shard in ledger.shards)


def test_samples_need_no_names(tmp_path: Path) -> None:
    """Keys are known by what they are."""
    recorded(tmp_path / "run", named=False)
    shards = Ledger(tmp_path / "run").shards
    assert [shard.file.rows("first/keys") for shard in shards] == [SAMPLES * 5, 0, 0, 0]


def test_keys_that_differ_are_given_up(tmp_path: Path, apart: pytest.MonkeyPatch) -> None:
    """Samples that come again with other inputs: their keys are not looked at for long."""
    model, x = recorded(tmp_path / "run", epochs=6, noise=0.1)
    assert all(shard.file.rows("first/places") == 0 for shard in Ledger(tmp_path / "run").shards)
    apart.setattr(SharedKeys, "leave_out", leave_nothing_out)
    recorded(tmp_path / "all", epochs=6, noise=0.1)
    assert_same(tmp_path / "run", tmp_path / "all", model, x)


def test_streams_kept_by_other_codecs_store_their_own_keys(tmp_path: Path) -> None:
    recorded(tmp_path / "run", keep={"q": "half", "*": "rows"})
    assert lines(tmp_path / "run") == [{"v": "k"}] * EPOCHS


def test_a_stream_that_ends_leaves_its_keys_to_the_next(
    tmp_path: Path, apart: pytest.MonkeyPatch
) -> None:
    """The one that had the keys is kept by step from the middle of a shard on."""

    def train(path: Path) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        model, x = Attention(), data("attention")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dualform.record(model, optimizer, path) as recorder:
            for step in range(9):
                model(x[:BATCH]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 4:
                    with torch.no_grad():
                        model.v.weight.mul_(0.9)
                        model.q.weight.mul_(0.9)
                if step % 3 == 2:
                    recorder.checkpoint()
        return model, x

    with pytest.warns(dualform.errors.CoverageWarning):
        model, x = train(tmp_path / "once")
    found = lines(tmp_path / "once")
    assert len(found[0]) == 2
    assert found[-1] == {}
    apart.setattr(SharedKeys, "leave_out", leave_nothing_out)
    with pytest.warns(dualform.errors.CoverageWarning):
        train(tmp_path / "all")
    assert_same(tmp_path / "once", tmp_path / "all", model, x)


def test_another_session_begins_with_nothing(tmp_path: Path) -> None:
    """Then nothing depends on what it may void; what it goes on after is read as before."""
    path = tmp_path / "run"
    recorded(path, epochs=2)
    torch.manual_seed(0)
    model = Attention()
    state = dualform.open(path).at(6).state_dict()
    model.load_state_dict(state, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = data("attention")
    with dualform.record(model, optimizer, path, resume=True) as recorder:
        for _ in range(2):
            recorder.samples(range(BATCH))
            model(x[:BATCH]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.checkpoint()
    shards = Ledger(path).shards
    assert [shard.file.rows("first/keys") for shard in shards] == [SAMPLES * 5, 0, BATCH * 5, 0]
    assert dualform.open(path).check() == []


@pytest.mark.parametrize("keep", ["half", ALONG_BASES], ids=str)
def test_a_compacted_run_stores_keys_once(keep: Keep, tmp_path: Path) -> None:
    """It is the one recorded with less, and its undoing brings back every byte."""
    path, name = tmp_path / "run", "convolutions" if keep == "half" else "wide"
    model, x = recorded(path, name)
    before, rows = contents(path), dict(everything(path, model, x))
    assert dualform.compact(path, keep).changed
    shards = Ledger(path).shards
    assert all(shard.repeating for shard in shards[1:])
    assert dualform.open(path).check() == []
    if keep == "half":
        recorded(tmp_path / "small", name, keep)
        for own, other in zip(shards, Ledger(tmp_path / "small").shards, strict=True):
            assert own.record["same_keys"] == other.record["same_keys"]
            for array in other.file.arrays:
                if array != "factors":
                    assert torch.equal(own.file.read(array), other.file.read(array)), array
    dualform.compaction.undo(path)
    assert contents(path) == before
    for what, found in everything(path, model, x):
        assert np.array_equal(found, rows[what]), what


def test_a_lost_or_altered_table_is_named(tmp_path: Path) -> None:
    """Reading another shard's rows then fails, and says which file is missing."""
    path = tmp_path / "run"
    model, x = recorded(path)
    first = Ledger(path).shards[0].path
    whole = first.read_bytes()
    first.write_bytes(whole[:-8])
    with pytest.raises(CorruptError, match=f"{first.name}.*its log says"):
        dualform.open(path).spotlight(model, x[:1])["first"].samples()
    altered = bytearray(whole)
    altered[-1] ^= 1
    first.write_bytes(altered)
    assert any(first.name in problem for problem in dualform.open(path).check())
    first.unlink()
    assert any(first.name in problem for problem in dualform.open(path, damaged=True).check())
