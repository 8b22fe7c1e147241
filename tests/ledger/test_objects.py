"""Runs in object storage: a real server over HTTP, and connections that are cut."""

from __future__ import annotations

import os
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.objects import CuttingProxy, get_folder, put_folder
from tests.processes import started
from torch import Tensor, nn

import dualform
from dualform.cli import cli
from dualform.errors import (
    CorruptError,
    LedgerError,
    NotARunError,
    RecordingEndedWarning,
    RunLockedError,
)
from dualform.ledger import Ledger, LedgerWriter, RunInfo, object_lock, object_path, object_store
from dualform.ledger.locks import lock_run
from dualform.ledger.log import LogWriter
from dualform.ledger.object_copies import BLOCK
from dualform.ledger.object_path import ObjectPath, run_path
from dualform.ledger.tensor_writing import write_tensors
from dualform.ledger.tensors import TensorFile
from dualform.testing import LedgerContract, tiny_run
from dualform.testing.ledgers import block

ROWS = torch.arange(3 * BLOCK // 4, dtype=torch.float32)[:, None]
"""Three blocks of an object."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not wait as long as trainings do."""
    monkeypatch.setattr(object_store, "READING", 1.0)
    monkeypatch.setattr(object_store, "WRITING", 1.0)
    monkeypatch.setattr(object_lock, "RENEWED", 0.1)
    monkeypatch.setattr(object_lock, "DEAD", 0.5)


def test_a_run_is_read_as_from_a_disk(bucket: ObjectPath) -> None:
    """What is asked of a run has the same bits wherever its files are."""
    near, model, x = tiny_run()
    dualform.describe(near.path, ids=[0, 1], labels=["cat", "dog"], previews=torch.ones(2, 4, 4))
    put_folder(near.path, bucket / "run")
    far = dualform.open(str(bucket / "run"))
    assert far.audit().to_dict() == near.audit().to_dict()
    assert far.samples.labels == near.samples.labels
    assert torch.equal(far.samples.preview(1).data, near.samples.preview(1).data)
    for ask in (
        lambda run: run.spotlight(model, x)["2"].sums,
        lambda run: run.explain(model, x).sums,
        lambda run: run.influence(model, x).top(5).rows,
    ):
        assert repr(ask(near)) == repr(ask(far))
    assert list(Ledger(far.path).check()) == []
    verbs = ("audit", "info", "top")
    said = {path: [printed(verb, path) for verb in verbs] for path in (near.path, far.path)}
    assert said[near.path] == said[far.path] != ["", "", ""]
    with pytest.raises(LedgerError, match=r"is in object storage, .* on a disk only: copy the run"):
        dualform.compact(str(far.path), keep="half")


def printed(verb: str, path: Path) -> str:
    """What a verb says of a run."""
    options = ["--sample", "1"] if verb == "top" else []
    return CliRunner().invoke(cli, [verb, str(path), "--json", *options]).output


def test_what_is_wrong_is_said(bucket: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message names what was given, what is there, and what to do."""
    (bucket / "other" / "notes.txt").write_text("nothing")
    with pytest.raises(NotARunError, match=r"there is nothing at that path"):
        dualform.open(f"{bucket}/none")
    with pytest.raises(NotARunError, match=r"the folder has no run.json but holds notes.txt"):
        dualform.open(f"{bucket}/other")
    with pytest.raises(LedgerError, match=r"no bucket 'elsewhere' .*http://127.*make it, or give"):
        dualform.open("s3://elsewhere/run")
    with pytest.raises(LedgerError, match=r"a run is in a folder, or at file://, gs://, s3://"):
        dualform.open("ftp://host/run")
    with pytest.raises(LedgerError, match=r"names no folder in a bucket, such as 's3://runs/run'"):
        dualform.open("s3://runs")
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setenv("AWS_REGION", "elsewhere")  # other settings connect anew
    with pytest.raises(LedgerError, match=r"obstore: pip install 'dualform\[cloud\]'"):
        dualform.open(f"{bucket}/none")


def test_a_path_is_a_url_everywhere(tmp_path: Path) -> None:
    """Neighbors, copies in other processes and names keep the scheme; a disk is never touched."""
    path = run_path("s3://bucket/a/run")
    assert pickle.loads(pickle.dumps(path / "x")) == path / "x" == run_path(f"{path}/x")
    assert str((path / "x.json").with_suffix(".bin").parent) == str(path) == f"{path.absolute()}"
    assert run_path(Path("s3://bucket/a/run")) == path
    assert run_path(tmp_path.as_uri()) == run_path(tmp_path) == tmp_path
    for touch in (os.listdir, os.remove, Path.touch, Path.rmdir, lambda one: one.open("wb")):
        with pytest.raises(LedgerError):
            touch(path)


def test_only_what_is_asked_for_is_fetched(bucket: ObjectPath, proxy: CuttingProxy) -> None:
    """A block of a large object comes for a row of it, once."""
    write_tensors(bucket / "x.safetensors", {"keys": [ROWS], "values": [ROWS]})
    file = TensorFile(bucket / "x.safetensors")
    opened = proxy.passed
    assert opened < 1.1 * BLOCK
    for _ in range(2):
        assert torch.equal(file.read("values", 9, 12), ROWS[9:12])
        assert torch.equal(file.mapped().rows("values", 5, 7), ROWS[5:7])
    assert proxy.passed - opened < 1.1 * BLOCK


def test_a_connection_that_drops_is_made_again(bucket: ObjectPath, proxy: CuttingProxy) -> None:
    """Reading goes on where a connection was cut within a shard, and says so if it must give up."""
    path = bucket / "x.safetensors"
    write_tensors(path, {"keys": [ROWS]})
    file = TensorFile(path)
    proxy.cuts, proxy.after = 3, BLOCK // 2
    assert torch.equal(file.read("keys"), ROWS)
    assert proxy.cuts == 0
    file = TensorFile(path)
    proxy.cuts = 1000
    write_tensors(bucket / "y.safetensors", {"keys": [ROWS]})
    with pytest.raises(LedgerError, match=r"cannot read 's3://.*y.safetensors': .*for 1 seconds"):
        TensorFile(bucket / "y.safetensors").read("keys")
    proxy.cuts = 0
    assert torch.equal(TensorFile(bucket / "y.safetensors").read("keys"), ROWS)


def test_what_is_large_is_put_in_parts(
    bucket: ObjectPath, proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a connection is cut in the middle of one."""
    for module in (object_store, object_path):
        monkeypatch.setattr(module, "WHOLE", BLOCK)
    monkeypatch.setattr(object_store, "PART", 5 << 20)  # the least that S3 takes
    proxy.upwards, proxy.cuts, proxy.after = True, 1, 3 << 20
    arrays = {"keys": [ROWS, ROWS[:5], ROWS], "values": [ROWS[:7]]}
    length, checksum = write_tensors(bucket / "x.safetensors", arrays)
    assert proxy.cuts == 0
    assert (bucket / "x.safetensors").stat().st_size == length
    file = TensorFile(bucket / "x.safetensors")
    assert file.checksum() == checksum
    assert torch.equal(file.read("keys"), torch.cat(arrays["keys"]))


def test_what_was_replaced_is_not_mixed(bucket: ObjectPath) -> None:
    """An opened file has the bytes it was opened with, or none."""
    path = bucket / "x.safetensors"
    write_tensors(path, {"keys": [ROWS]})
    file = TensorFile(path)
    path.unlink()
    write_tensors(path, {"keys": [ROWS + 1]})
    with pytest.raises(LedgerError, match=r"was replaced while it was read; open the run again"):
        file.read("keys")
    assert torch.equal(TensorFile(path).read("keys"), ROWS + 1)
    (bucket / "x.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"x.safetensors' is missing"):
        TensorFile(path)


def test_credentials_that_are_missing_are_named(
    bucket: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # no machine of Amazon's
    with pytest.raises(LedgerError, match=r"there are none.*AWS_ACCESS_KEY_ID and AWS_SECRET"):
        dualform.open(str(bucket))
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody is logged in
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):  # no machine of Google's
        monkeypatch.setenv(name, "127.0.0.1:9")
    with pytest.raises(LedgerError, match=r"there are none.*GOOGLE_APPLICATION_CREDENTIALS\."):
        dualform.open("gs://runs/digits")


class TestBucket(LedgerContract):
    """The same contract as on a disk."""

    @pytest.fixture
    def tmp_path(self, bucket: ObjectPath) -> ObjectPath:
        return bucket

    def create(self, path: Path, initial: dict[str, Tensor]) -> LedgerWriter:
        return LedgerWriter.create(path, RunInfo(), initial)

    def resume(self, path: Path, step: int) -> LedgerWriter:
        return LedgerWriter.resume(path, step)

    def read(self, path: Path) -> Ledger:
        return Ledger(path)


def train(path: Path | str, steps: int = 6, begun: Any = None, **options: Any) -> Any:
    """A training that always is the same, or goes on: model and optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    if begun is not None:
        model.load_state_dict(begun[0])
        optimizer.load_state_dict(deepcopy(begun[1]))
    with dualform.record(model, optimizer, path, **options) as recorder:
        for step in range(steps):
            recorder.samples([f"sample {step}", "always"])
            model(x[step : step + 2]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                recorder.checkpoint()
                saved = deepcopy((model.state_dict(), optimizer.state_dict()))
    return model, saved


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("writer-*-rank0-*/*.safetensors"))


def test_a_run_is_recorded_as_on_a_disk(bucket: ObjectPath, tmp_path: Path) -> None:
    """The same files, byte by byte, and so the same answers."""
    near, far = tmp_path / "run", bucket / "run"
    _, saved = train(near)
    train(str(far))
    for begun in (near, far):
        model, _ = train(begun, 4, begun=saved, resume=True)
    assert [one.read_bytes() for one in shards(near)] == [one.read_bytes() for one in shards(far)]
    runs, x = [dualform.open(path) for path in (near, far)], torch.randn(2, 4)
    assert runs[0].steps == 6
    for ask in (
        lambda run: run.audit().to_dict(),
        lambda run: repr(run.spotlight(model, x)["2"].sums),
        lambda run: run.explain(model, x, 0).top(5).rows,
        lambda run: run.ids,
    ):
        assert ask(runs[0]) == ask(runs[1])
    assert not Ledger(far).unfinished


def test_a_copied_run_is_one_on_a_disk(bucket: ObjectPath, tmp_path: Path) -> None:
    """Also one whose writer was killed, and so has its log line by line."""
    writer = LedgerWriter.create(bucket / "run", RunInfo(), {"w": torch.zeros(2)})
    for step in (1, 2):
        writer.append(block(step, step))
        writer.flush()
    get_folder(bucket / "run", tmp_path / "copy")
    copied = Ledger(tmp_path / "copy")
    assert (copied.last_step, copied.unfinished, list(copied.check())) == (2, True, [])
    lines = sorted((tmp_path / "copy").glob("writer-*/commits-*"))
    lines[1].unlink()
    with pytest.raises(CorruptError, match="has lost a line"):
        Ledger(tmp_path / "copy")
    writer.close()


def test_one_of_two_writers_that_begin_at_once_fails(bucket: ObjectPath) -> None:
    """However they begin; what the other one has begun is a run."""

    def create(_: int) -> LedgerWriter | str:
        try:
            return LedgerWriter.create(bucket / "run", RunInfo(), {"w": torch.zeros(2)})
        except LedgerError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        begun = list(pool.map(create, range(4)))
    (writer,) = [one for one in begun if isinstance(one, LedgerWriter)]
    for said in set(begun) - {writer}:
        assert "another process is recording into" in str(said)
    writer.append(block(1, 2))
    writer.close()
    assert Ledger(bucket / "run").last_step == 2


def test_a_writer_that_sleeps_is_taken_over_and_cannot_commit(
    bucket: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on closes the log of the other, who may have slept and not died."""
    monkeypatch.setattr(object_lock, "RENEWED", 60.0)  # so that it looks as if it slept
    asleep = LedgerWriter.create(bucket / "run", RunInfo(), {"w": torch.zeros(2)})
    asleep.append(block(1, 2))
    asleep.flush()
    monkeypatch.setattr(object_lock, "RENEWED", 0.1)
    other = LedgerWriter.resume(bucket / "run", 2)
    asleep.append(block(3, 4))
    with pytest.raises(RunLockedError, match=r"another process has taken over .* up to step 2"):
        asleep.flush()
    asleep.abandon()
    other.append(block(3, 5))
    other.close()
    ledger = Ledger(bucket / "run")
    assert (ledger.last_step, ledger.damage, ledger.unfinished) == (5, [], False)
    assert ledger.column("fc/keys")[::2, 0].tolist() == [1, 2, 3, 4, 5]


def test_a_run_that_was_never_begun_is_replaced(
    bucket: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer may sleep between any two steps of beginning it, and cannot begin it later."""
    monkeypatch.setattr(object_lock, "RENEWED", 60.0)
    path, folder = bucket / "run", "writer-0001-rank0-00000000"
    asleep = lock_run(path)
    write_tensors(path / "initial.safetensors", {"w": [torch.ones(2)]})
    asleep.claim(folder)
    monkeypatch.setattr(object_lock, "RENEWED", 0.1)
    writer = LedgerWriter.create(path, RunInfo(), {"w": torch.zeros(2)})
    with pytest.raises(RunLockedError, match="another process has taken over"):
        LogWriter(path / folder, {"session": 1, "rank": 0, "of": 1, "step": 0}, None)
    with pytest.raises(RunLockedError, match=r"another process has taken over .* was not renewed"):
        asleep.claim(folder)
    asleep.release()  # does not take the lock from the other
    with pytest.raises(RunLockedError, match="another process is recording into"):
        lock_run(path)
    writer.append(block(1, 2))
    writer.close()
    ledger = Ledger(path)
    assert (ledger.last_step, ledger.weights(0)["w"].tolist()) == (2, [0.0, 0.0])


def test_several_ranks_record_one_run(bucket: ObjectPath) -> None:
    path = bucket / "run"
    first = LedgerWriter.create(path, RunInfo(), {"w": torch.zeros(2)}, of=2)
    second = LedgerWriter.join(path, 1)
    with pytest.raises(LedgerError, match=r"rank 1 cannot join|another process is recording"):
        LedgerWriter.join(path, 1)
    for writer, last in ((first, 3), (second, 2)):
        writer.append(block(1, last))
        writer.flush()
    assert Ledger(path).last_step == 2
    with pytest.raises(RunLockedError, match="another process is recording into"):
        LedgerWriter.resume(path, 0)
    first.close()
    with pytest.raises(RunLockedError, match="as rank 1"):
        LedgerWriter.resume(path, 0)
    second.close()
    assert Ledger(path).last_step == 2


def killed_while_it_records(path: str, environment: dict[str, str]) -> None:
    """Begins a run or goes on with it, and says which steps are committed, until it is killed."""
    os.environ.update(environment)
    object_lock.RENEWED, object_lock.DEAD = 0.1, 0.5
    run = run_path(path)
    if (run / "run.json").exists():
        writer = LedgerWriter.resume(run, Ledger(run).last_step)
    else:
        writer = LedgerWriter.create(run, RunInfo(), {"w": torch.zeros(2)})
    for step in count(writer.committed + 1):
        writer.append(block(step, step))
        writer.flush()
        print(step, flush=True)


def test_a_killed_writer_loses_nothing_that_it_committed(bucket: ObjectPath) -> None:
    """Its lock is watched for a while, and then the run goes on."""
    with started(killed_while_it_records, str(bucket / "run"), dict(os.environ)) as (
        process,
        printed,
    ):
        assert [printed.readline(), printed.readline()] == ["1\n", "2\n"]
        with pytest.raises(RunLockedError, match="another process is recording into"):
            LedgerWriter.resume(bucket / "run", 2)
        process.kill()
        process.join()
    left = Ledger(bucket / "run")
    assert left.last_step >= 2
    assert list(left.check()) == []
    writer = LedgerWriter.resume(bucket / "run", left.last_step)
    writer.append(block(left.last_step + 1, left.last_step + 1))
    writer.close()
    assert Ledger(bucket / "run").last_step == left.last_step + 1


@pytest.mark.long
def test_kills_and_cuts_lose_nothing_that_was_committed(
    bucket: ObjectPath, proxy: CuttingProxy
) -> None:
    """Twelve writers, each killed somewhere, over connections that are cut anywhere."""
    chance, said = Random(0), 0
    for _ in range(12):
        given = (str(bucket / "run"), dict(os.environ))
        with started(killed_while_it_records, *given) as (process, printed):
            for _ in range(chance.randint(0, 6)):
                proxy.upwards, proxy.after = chance.random() < 0.5, chance.randint(0, 2000)
                proxy.cuts = chance.randint(0, 3)
                said = int(printed.readline() or said)
            time.sleep(chance.random() / 5)
            process.kill()
            process.join()
        proxy.cuts = 0
        if (bucket / "run" / "run.json").exists():
            left = Ledger(bucket / "run")
            assert left.last_step >= said
            assert list(left.check()) == []
            steps = left.column("fc/keys")[::2, 0].tolist()
            assert steps == list(range(1, left.last_step + 1))
    assert said > 12


def test_a_commit_whose_answer_is_lost_is_one(bucket: ObjectPath, proxy: CuttingProxy) -> None:
    """Requests and answers are cut in the middle; what is committed is there once."""
    writer = LedgerWriter.create(bucket / "run", RunInfo(), {"w": torch.zeros(2)})
    for step in range(1, 9):
        proxy.upwards, proxy.after, proxy.cuts = bool(step % 2), step, 1
        writer.append(block(step, step))
        writer.flush()
        assert proxy.cuts == 0
    writer.close()
    ledger = Ledger(bucket / "run")
    assert (ledger.last_step, list(ledger.check())) == (8, [])


def test_a_connection_that_stays_away_ends_the_recording(
    bucket: ObjectPath, proxy: CuttingProxy
) -> None:
    """The training goes on, what is committed stays, and the run is gone on with later."""

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = dualform.record(model, optimizer, bucket / "run").__enter__()
    for step in range(4):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            recorder.checkpoint()
            saved = deepcopy(model.state_dict())
            proxy.cuts = 10**6
    with pytest.warns(RecordingEndedWarning, match=r"for 1 seconds.*readable up to step 2"):
        recorder.__exit__(None, None, None)
    proxy.cuts = 0
    assert dualform.open(bucket / "run").steps == 2
    model.load_state_dict(saved)
    with dualform.record(model, optimizer, bucket / "run", resume=True):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert dualform.open(bucket / "run").audit().remainder < 1e-6
