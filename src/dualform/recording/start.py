"""Starting a run, or going on with one."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dualform.errors import ModelMismatchError, UnknownStepError
from dualform.ledger import Declaration, Ledger, LedgerWriter, RunInfo, SampleTable
from dualform.ledger.log import session_and_rank
from dualform.ledger.tensors import TensorFile
from dualform.optimizers import Rule
from dualform.recording.book_states import Note
from dualform.recording.plan import Plan, state_tensors
from dualform.recording.processes import Line
from dualform.recording.shards import Gathering, Kept, Piece
from dualform.recording.snapshots import buffered, memories, snapshot
from dualform.version import __version__


@dataclass(frozen=True)
class Opened:
    """A writer, and what it must know of the run so far."""

    writer: LedgerWriter
    samples: SampleTable
    by_step: Mapping[str, str] = field(default_factory=dict)
    """Books that were already kept by step, and why."""
    streams: tuple[Declaration, ...] = ()
    """What is already declared."""
    notes: tuple[Note, ...] = ()
    """Books that are kept by step from here on, and why."""
    named: bool = False
    """Whether its samples certainly have ids: numbers that are counted are 0, 1, 2 …"""


def start_run(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    rule: Rule,
    overwrite: bool,
    line: Line,
) -> Opened:
    """A new run folder that holds the weights training starts from."""
    info = RunInfo(
        books=plan.books,
        rule=rule.name,
        fields=rule.fields,
        metadata=_metadata(model, optimizer),
    )
    memory = memories(optimizer, plan, rule)
    start = {"buffers": buffered(memory)}
    with Gathering(line, {**snapshot(model), **memory}) as initial:
        writer = LedgerWriter.create(
            path, info, initial.arrays, overwrite=overwrite, start=start, of=line.of
        )
    return Opened(writer, SampleTable(of=line.of))


def resume_run(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    rule: Rule,
    line: Line,
    step: int,
) -> Opened:
    """Goes on from a kept step, whose weights the model has; later steps no longer count."""
    memory = memories(optimizer, plan, rule)
    with Gathering(line, snapshot(model) | memory) as now:
        writer = LedgerWriter.resume(path, step, {"buffers": buffered(memory)}, of=line.of)
        if step and not rule.by_numbers:  # what the optimizer remembers now is what counts
            writer.weights(step, now.arrays, "resume")
            writer.flush()
    return _gone_on(path, writer, plan)


def give_parts(model: nn.Module, optimizer: Optimizer, plan: Plan, rule: Rule, line: Line) -> None:
    """Gives process 0 this one's parts of what it keeps as a run begins."""
    if plan.parts:
        with Gathering(line, snapshot(model) | memories(optimizer, plan, rule)):
            pass


def join_run(path: Path, rank: int, plan: Plan) -> Opened:
    """Records beside process 0, which has just made the run or gone on with it."""
    return _gone_on(path, LedgerWriter.join(path, rank), plan)


def _gone_on(path: Path, writer: LedgerWriter, plan: Plan) -> Opened:
    """What a writer must know of a run that may have steps already."""
    step = writer.committed
    ledger = Ledger(path)  # as it reads now, without what was written beyond that step
    samples, strings = ledger.samples(), ledger.ids.by_rank.get(writer.rank, [])
    kind = (str if ledger.ids.strings else int) if len(samples) else None
    by_step = {book.name: book.reason for book in ledger.info.books if book.reason}
    by_step |= {note["book"]: note["reason"] for note in reversed(ledger.notes)}
    planned = [book for book in plan.books if book.reason and book.name not in by_step]
    notes = tuple([Note(step + 1, book.name, book.reason) for book in planned])
    counted = int(samples.max()) + 1 if len(samples) else 0
    table = SampleTable(strings, kind, writer.rank, writer.of, counted)
    named = bool(ledger.ids.strings) or not _are_counted(ledger)
    return Opened(writer, table, by_step, ledger.info.declarations, notes, named)


def _are_counted(ledger: Ledger) -> bool:
    """Whether samples may have been numbered as they came, by each process in strides."""
    following: dict[tuple[int, int], int] = {}
    counts, counted = {start["session"]: start["of"] for start in ledger.starts}, 0
    for shard in ledger.shards:
        at, samples = session_and_rank(shard.path.parent), ledger.samples(shard)
        of = counts[at[0]]
        if at[0] not in {session for session, _ in following}:
            following |= {(at[0], rank): counted + rank for rank in range(of)}
        end = following[at] + of * len(samples)
        if not torch.equal(samples, torch.arange(following[at], end, of)):
            return False
        following[at] = end
        counted = max(counted, end - of + 1 if len(samples) else 0)
    return True


def matching_steps(path: Path, model: nn.Module, plan: Plan, rule: Rule) -> list[int]:
    """The kept steps whose weights the model has, as far as this process has them."""
    ledger, now = Ledger(path), snapshot(model)
    _check_same(ledger, plan, rule)
    return [
        step
        for step in ledger.kept_steps
        if all(_is_kept(ledger.kept(step), name, kept) for name, kept in now.items())
    ]


def last_of_all(path: Path, matching: Sequence[Sequence[int]]) -> int:
    """The last kept step that matches in all processes."""
    found = set.intersection(*map(set, matching))
    if found:
        return max(found)
    raise UnknownStepError(
        f"cannot go on with '{path}': the model's weights are those of none of its kept steps "
        f"{Ledger(path).kept_steps}; load a checkpoint of one of them. A step is kept where model "
        "and optimizer are saved, or where recorder.checkpoint() is called before saving."
    )


def _is_kept(file: TensorFile, name: str, kept: Kept) -> bool:
    """Whether a file has the same of a parameter as this process does; of a part, that part."""
    if name not in file:
        return False
    if not isinstance(kept, Piece):
        return torch.equal(file.read(name), kept)
    part = kept.part
    if part.dim:
        there = file.read(name).narrow(part.dim, part.start, part.stop - part.start)
    else:
        there = file.read(name, part.start, part.stop)
    return torch.equal(there, kept.own)


def _check_same(ledger: Ledger, plan: Plan, rule: Rule) -> None:
    if ledger.info.rule != rule.name:
        raise ModelMismatchError(
            f"cannot go on with '{ledger.path}': it was recorded by the rule '{ledger.info.rule}', "
            f"and this optimizer has the rule '{rule.name}'."
        )
    recorded = {book.name: book.shape for book in ledger.info.books}
    given = {book.name: book.shape for book in plan.books}
    for name in [*recorded, *given]:
        if recorded.get(name) != given.get(name):
            raise ModelMismatchError(
                f"cannot go on with '{ledger.path}': its '{name}' has shape "
                f"{recorded.get(name)}, the model's {given.get(name)}."
            )


def _metadata(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    state = state_tensors(model)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    aliases = {name: first[id(t)] for name, t in state.items() if first[id(t)] != name}
    groups = optimizer.state_dict()["param_groups"]
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": str(model),
        "aliases": aliases,
        "optimizer": type(optimizer).__name__,
        "settings": [{k: _plain(v) for k, v in g.items() if k != "params"} for g in groups],
        "versions": {
            "dualform": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "command": sys.argv,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
