"""What will a recording take? `dualform.plan` tells it for every policy, before training."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import LedgerError, RecordingError
from dualform.ledger import run_path
from dualform.ledger.codecs import CODECS
from dualform.ledger.object_path import ObjectPath
from dualform.recording.automatic import CHEAP, size_of
from dualform.recording.keep import AUTO, ROWS, SUMMARIES, Keep, policies
from dualform.recording.plan import torch_optimizer
from dualform.recording.randomness import undisturbed
from dualform.recording.rehearsal import BUFFER_BYTES, IN_FLIGHT, Rehearsal, Rehearsed, RunBytes
from dualform.recording.turns import bytes_stored

TRIED = 1 << 28
"""Rows that take more than this a step are not written to see what they take: it is computed."""
CODED = [codec.policy for codec in CODECS.values()]
"""The policies that store rows, each by a codec."""
AS_ASKED = "as asked"
"""What a dict of policies is called in a plan."""
WIDTH = 110


@dataclass(frozen=True)
class PolicyCosts:
    """What a recording takes under one policy; bytes that are not known are None.

    >>> costs = PolicyCosts("rows", 300, 2_000_000, 500_000, None, 0.02, 0, 10_000_000)
    >>> costs.policy, costs.bytes_a_step
    ('rows', 2000000)
    """

    policy: str
    rows: int
    """How many rows, or records in their place, a step stores."""
    bytes_a_step: int
    """What each step adds to the run, once the first steps are over."""
    bytes_once: int
    """What a run takes besides: the weights at its start and end, bases, the log."""
    bytes: int | None
    """What the whole run takes; None where `steps` was not given."""
    seconds: float | None
    """What a step takes with recording; None where it was not tried, because it takes so much."""
    device_memory: int
    """How many bytes the recorder holds on the GPU, at most."""
    host_memory: int
    """How many bytes it holds in main memory, at most."""
    ratio: float | None = None
    """How many times as long as without recording a step takes; None where it was not tried."""
    seconds_once: float | None = None
    """What a run takes besides: to start and to end, and what only its first steps do."""


@dataclass(frozen=True, repr=False)
class RunPlan:
    """What `dualform.plan` found: the costs of every policy, and which of them to take.

    >>> costs = PolicyCosts("rows", 300, 2_000_000, 500_000, None, 0.02, 0, 10_000_000)
    >>> found = RunPlan({"rows": costs}, "rows", "rows are cheap", plain_seconds=0.01)
    >>> found.policies[found.recommended].rows
    300
    """

    policies: Mapping[str, PolicyCosts]
    """The costs of each policy, by its name."""
    recommended: str
    """The policy to take."""
    reason: str
    """Why."""
    plain_seconds: float
    """What a step takes without recording."""
    steps: int | None = None
    """How many steps the run will have."""
    free: int | None = None
    """How many bytes are free where the run will be."""
    asked: str = field(default="")
    """What the policy that was asked for is called here; empty where none was."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {**asdict(self), "policies": {k: asdict(v) for k, v in self.policies.items()}}

    def __rich__(self) -> Group:
        run = ["bytes\nin all"] if self.steps else []
        device = ["device"] if any(c.device_memory for c in self.policies.values()) else []
        names = ["rows\na step", "bytes\na step", *run, "ms\na step", "×\nplain", "s\nonce"]
        table = Table()
        table.add_column("keep", no_wrap=True)
        for name in (*names, *device, "memory"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, costs in self.policies.items():
            cells = [f"{costs.rows:,}", size_of(costs.bytes_a_step)]
            cells += [size_of(costs.bytes)] if costs.bytes is not None else []
            each = None if costs.seconds is None else 1000 * costs.seconds
            times = [(each, ",.3g"), (costs.ratio, ".2f"), (costs.seconds_once, ".2g")]
            cells += ["–" if time is None else format(time, how) for time, how in times]
            cells += [size_of(costs.device_memory)] if device else []
            cells += [size_of(costs.host_memory)]
            style = "bold" if name == self.recommended else ""
            table.add_row(*[Text(cell, style=style) for cell in (name, *cells)])
        what = f"recording {self.steps:,} steps" if self.steps else "recording"
        plain = f"{1000 * self.plain_seconds:,.3g} ms"
        title = f"what {what} takes; a step without it takes {plain}"
        advice = Text(f"keep={self.recommended!r}: {self.reason}", style="dim")
        return Group(Text(title, style="bold"), table, advice)

    def __repr__(self) -> str:
        console = Console(file=StringIO(), width=WIDTH, force_jupyter=False, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")

    def _repr_html_(self) -> str:
        console = Console(file=StringIO(), width=WIDTH, force_jupyter=False, record=True)
        console.print(self)
        frame = '<pre style="line-height:1.3;font-family:monospace">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=frame)


def plan(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    steps: int | None = None,
    keep: Keep | None = None,
    path: str | os.PathLike[str] | None = None,
) -> RunPlan:
    """Tells what a recording will take, for every policy of `record(keep=…)`, and which to take.

    Under each policy, steps are recorded for some seconds, in a temporary folder that is removed
    again. Bytes are read off the files. Recorded steps are timed in turns with steps that are not,
    with all that it takes to write them: the median of their ratios, times a plain step, are the
    seconds. What comes once a run is told apart. Two copies of model and optimizer are in memory
    meanwhile; the user's own, gradients and random states stay as they are.

    >>> import torch, dualform
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 9))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> found = dualform.plan(model, torch.randn(128, 64), optimizer=optimizer, steps=500)
    >>> found.policies["steps"].rows, found.policies["int8"].rows
    (0, 256)
    >>> found.recommended, found.reason
    ('rows', 'all rows of a step take ... kB, which is little: everything can be asked of the run.')

    Args:
        batch: what the model is called with: a tensor, a tuple of arguments or a dict of keywords.
        loss: makes a scalar of what the model gives. Default: its `.loss`, or the mean square.
        optimizer: as in training. Default: AdamW.
        steps: how many the run will have.
        keep: another policy to try, as `record` takes it.
        path: where the run will be. If the disk there is too small for `steps` steps (of `keep`, or
            of every policy), that is an error. Object storage has room for any.
    """
    if steps is not None and (type(steps) is not int or steps < 1):
        raise RecordingError(f"steps={steps!r} is no number of steps from 1.")
    folder = None if path is None else run_path(path)
    inner = None if optimizer is None else torch_optimizer(optimizer)
    rehearsal = Rehearsal(model, inner, batch, loss)
    with undisturbed(model, inner, loss):
        found = _rehearse_all(rehearsal, keep)
    plain = statistics.median([f.times.plain for f in found.values() if f.times is not None])
    costs = {name: _costs(name, f, rehearsal, steps, plain) for name, f in found.items()}
    asked = "" if keep is None else _label(keep)
    free = None if folder is None or isinstance(folder, ObjectPath) else free_bytes(folder)
    if path is not None and free is not None and steps is not None:
        _require_room(costs, asked, free, path, steps)
    recommended, reason = _recommend(costs, free)
    return RunPlan(costs, recommended, reason, plain, steps, free, asked)


def _rehearse_all(rehearsal: Rehearsal, keep: Keep | None) -> dict[str, Rehearsed]:
    """What each policy takes. Summaries come first: they tell what rows would take."""
    first = rehearsal.record(SUMMARIES)
    rows = first.tally.bytes.get(ROWS, 0)
    too_large = rows > TRIED or bytes_stored(rows) > free_bytes(tempfile.gettempdir())
    found: dict[str, Rehearsed] = {}
    for policy in policies():
        if policy == SUMMARIES:
            found[policy] = first
        elif policy in CODED and too_large:
            found[policy] = _computed(policy, first, rehearsal.parameter_bytes)
        elif policy != AUTO:
            found[policy] = rehearsal.record(policy)
    if keep is not None and _label(keep) not in found:
        found[_label(keep)] = rehearsal.record(keep)
    return found


def _label(keep: Keep) -> str:
    return str(keep) if not isinstance(keep, Mapping) else AS_ASKED


def _computed(policy: str, first: Rehearsed, parameter_bytes: int) -> Rehearsed:
    """What rows take by a codec's own word, where they are too large to be written."""
    tally = first.tally
    lossy = tally.bytes[policy] < tally.bytes[ROWS]
    small = max(0, first.bytes.each_step - tally.stored_bytes)
    each_step = tally.bytes[policy] + small + (parameter_bytes if lossy else 0)
    stored = RunBytes(first.bytes.once, each_step)
    return Rehearsed(stored, tally.rows, None, 0.0, tally.bytes[ROWS], first.handover, tally)


def _costs(
    name: str, found: Rehearsed, rehearsal: Rehearsal, steps: int | None, plain: float
) -> PolicyCosts:
    """A line of the plan; `plain` is what a step takes without recording."""
    whole = found.held * steps if steps is not None else float("inf")
    in_flight = min(whole, IN_FLIGHT * max(found.handover, found.held))
    copies = 2 * rehearsal.parameter_bytes
    to_write = min(whole, 2 * BUFFER_BYTES)
    device, host = (
        (in_flight + copies, to_write) if rehearsal.on_device else (0, in_flight + copies)
    )
    return PolicyCosts(
        name,
        round(found.rows),
        found.bytes.each_step,
        found.bytes.once,
        None if steps is None else found.bytes.after(steps),
        None if found.times is None else found.times.ratio * plain,
        round(device),
        round(host),
        None if found.times is None else found.times.ratio,
        None if found.times is None else found.seconds_once,
    )


def free_bytes(path: str | os.PathLike[str]) -> int:
    """How many bytes are free on the disk of a folder, which need not be there yet."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _require_room(
    costs: Mapping[str, PolicyCosts],
    asked: str,
    free: int,
    path: str | os.PathLike[str],
    steps: int,
) -> None:
    """Refuses a run that its disk cannot hold."""
    taken = {name: line.bytes or 0 for name, line in costs.items()}
    wanted = asked if asked in taken else min(taken, key=lambda name: taken[name])
    if taken[wanted] <= free:
        return
    fitting = [
        f"keep={name!r} takes {size_of(size)}" for name, size in taken.items() if size <= free
    ]
    cure = f"{' or '.join(fitting)}; or" if fitting else "No policy takes less:"
    raise LedgerError(
        f"the disk of '{os.fspath(path)}' has {size_of(free)} free, and {steps:,} steps with "
        f"keep={wanted!r} take {size_of(taken[wanted])}. {cure} make room, or record fewer steps."
    )


def _recommend(costs: Mapping[str, PolicyCosts], free: int | None) -> tuple[str, str]:
    """The policy to take, and why: the most exact that is cheap and fits the disk."""
    rows, small = costs[ROWS], costs[SUMMARIES]
    fits = [n for n, c in costs.items() if free is None or c.bytes is None or c.bytes <= free]
    if rows.bytes_a_step <= CHEAP and ROWS in fits:
        return ROWS, (
            f"all rows of a step take {size_of(rows.bytes_a_step)}, which is little: everything "
            "can be asked of the run."
        )
    if rows.bytes_a_step > CHEAP and SUMMARIES in fits and small.bytes_a_step < rows.bytes_a_step:
        return SUMMARIES, (
            f"all rows of a step take {size_of(rows.bytes_a_step)}, their summaries "
            f"{size_of(small.bytes_a_step)}, and these still tell what each sample did to a layer."
        )
    for name in [name for name in policies() if name in fits]:
        return name, (
            f"it is the most exact policy whose {size_of(costs[name].bytes or 0)} fit into the "
            f"{size_of(free or 0)} that are free."
        )
    return min(costs, key=lambda n: costs[n].bytes or costs[n].bytes_a_step), "it takes the least."
