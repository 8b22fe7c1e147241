"""From the training thread to the run folder: steps are checked and written behind the loop."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dualform.ledger import Background, LedgerWriter
from dualform.recording.bookkeeping import Bookkeeper
from dualform.recording.messages import Findings, Handover
from dualform.recording.pages import PagePool
from dualform.recording.processes import Line
from dualform.recording.shards import Gathering, Kept, Piece
from dualform.recording.transfer import to_host

HANDOVER_BYTES = 32 << 20
"""Hand-overs are large, so that the writer's thread seldom needs the interpreter.

From an accelerator, where each operation is a call to it, a hand-over is several shards.
"""
FROM_DEVICE = 3
"""So many."""


class Delivery:
    """Two queues between the training thread and the writer's: hand-overs there, findings back.

    The training thread calls the public methods. The writer's thread runs `_deliver`, and owns the
    bookkeeper.
    """

    def __init__(
        self,
        writer: LedgerWriter,
        bookkeeper: Bookkeeper,
        pool: PagePool,
        parameters: Iterable[Tensor],
        line: Line,
    ) -> None:
        self._writer, self._bookkeeper, self._pool, self._line = writer, bookkeeper, pool, line
        self._beside = SideStream(parameters)
        self._findings: queue.SimpleQueue[Findings] = queue.SimpleQueue()
        self._background = Background(self._deliver_or_cut)

    def handover_bytes(self, shard: int) -> int:
        """How large a hand-over should be, for shards of this size."""
        return FROM_DEVICE * shard if self._beside else min(HANDOVER_BYTES, shard)

    @property
    def from_device(self) -> bool:
        """Whether what is handed over takes memory of an accelerator until it is written."""
        return bool(self._beside)

    def send(self, handover: Handover) -> None:
        """Hands steps over; waits while too many do."""
        self._background.put(replace(handover, ready=self._beside.mark()))

    def receive(self) -> list[Findings]:
        """What the writer's thread has found since the last call; raises the error it met."""
        self._background.raise_error()
        found = []
        while not self._findings.empty():
            found.append(self._findings.get())
        return found

    def wait(self) -> None:
        """Returns when everything sent is committed."""
        self._background.wait()
        self._writer.flush()

    def close(self) -> None:
        """Delivers everything, and ends the thread."""
        self._background.close()
        self._writer.flush()

    def abandon(self) -> None:
        """Gives the run free, whatever was written of it."""
        self._writer.abandon()

    @property
    def committed(self) -> int:
        """Up to which step the run is readable."""
        return self._writer.committed

    def _deliver_or_cut(self, handover: Handover) -> None:
        try:
            self._deliver(handover)
        except BaseException:
            self._line.close()  # other processes must not wait for this one
            raise

    def _deliver(self, handover: Handover) -> None:
        error = None
        with self._beside.after(handover.ready):
            if handover.steps:
                block, error, findings = self._bookkeeper.book(handover)
                memory = self._bookkeeper.memory
                pieces = memory.taken()
                self._findings.put(findings)
                written = [page for _, pages in handover.pages for page in pages]
                give_back = partial(self._pool.give_back, written)
                if self._beside:
                    give_back()  # what will be written is a copy
                if block is not None:
                    block.written = partial(memory.give_back, pieces) if self._beside else give_back
                    self._writer.append(block)
            weights = {name: _to_host(kept) for name, kept in (handover.weights or {}).items()}
        if handover.flush:
            self._writer.pass_on()
        if error is not None:
            self._writer.flush()
            raise error
        if weights and handover.step:
            moved_on = self._bookkeeper.moved_on(handover.now, handover.span)
            if not moved_on:
                self._keep(handover.step, weights, handover.mark)
            self._findings.put(Findings(unkept=handover.step if moved_on else 0))

    def _keep(self, step: int, weights: Mapping[str, Kept], mark: str) -> None:
        """Writes weights; where each process has parts, process 0 writes one after the other."""
        gathering = Gathering(self._line, weights)
        if self._line.rank == 0:
            self._writer.weights(step, gathering.arrays, mark)
            if any(isinstance(kept, Piece) for kept in weights.values()):
                self._writer.flush()
        gathering.drain()


def _to_host(kept: Kept) -> Kept:
    return Piece(to_host(kept.own), kept.part) if isinstance(kept, Piece) else to_host(kept)


class Waiting:
    """What the writer's thread has found of each hand-over, until it is applied.

    >>> waiting = Waiting()
    >>> waiting.put(Findings(remarks=("one",))); waiting.put(Findings(remarks=("two",)))
    >>> [findings.remarks for findings in waiting.take(1)], waiting.count
    ([('one',)], 2)
    """

    def __init__(self) -> None:
        self._findings: list[Findings] = []
        self.count = 0
        """How many there were so far."""

    def put(self, findings: Findings) -> None:
        """Something was found."""
        self._findings.append(findings)
        self.count += 1

    def take(self, until: int | None) -> list[Findings]:
        """What was not taken yet of the first so many; of all, if None."""
        rest = 0 if until is None else max(0, self.count - until)
        ready = max(0, len(self._findings) - rest)
        found, self._findings = self._findings[:ready], self._findings[ready:]
        return found


class SideStream:
    """A CUDA stream for the writer's work, beside training's; on a CPU it does nothing."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        device = next((p.device for p in parameters if p.is_cuda), None)
        self._stream: torch.cuda.Stream | None = None
        if device is not None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        return self._stream is not None

    def mark(self) -> torch.cuda.Event | None:
        """Now, in training's stream: what is handed over is computed when it is reached."""
        if self._stream is None:
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self._stream.device).record_event()
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Works in this stream, after the mark; when it ends, all of it is done."""
        if self._stream is None or mark is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            self._stream.synchronize()
