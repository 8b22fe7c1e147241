"""Processes that train together, of which one is killed, fails, saves or leaves."""

from __future__ import annotations

import json
import os
import resource
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.recording.distributed_loops import BATCH, LOOPS, own_passes, run_pass, start, whole_state
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dualform
from dualform.errors import DualformError, RecordingEndedWarning

NAME = "AdamW"
STEPS = 9
WHOLE = StateDictOptions(full_state_dict=True)


def go_on(
    rank: int,
    of: int,
    folder: Path,
    until: int,
    killed: tuple[int, int] | None = None,
    sharded: bool = False,
) -> None:
    """Trains up to a step from where the last checkpoint is, and saves one after every third.

    `killed` is a process, and the step before which it dies. Parameters are whole, or `sharded`.
    """
    loop, saved = LOOPS[NAME], folder / "saved.pt"
    model, data, begun = start(loop), loop.inputs().double(), 0
    sharded = sharded and of > 1
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = loop.optimizer(model.parameters(), lr=loop.lr)
    if saved.exists():
        state = torch.load(saved)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=WHOLE,
        )
        begun = state["step"]
    called = DistributedDataParallel(model) if of > 1 and not sharded else model
    resume = (folder / "run").exists()
    if of > 1:
        dist.barrier()  # before one of them makes it
    given = {"resume": resume, "processes": of, "strict": True}
    with dualform.record(called, optimizer, folder / "run", **given) as recorder:
        assert recorder.step == begun
        for step in range(begun, until):
            if killed == (rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
            for own in own_passes(loop, rank, of, step):
                run_pass(loop, called, recorder, data, own, of / BATCH)
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                recorder.checkpoint()
                weights, memory = get_state_dict(model, optimizer, options=WHOLE)
                if rank == 0:
                    state = {"model": weights, "optimizer": memory, "step": step + 1}
                    torch.save(state, folder / "draft.pt")
                    os.replace(folder / "draft.pt", saved)


def killed_1_at_5(rank: int, of: int, folder: Path) -> None:
    go_on(rank, of, folder, STEPS, (1, 5))


def killed_0_at_7(rank: int, of: int, folder: Path) -> None:
    go_on(rank, of, folder, STEPS, (0, 7))


def killed_1_at_5_in_parts(rank: int, of: int, folder: Path) -> None:
    go_on(rank, of, folder, STEPS, (1, 5), sharded=True)


def killed_0_at_7_in_parts(rank: int, of: int, folder: Path) -> None:
    go_on(rank, of, folder, STEPS, (0, 7), sharded=True)


def killed_as_said(rank: int, of: int, folder: Path, sharded: bool = False) -> None:
    """A file says who dies, and before which step; nobody, where there is none."""
    said = folder / "killed"
    victim = tuple(json.loads(said.read_text())) if said.exists() else None
    go_on(rank, of, folder, STEPS, victim, sharded)


def killed_as_said_in_parts(rank: int, of: int, folder: Path) -> None:
    killed_as_said(rank, of, folder, sharded=True)


def to_the_end(rank: int, of: int, folder: Path) -> None:
    go_on(rank, of, folder, STEPS)


def trained(
    rank: int,
    of: int,
    path: Path | None,
    full: int = -1,
    left: int = -1,
    saved: int = -1,
    sharded: bool = False,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights after six steps, and what warnings said.

    `full` is the process whose disk is full after two steps, `left` one that leaves after three,
    and `saved` the step after which process 0 saves, while the others wait.
    """
    loop = LOOPS[NAME]
    model, data = start(loop), loop.inputs().double()
    called = fully_shard(model) if sharded else DistributedDataParallel(model)
    optimizer = loop.optimizer(model.parameters(), lr=loop.lr)
    recording = None if path is None else dualform.record(called, optimizer, path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recorder = None if recording is None else recording.__enter__()
        for step in range(6):
            if full == rank and step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
            if left == rank and step == 3 and recording is not None:
                recording.__exit__(None, None, None)
                recorder = None
            for own in own_passes(loop, rank, of, step):
                run_pass(loop, called, recorder, data, own, of / BATCH)
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == saved:
                if rank == 0:
                    called.state_dict(), optimizer.state_dict()
                dist.barrier()
            if full >= 0 and step == 3 and recorder is not None:
                recorder.checkpoint()
        if recorder is not None and recording is not None:
            recording.__exit__(None, None, None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    ended = [str(each.message) for each in told if each.category is RecordingEndedWarning]
    return whole_state(model), ended


def refuse_to_begin(rank: int, path: Path) -> None:
    """Process 0 cannot write the whole weights: no process records, and none waits."""
    model = fully_shard(start(LOOPS[NAME]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path.mkdir(exist_ok=True)
    (path / "notes.txt").write_text("no run")
    with pytest.raises(DualformError, match="cannot record into"):
        dualform.record(model, optimizer, path).__enter__()


def fail_save_and_leave(rank: int, of: int, folder: Path) -> None:
    """Training is what it would be without a recording, whatever becomes of that."""
    plain, _ = trained(rank, of, None)

    def check(weights: dict[str, torch.Tensor]) -> None:
        assert all(torch.equal(weights[name], plain[name]) for name in plain)

    weights, ended = trained(rank, of, folder / "full", full=1)
    check(weights)
    assert len(ended) == 1, ended
    said = "File too large" if rank == 1 else "process"
    assert said in ended[0], ended
    weights, ended = trained(rank, of, folder / "full, in parts", full=1, sharded=True)
    check(weights)
    assert len(ended) == 1, ended
    refuse_to_begin(rank, folder / "no run")
    weights, ended = trained(rank, of, folder / "saved", saved=4)
    check(weights)
    assert not ended
