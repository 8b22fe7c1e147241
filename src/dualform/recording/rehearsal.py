"""A rehearsal: some steps are recorded on copies, to see what a recording will take.

What a run stores is either stored once (the weights at the start and at the end, bases, the log),
or with every step (rows, residuals, changes), or with some steps (divisors, weights in between).
Each is read off the files of a short recording, and multiplied by how often it will come.
"""

from __future__ import annotations

import copy
import inspect
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import DualformWarning, RecordingError
from dualform.ledger import Ledger
from dualform.ledger.sessions import Shard
from dualform.recording.automatic import RowCounts
from dualform.recording.keep import Keep
from dualform.recording.observer import is_due, times_due
from dualform.recording.recorder import Recorder
from dualform.recording.schedule import FLUSH_SECONDS, WITNESS
from dualform.recording.spot_checks import EVERY
from dualform.recording.turns import StepTimes, time_in_turns

BUFFER_BYTES = 128 << 20
"""What `record` collects before it writes a file, unless it is told otherwise."""
EARLY_CHECKS = EVERY.bit_length() - 1
"""So many spot checks come in a run's first steps: 2, 4, 8 … Step 1 is measured with its own."""
IN_FLIGHT = 3
"""So many hand-overs may be in memory: one that fills, one that waits, one that is written."""
BASES = ("outputs", "inputs")
"""Arrays that come once with a stream."""


@dataclass(frozen=True)
class RunBytes:
    """What a run takes on disk, as a function of how many steps it has.

    >>> RunBytes(once=100, each_step=10, early=((2, 5),)).after(4)
    150
    """

    once: int
    each_step: int
    early: tuple[tuple[int, int], ...] = ()
    """Until which step a layer takes more than later, and how much more a step."""
    divisors: tuple[tuple[int, int], ...] = ()
    """From which step on divisors of a parameter are kept at some steps, and their bytes."""
    bases: tuple[tuple[int, int], ...] = ()
    """After which step the bases of a layer are stored, and their bytes."""
    weights: int = 0
    """What the weights take whenever they are kept in between."""
    kept_every: float = math.inf
    """After how many steps that is."""

    def after(self, steps: int) -> int:
        """The bytes of a run of so many steps."""
        early = sum(extra * min(steps, until) for until, extra in self.early)
        due = times_due(steps) + (not is_due(steps))  # the last step always
        divided = sum(
            size * (due - times_due(first)) for first, size in self.divisors if steps > first
        )
        bases = sum(size for first, size in self.bases if steps > first)
        kept = self.weights * max(0, math.ceil(steps / self.kept_every) - 1)
        return self.once + self.each_step * steps + early + divided + bases + kept


@dataclass(frozen=True)
class Rehearsed:
    """What a short recording has shown."""

    bytes: RunBytes
    rows: float
    """How many rows, or records in their place, a step stores."""
    times: StepTimes | None
    """What steps took; None where they were not tried."""
    seconds_once: float
    """What a run takes besides: to start and to end it, and what only its first steps do."""
    held: float
    """How many bytes of rows and changes a step holds in memory until they are written."""
    handover: int
    """How many of them come together until they are handed over."""
    tally: RowCounts
    """Of one step."""


class Rehearsal:
    """A model, an optimizer and a batch, of which copies are trained for a few steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: Any,
        loss: Callable[[Any], Tensor] | None,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._batch, self._loss = batch, loss
        parameters = list(model.parameters())
        self.parameter_bytes = sum(p.nbytes for p in parameters)
        self.on_device = any(p.is_cuda for p in parameters)

    def record(self, keep: Keep) -> Rehearsed:
        """What some recorded steps take, under a policy."""
        model, optimizer, step = self._copy()
        plain = self._copy()[2]
        began = self._now()
        with tempfile.TemporaryDirectory(prefix="dualform-plan-") as folder:
            path = Path(folder) / "run"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DualformWarning)
                recorder = Recorder(model, optimizer, path, keep=keep, strict=True)
                with recorder as recording:
                    taken = self._steps(recording, step, plain, began)
                    ends = self._now()
            once = taken.seconds_first + self._now() - ends
            return self._read(path, taken, once + EARLY_CHECKS * taken.times.spot_check)

    def _steps(
        self, recorder: Recorder, step: Callable[[], None], plain: Callable[[], None], began: float
    ) -> _Taken:
        """A first step; one more until all bases are known; then those that are timed."""
        steps = recorder._require_recording()
        stages = steps.stages
        stages.watch.rows.streams.expects_repeats = False  # one batch stands for all of a run's
        step()
        recorder.checkpoint()
        rows_seen, bases = stages.bases.waiting(), stages.bases
        if rows_seen:
            bases.impatient = True
            step()
            recorder.checkpoint()
        first, before = steps.step + 1, stages.schedule.total
        seconds_first = self._now() - began
        tally = stages.watch.rows.tally = RowCounts()
        times = time_in_turns(steps, step, plain, self._now, before / steps.step)
        steps.hand_over(flush=True)
        late = {book: math.ceil(bases.wanted[book] / seen) for book, seen in rows_seen.items()}
        return _Taken(
            first,
            times,
            max(0.0, seconds_first - (first - 1) * times.seconds),
            (stages.schedule.total - before) / times.count,
            stages.delivery.handover_bytes(BUFFER_BYTES),
            tally,
            late,
            stages.snapshots.nbytes,
        )

    def _now(self) -> float:
        if self.on_device:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _read(self, path: Path, taken: _Taken, once_seconds: float) -> Rehearsed:
        """What the files of the recording say."""
        ledger = Ledger(path)
        late = [shard for shard in ledger.shards if shard.first >= taken.first]
        layer_of = _layers(ledger)
        before = _by_layer([s for s in ledger.shards if s.last == 1], layer_of)
        after = _by_layer(late, layer_of)
        early, bases = [], []
        for layer in before.keys() - {""}:
            until = max([taken.late.get(book, 0) for book, own in layer_of.items() if own == layer])
            if until:
                extra = before[layer] - after.get(layer, 0) / taken.times.count
                early.append((until, round(extra)))
            bases.append((until, _bases(ledger.shards, layer, layer_of)))
        small = [file for file in path.rglob("*") if file.suffix in (".json", ".jsonl")]
        start, end = (ledger.kept(step).path for step in (0, ledger.kept_steps[-1]))
        arrays = sum(place.nbytes for place in late[-1].file.arrays.values())
        header = late[-1].file.path.stat().st_size - arrays
        once = sum(file.stat().st_size for file in (*small, start, end)) + header
        each_step = round(sum(after.values()) / taken.times.count)
        shard = min(taken.held * FLUSH_SECONDS / max(taken.times.seconds, 1e-9), BUFFER_BYTES)
        witnessed = max(shard, taken.handover, WITNESS * taken.kept_weights, 1)
        stored = RunBytes(
            once,
            each_step,
            tuple(sorted(early)),
            _divisors(ledger, taken.late),
            tuple(bases),
            end.stat().st_size,
            witnessed / max(taken.held, 1e-9),
        )
        count = taken.times.count
        given = (taken.times, once_seconds, taken.held, taken.handover)
        tally = _of_one_step(taken.tally, count)
        return Rehearsed(stored, taken.tally.stored_rows / count, *given, tally)

    def _copy(self) -> tuple[nn.Module, Optimizer, Callable[[], None]]:
        """Copies of model and optimizer, and what makes a step with them."""
        model, optimizer = copy.deepcopy((self._model, self._optimizer))
        if optimizer is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        args, kwargs = arguments(_cloned(self._batch))
        loss = copy.deepcopy(self._loss) if isinstance(self._loss, nn.Module) else self._loss
        needs_closure = (
            inspect.signature(optimizer.step).parameters.get("closure", _OPTIONAL).default
            is inspect.Parameter.empty
        )

        def gradients() -> Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                found = scalar(model(*args, **kwargs), loss)
                found.backward()  # type: ignore[no-untyped-call]
            return found

        def step() -> None:
            if needs_closure:
                optimizer.step(lambda: float(gradients()))
            else:
                gradients()
                optimizer.step()

        return model, optimizer, step


_OPTIONAL = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)


@dataclass(frozen=True)
class _Taken:
    """What the steps of a rehearsal have shown, besides the files they left."""

    first: int
    """The first step that was timed."""
    times: StepTimes
    seconds_first: float
    """What the start and the steps before it took, more than as many later ones."""
    held: float
    handover: int
    tally: RowCounts
    late: Mapping[str, int]
    """After how many steps the bases will be known, of books that must wait for them."""
    kept_weights: int


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: a tuple of arguments, a mapping of keywords, or one argument.

    >>> arguments((1, 2)), arguments({"x": 1}), arguments(1)
    (((1, 2), {}), ((), {'x': 1}), ((1,), {}))
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def scalar(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """The loss of an output: what `loss` makes of it, its `.loss`, or the mean of its squares.

    >>> scalar(torch.tensor([1.0, 3.0]), None)
    tensor(5.)
    """
    if loss is not None:
        found = loss(output)
    elif isinstance(getattr(output, "loss", None), Tensor):
        found = output.loss
    elif isinstance(output, Tensor) and output.is_floating_point():
        found = output.square().mean()
    else:
        raise RecordingError(
            f"the model gives a {type(output).__name__}, and plan does not know its loss; give "
            "loss=, a function from what the model gives to a scalar."
        )
    if not isinstance(found, Tensor) or found.numel() != 1:
        kind = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise RecordingError(f"loss= gave {kind}; expected a scalar tensor, as `.mean()` gives.")
    return found


def _cloned(batch: Any) -> Any:
    """The batch again: a model may change what it is called with."""
    if isinstance(batch, Tensor):
        return batch.detach().clone()
    if isinstance(batch, Mapping):
        return {name: _cloned(part) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_cloned(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _layers(ledger: Ledger) -> dict[str, str]:
    """The layer of each stream and of each book."""
    found: dict[str, str] = {}
    for declaration in ledger.info.declarations:
        stream = declaration.stream
        found[stream.name] = stream.layer or stream.name
    for declaration in ledger.info.declarations:
        for book in declaration.terms:
            found.setdefault(book, found[declaration.stream.name])
    return found


def _by_layer(shards: list[Shard], layer_of: Mapping[str, str]) -> dict[str, int]:
    """What comes with every step, in bytes, by the layer it belongs to; "" for none."""
    found: dict[str, int] = {}
    for shard in shards:
        for name, place in shard.file.arrays.items():
            owner, _, kind = name.rpartition("/")
            if kind not in (*BASES, "divisors", "divisor_steps"):
                layer = layer_of.get(owner, "")
                found[layer] = found.get(layer, 0) + place.nbytes
    return found


def _bases(shards: list[Shard], layer: str, layer_of: Mapping[str, str]) -> int:
    """What the bases of a layer take."""
    arrays = [pair for shard in shards for pair in shard.file.arrays.items()]
    named = [(*name.rpartition("/")[::2], place.nbytes) for name, place in arrays]
    own = [size for stream, kind, size in named if kind in BASES and layer_of[stream] == layer]
    return sum(own)


def _divisors(ledger: Ledger, late: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """From which step on the divisors of each book are kept, and what they take each time."""
    found: dict[str, int] = {}
    for shard in ledger.shards:
        for name, place in shard.file.arrays.items():
            if name.endswith("/divisors"):
                found[name.removesuffix("/divisors")] = place.nbytes // place.shape[0]
    return tuple((late.get(book, 0), size) for book, size in found.items())


def _of_one_step(tally: RowCounts, steps: int) -> RowCounts:
    each = {policy: taken // steps for policy, taken in tally.bytes.items()}
    stored = (tally.stored_rows // steps, tally.stored_bytes // steps)
    return RowCounts(tally.rows // steps, each, *stored)
