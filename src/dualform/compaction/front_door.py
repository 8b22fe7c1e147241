"""Making a finished run smaller: a copy beside it, verified, that takes its place."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text
from torch import Tensor

from dualform.compaction.folders import Folders
from dualform.compaction.rounding import Rounding, has_rows, read_arrays
from dualform.compaction.summarizing import Summarizing
from dualform.errors import LedgerError, RecordingError
from dualform.ledger import Declaration, Ledger, Shard
from dualform.ledger.copying import NewShard, copy_run
from dualform.read import Audit, Run
from dualform.read.display import Displayed, columns, framed
from dualform.recording.keep import STEPS, Keep, Policy, listed, policies, read_keep

BALANCED = 1e-6
"""Books of the copy may miss the weights by so much more than those of the run did."""
SPARE = 16 << 20
"""Bytes that a copy may take beyond what was estimated."""


@dataclass(frozen=True, repr=False)
class Compaction(Displayed):
    """What became of a run: bytes and books before and after, and where the old run is.

    >>> import dualform; from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> print(dualform.compact(run.path, keep="half"))
    run ... is left as it is: keep='half' would not make it smaller
    """

    path: Path
    keep: str
    """What was asked for, as text."""
    before: Audit
    after: Audit | None
    """None where the run is left as it is, because it would not become smaller."""
    old: Path
    """The run as it was before, until the compaction is confirmed or undone."""

    @property
    def changed(self) -> bool:
        """Whether the run is another one now."""
        return self.after is not None

    def undo(self) -> None:
        """Puts the old run back, byte by byte as it was."""
        undo(self.path)

    def confirm(self) -> None:
        """Deletes the old run."""
        confirm(self.path)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        after = self.after or self.before
        return {
            "path": str(self.path),
            "keep": self.keep,
            "changed": self.changed,
            "bytes_before": self.before.bytes,
            "bytes_after": after.bytes,
            "remainder_before": self.before.remainder,
            "remainder_after": after.remainder,
            "residuals": {book.name: book.residual for book in after.books},
            "old": str(self.old) if self.changed else None,
        }

    def __rich__(self) -> Group:
        if self.after is None:
            left = f"is left as it is: keep={self.keep} would not make it smaller"
            return Group(Text(f"run {self.path} {left}"))
        table = columns(("", "before", "after"), words=("",))
        table.add_row("MB", *(f"{audit.bytes / 1e6:,.1f}" for audit in (self.before, self.after)))
        remainders = (f"{audit.remainder:.1e}" for audit in (self.before, self.after))
        table.add_row("largest remainder", *remainders)
        largest = (max((b.residual for b in a.books), default=0) for a in (self.before, self.after))
        table.add_row("largest residual", *(f"{residual:.1e}" for residual in largest))
        return framed(
            f"run {self.path}, compacted to {self.keep}",
            table,
            f"the old run is in {self.old}\n"
            f"`dualform compact {self.path} --confirm` deletes it, --undo brings it back",
        )


def compact(path: str | os.PathLike[str], keep: Keep) -> Compaction:
    """Makes a finished run smaller, as if it had been recorded with less.

    The books stay as they are: weights, steps, samples, ids and notes. What rounding loses is
    stored as the residual of each step, and belongs to no sample. The old run is kept beside the
    new one, in `PATH.before-compact`, until `confirm()` deletes it; `undo()` brings it back.

    >>> import tempfile, torch, dualform
    >>> model = torch.nn.Linear(30, 20)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> path = tempfile.mkdtemp() + "/run"
    >>> with dualform.record(model, optimizer, path):
    ...     for _ in range(5):
    ...         model(torch.randn(200, 30)).square().mean().backward()
    ...         optimizer.step(); optimizer.zero_grad()
    >>> before = dualform.open(path).nbytes
    >>> compaction = dualform.compact(path, keep="int8")
    >>> dualform.open(path).nbytes < before / 2
    True
    >>> compaction.confirm()

    Args:
        keep: as for `dualform.record`: "half", "int8", "summaries", `dualform.summaries(16, 128)`,
            or a dict of these by the names of parameters or modules.
    """
    folders = Folders.of(path)
    with folders.locked():
        if folders.is_compacted:
            raise LedgerError(
                f"'{folders.run}' was compacted already, and that was not confirmed. Confirm it "
                f"(`dualform compact {folders.run} --confirm`), which deletes the old run, or undo "
                "it (--undo), before it is compacted again."
            )
        return _compact(folders, keep)


def undo(path: str | os.PathLike[str]) -> None:
    """Puts a run back as it was before it was compacted, byte by byte.

    >>> undo("no/run")
    Traceback (most recent call last):
    dualform.errors.NotARunError: 'no/run' is not a dualform run: there is nothing at that path.
    """
    folders = Folders.of(path)
    with folders.locked() as repaired:
        if repaired and not folders.is_compacted:  # the old run is back by that
            folders.give_up()
        else:
            folders.undo()


def confirm(path: str | os.PathLike[str]) -> int:
    """Deletes what a run was before it was compacted; returns how many bytes its files had.

    >>> confirm("no/run")
    Traceback (most recent call last):
    dualform.errors.NotARunError: 'no/run' is not a dualform run: there is nothing at that path.
    """
    folders = Folders.of(path)
    with folders.locked():
        return folders.confirm()


def _compact(folders: Folders, keep: Keep) -> Compaction:
    ledger = Ledger(folders.run)
    asked = _read_keep(ledger, keep)
    before = Run(ledger).audit()
    result = partial(Compaction, folders.run, _text(keep), before, old=folders.before)
    smaller = SmallerShards.plan(ledger, asked)
    if not smaller.saved > 0:
        return result(after=None)
    _check_room(ledger, smaller, folders.run)
    mark = {
        "keep": _text(keep),
        "session": ledger.session.number,
        "bytes_before": ledger.nbytes,
    }
    copy = folders.begin(mark)
    try:
        copy_run(ledger, copy, smaller)
        after = _verified(ledger, before, copy)
    except BaseException as error:
        folders.give_up()
        if isinstance(error, OSError) and not isinstance(error, LedgerError):
            raise LedgerError(
                f"cannot write the copy of '{folders.run}': {error}. The run is as it was."
            ) from error
        raise
    if after.bytes >= before.bytes:
        folders.give_up()
        return result(after=None)
    folders.exchange()
    return result(after=after)


def _read_keep(ledger: Ledger, keep: Keep) -> dict[str, Policy]:
    asked = read_keep(keep, [book.name for book in ledger.info.books])
    if STEPS in asked.values():
        can = listed([policy for policy in policies() if policy != STEPS])
        raise RecordingError(
            f"keep='{STEPS}' cannot be made of a run that is recorded: it would be left without "
            f"rows. A compaction knows {can}."
        )
    return asked


def _text(keep: Keep) -> str:
    return str(dict(keep)) if isinstance(keep, Mapping) else repr(keep)


@dataclass
class SmallerShards:
    """Makes smaller shards of those of a run; called for each, log by log."""

    ledger: Ledger
    rounding: Rounding
    summarizing: Summarizing
    _declared: dict[Path, set[str]] = field(default_factory=dict)
    """The streams of summaries that each log has declared so far."""

    @classmethod
    def plan(cls, ledger: Ledger, keep: Mapping[str, Policy]) -> SmallerShards:
        """What is to become of each stream; those that would not become smaller stay."""
        summarizing = Summarizing.plan(ledger, keep)
        others = [s for s in ledger.info.layers if s.name not in summarizing.reducers]
        return cls(ledger, Rounding.plan(ledger, others, keep), summarizing)

    @property
    def saved(self) -> int:
        """How many bytes the run becomes smaller by, about."""
        return self.rounding.saved + self.summarizing.saved

    def __call__(self, shard: Shard) -> NewShard:
        """The arrays of a smaller shard, and its declarations."""
        declared = self._declared.setdefault(shard.path.parent, set())
        arrays = self._arrays(shard)
        self.rounding.apply(shard, arrays)
        new = self.summarizing.apply(shard, arrays, declared)
        streams: list[Declaration] = []
        for one in shard.declared:
            streams.append(replace(one, codec=self.rounding.of(one.codec, one.stream)))
            streams += [own for own in new if own.stream.layer == one.stream.name]
        streams += [one for one in new if one not in streams]
        return NewShard(arrays, streams)

    def _arrays(self, shard: Shard) -> dict[str, list[Tensor]]:
        """The arrays of a shard, in which every stream has the keys of all its records."""
        arrays = {name: [array] for name, array in shard.file.read_all(shard.file.arrays).items()}
        for stream in self.ledger.info.streams:
            in_table = arrays.pop(f"{stream.name}/places", None) is not None
            if has_rows(shard, stream) and (in_table or shard.keys_of(stream.name) != stream.name):
                for name, array in read_arrays(shard, stream).items():
                    arrays[f"{stream.name}/{name}"] = [array]
        return arrays


def _check_room(ledger: Ledger, smaller: SmallerShards, run: Path) -> None:
    rows = sum(int(shard.record["bytes"]) for shard in ledger.shards)
    needed, free = rows - smaller.saved + SPARE, shutil.disk_usage(run.parent).free
    if needed > free:
        raise LedgerError(
            f"the smaller copy of '{run}' would take {needed / 1e6:,.0f} MB, and its disk has "
            f"{free / 1e6:,.0f} MB free. Both runs are there until the new one is confirmed: make "
            "room, or move the run to a larger disk. Nothing was written."
        )


def _verified(ledger: Ledger, before: Audit, copy: Path) -> Audit:
    """The audit of a copy, which must be sound and balance as the run does."""
    found = Ledger(copy)
    problems = [problem for _, problem in found.check()]
    for what in ("last_step", "kept_steps", "marks", "notes"):
        if getattr(found, what) != getattr(ledger, what):
            problems.append(f"its {what} are not those of the run")
    if not ledger.samples().equal(found.samples()):
        problems.append("its samples are not those of the run")
    after = Run(found).audit()
    for old, new in zip(before.books, after.books, strict=True):
        allowed = max(old.remainder, new.rounding if new.residual > old.residual else 0.0)
        if old.granularity != new.granularity or not _balances(allowed, new.remainder):
            problems.append(f"'{new.name}' has the remainder {new.remainder:.1e}")
    if problems:
        raise LedgerError(
            f"the smaller copy of '{ledger.path}' is not the same run: {'; '.join(problems[:3])}. "
            "It was deleted, and the run is as it was. Please report this."
        )
    return after


def _balances(before: float, after: float) -> bool:
    return after <= 2 * before + BALANCED or math.isnan(before) or math.isnan(after)
