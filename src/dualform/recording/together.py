"""Several processes begin a run: all of them, or none."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from dualform.errors import DualformError, LedgerError, ModelMismatchError, RecordingError
from dualform.ledger import Ledger
from dualform.optimizers import Rule
from dualform.recording.plan import Plan
from dualform.recording.processes import Line
from dualform.recording.shards import refuse_apart
from dualform.recording.spot_checks import fingerprint
from dualform.recording.start import Opened, join_run, last_of_all, matching_steps

T = TypeVar("T")


def all_or_none(line: Line, action: Callable[[], T]) -> T:
    """What the action returns; raises in every process if it raises in one.

    >>> all_or_none(Line(), lambda: 3)
    3
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    said = line.said(None if error is None else [type(error).__name__, str(error)])
    if error is not None:
        raise error
    for rank, problem in enumerate(said):
        if problem is not None:
            raise _as_error(problem[0])(f"process {rank} cannot begin to record: {problem[1]}")
    return result


def begin_together(
    line: Line, path: Path, begin: Callable[[], Opened], help_begin: Callable[[], None], plan: Plan
) -> Opened:
    """Process 0 begins the run, and the others help; then they join, if they see the folder."""
    if line.of == 1:
        return begin()
    opened: Opened | None = None
    if line.rank == 0:
        opened = all_or_none(line, begin)
    else:
        all_or_none(line, help_begin)
    (begun, *_) = line.said(None if opened is None else opened.writer.folder.name)
    try:
        joined = all_or_none(line, lambda: opened or _join(path, begun, line.rank, plan))
    except BaseException:
        if opened is not None:
            opened.writer.abandon()
        raise
    return joined


def refuse_unlike(line: Line, path: Path, plan: Plan, facts: Mapping[str, Any]) -> None:
    """Refuses processes that do not train the same model in the same way, or not into one run."""
    if line.of == 1:
        return
    own = {
        "path": str(path.absolute()),
        "shapes": {book.name: [book.dtype, *book.shape] for book in plan.books},
        "keep": {name: str(policy) for name, policy in plan.keep.items()},
        "weights": {
            name: "in parts" if name in plan.parts else _checksum(p)
            for name, p in plan.parameters.items()
        },
        **facts,
    }
    first, *others = line.said(own)
    for rank, other in enumerate(others, 1):
        _refuse_other(rank, first, other)


def refuse_in_several(plan: Plan, model: nn.Module, of: int) -> None:
    """Refuses what so many processes cannot record together."""
    refuse_apart(plan.parameters, of)
    if of == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise RecordingError(
                f"'{name}' is a SyncBatchNorm, which mixes samples of all processes; record with "
                "BatchNorm layers, which mix those of one process."
            )


def step_to_go_on_from(
    line: Line, path: Path, model: nn.Module, plan: Plan, rule: Rule, count: int | None
) -> int:
    """The last kept step whose weights the model has; of its parts, each process knows its own."""

    def matching() -> list[int] | None:
        if line.rank and not plan.parts:
            return None  # process 0 has all of the model
        refuse_other_count(path, line.of, count)
        return matching_steps(path, model, plan, rule)

    said = line.said(all_or_none(line, matching))
    found = [steps for steps in said if steps is not None]
    return all_or_none(line, lambda: last_of_all(path, found))


def refuse_other_count(path: Path, of: int, given: int | None) -> None:
    """Refuses to go on with another number of processes, unless that was said."""
    before = Ledger(path).session.of
    if before != of and given is None:
        raise RecordingError(
            f"'{path}' was recorded by {before} process{'es' * (before > 1)}, and {of} would go on "
            f"with it; if that is intended, give record(..., resume=True, processes={of})."
        )


def _refuse_other(rank: int, first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    if first["path"] != other["path"]:
        raise RecordingError(
            f"process 0 records into '{first['path']}', and process {rank} into '{other['path']}'; "
            "processes that train one model together record one run: give them the same path. "
            "Models that do not share gradients are recorded each by itself, with processes=1."
        )
    for what in ("shapes", "weights"):
        for name in [*first[what], *other[what]]:
            if first[what].get(name) != other[what].get(name):
                raise ModelMismatchError(_unlike_model(rank, what, name, first, other))
    for what in first:
        if first[what] != other[what]:
            raise RecordingError(
                f"process 0 has {what}={first[what]!r}, and process {rank} {what}={other[what]!r}; "
                "give dualform.record the same in every process."
            )


def _unlike_model(
    rank: int, what: str, name: str, first: Mapping[str, Any], other: Mapping[str, Any]
) -> str:
    if what == "shapes":
        there, here = (_shown(each[what].get(name)) for each in (first, other))
        return (
            f"process 0 has '{name}' {there}, and process {rank} has it {here}; "
            "every process must train the same model."
        )
    return (
        f"the weights of '{name}' are not the same in process 0 and in process {rank}; "
        "make the model with one seed, or wrap it in DistributedDataParallel before recording, "
        "which gives all processes those of process 0."
    )


def _shown(shape: Any) -> str:
    return "not at all" if shape is None else f"of shape {tuple(shape[1:])} and {shape[0]}"


def _join(path: Path, begun: str, rank: int, plan: Plan) -> Opened:
    if not (path / begun).is_dir():
        raise LedgerError(
            f"process {rank} does not see '{path / begun}', which process 0 has just made; choose "
            "a path on a disk that all processes share."
        )
    return join_run(path, rank, plan)


def _checksum(parameter: Tensor) -> int:
    return zlib.crc32(fingerprint(parameter).cpu().numpy().tobytes())


def _as_error(name: str) -> type[DualformError]:
    """The class of an error of another process, where it is one of ours."""
    known = {cls.__name__: cls for cls in _family(DualformError)}
    return known.get(name, RecordingError)


def _family(cls: type[DualformError]) -> list[type[DualformError]]:
    return [cls, *(each for child in cls.__subclasses__() for each in _family(child))]
