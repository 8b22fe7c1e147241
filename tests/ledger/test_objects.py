"""Runs in object storage: a real server over HTTP, and connections that are cut."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from tests.objects import CuttingProxy, put_folder

import dualform
from dualform.errors import CorruptError, LedgerError, NotARunError
from dualform.ledger import Ledger, object_store
from dualform.ledger.object_copies import BLOCK
from dualform.ledger.object_path import ObjectPath, run_path
from dualform.ledger.tensor_writing import write_tensors
from dualform.ledger.tensors import TensorFile
from dualform.testing import tiny_run

ROWS = torch.arange(3 * BLOCK // 4, dtype=torch.float32)[:, None]
"""Three blocks of an object."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not wait as long as trainings do."""
    monkeypatch.setattr(object_store, "READING", 1.0)
    monkeypatch.setattr(object_store, "WRITING", 2.0)


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
    with pytest.raises(LedgerError, match=r"is in object storage, .* on a disk only: copy the run"):
        dualform.compact(str(far.path), keep="half")


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
    assert run_path(tmp_path.as_uri()) == tmp_path
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


def test_what_was_replaced_is_not_mixed(bucket: ObjectPath) -> None:
    """An opened file has the bytes it was opened with, or none."""
    path = bucket / "x.safetensors"
    write_tensors(path, {"keys": [ROWS]})
    file = TensorFile(path)
    write_tensors(path, {"keys": [ROWS + 1]})
    with pytest.raises(LedgerError, match=r"was replaced while it was read; open the run again"):
        file.read("keys")
    assert torch.equal(TensorFile(path).read("keys"), ROWS + 1)
    (bucket / "x.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"x.safetensors' is missing"):
        TensorFile(path)


def test_credentials_that_are_missing_are_named(
    bucket: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # no machine of Amazon's
    with pytest.raises(LedgerError, match=r"there are none.*AWS_ACCESS_KEY_ID and AWS_SECRET"):
        dualform.open(str(bucket))
