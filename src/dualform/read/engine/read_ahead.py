"""Reading ahead of a fold: what it will ask of the next shards is on its way while it computes.

Some threads read files into buffers in main memory. A buffer that is full is copied to the device
of the fold, on a stream of its own; the fold waits for its copy alone. So the disk, the bus and the
device work at the same time. On processors the same is done without the copy.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from threading import Event, Lock
from typing import Any

import torch
from torch import Tensor

from dualform.errors import ReadingError
from dualform.read.engine.devices import exact_products
from dualform.read.engine.interface import Fold, Part, Partial
from dualform.read.engine.serial import Serial, fold_progress
from dualform.read.engine.shards import ShardRange
from dualform.read.progress import reporting

READERS = max(2, min(8, os.cpu_count() or 1))
"""How many threads read files: each copies from the system's memory slower than a bus takes it."""
BUFFERS = 4
"""How many chunks are read, copied or computed with at the same time."""
CHUNK_BYTES = {"cuda": (64 << 20) - (64 << 10), "cpu": 16 << 20}
"""How large a chunk is at most; for a GPU a little less than what its memory is rounded up to."""
LEAST_BYTES = 1 << 20
"""How large chunks are at least, where a device has little memory left."""
ALIGNED = 256
"""Arrays begin at multiples of this in a buffer."""
PLANNED = 2
"""In how many shards is looked up what is to be read, ahead of reading it."""


class ReadAhead(Serial):
    """Folds one shard after the other, and reads the next ones meanwhile.

    `dualform.open(path, device="cuda")` reads this way by itself. Elsewhere it helps where files
    are not in the system's memory.

    >>> import dualform
    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> engine = dualform.engine("ahead", readers=2, buffers=3)
    >>> dualform.open(run.path, engine=engine).audit().remainder < 1e-6
    True

    Args:
        readers: how many threads read files.
        buffers: how many chunks are read, copied or computed with at the same time. Each takes
            `chunk_bytes` of main memory, and as much of the device.
        chunk_bytes: how large a chunk is at most; by default 64 MB for a GPU, and 16 MB for
            processors. Where a device has not enough memory, chunks become smaller by themselves.
    """

    def __init__(
        self, *, readers: int = READERS, buffers: int = BUFFERS, chunk_bytes: int | None = None
    ) -> None:
        given = {"readers": readers, "buffers": buffers, "chunk_bytes": chunk_bytes}
        for name, number in given.items():
            if number is not None and number < 1:
                raise ReadingError(f"{name}={number}: expected 1 or more.")
        self._readers, self._buffers, self._chunk_bytes = readers, buffers, chunk_bytes

    def reduce(
        self, fold: Fold[Partial], shards: Sequence[ShardRange], onto: Partial | None = None
    ) -> Partial:
        """The result of all shards; from the beginning with smaller chunks where memory ends."""
        kind = torch.device(fold.device).type
        size = self._chunk_bytes or CHUNK_BYTES.get(kind, CHUNK_BYTES["cpu"])
        while True:
            try:
                total = self._folded(fold, shards, size)
                break
            except torch.OutOfMemoryError as error:
                if size <= LEAST_BYTES:
                    raise ReadingError(
                        f"the device '{fold.device}' has not enough memory for this question, even "
                        f"with chunks of {size / 1e6:.0f} MB. Ask fewer queries at a time, or open "
                        "the run without a device."
                    ) from error
                size = max(LEAST_BYTES, size // 4)
            torch.cuda.empty_cache()
        return total if onto is None else fold.merge(onto, total)

    def _folded(self, fold: Fold[Partial], shards: Sequence[ShardRange], size: int) -> Partial:
        on_gpu, partial = torch.device(fold.device).type == "cuda", fold.start()
        with (
            fold_progress(fold, shards) as progress,
            reporting(progress.advance),
            exact_products() if on_gpu else nullcontext(),
            _Reading(fold, shards, size, self._readers, self._buffers) as reading,
        ):
            for shard in reading.shards():
                partial = fold.fold(partial, shard)
        return partial


class _Reading:
    """Some shards on their way to a fold, which asks for them in order."""

    def __init__(
        self,
        fold: Fold[Any],
        shards: Sequence[ShardRange],
        size: int,
        readers: int,
        buffers: int,
    ) -> None:
        self._fold, self._shards, self._size = fold, shards, size
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="dualform-read")
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="dualform-plan")
        self._planned = self._plan()
        device = torch.device(fold.device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._free = deque(_Buffer(device, self._stream) for _ in range(buffers))
        self._begun: deque[tuple[int, _Buffer]] = deque()
        self._at = 0
        """The number of the shard that is folded."""

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what is under way; the memory is let go only then."""
        for pool in (self._planner, self._pool):
            pool.shutdown(cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()

    def shards(self) -> Iterator[ShardRange]:
        """Each shard, with what is read of it where the fold says what that is."""
        if not self._shards or self._fold.parts(self._shards[0], self._size) is None:
            yield from self._shards
            return
        self._begin()
        for number, shard in enumerate(self._shards):
            self._at = number
            yield replace(shard, ahead=self)
            if self._begun and self._begun[0][0] == number:
                stream, fold = self._begun[0][1].part.stream, type(self._fold).__name__
                raise RuntimeError(f"{fold}.parts names '{stream}', which its fold did not read.")

    def of(self, shard: ShardRange, stream: str) -> Iterator[tuple[Part, Mapping[str, Tensor]]]:
        """The parts of a stream in the shard that is folded; arrays are valid until the next."""
        while self._begun:
            number, buffer = self._begun[0]
            if (number, buffer.part.stream) != (self._at, stream):
                return
            yield buffer.part, buffer.take()
            buffer.release()
            self._begun.popleft()
            self._free.append(buffer)
            self._begin()

    def _begin(self) -> None:
        """Begins to read into each buffer that is free."""
        while self._free:
            number, part = next(self._planned, (0, None))
            if part is None:
                return
            buffer = self._free.popleft()
            buffer.begin(part, self._pool)
            self._begun.append((number, buffer))

    def _plan(self) -> Iterator[tuple[int, Part]]:
        """What is read, with the number of its shard; looked up by a thread, some shards ahead."""
        plans: deque[tuple[int, Future[list[Part]]]] = deque()
        rest = enumerate(self._shards)
        while True:
            for number, shard in islice(rest, PLANNED - len(plans)):
                plans.append((number, self._planner.submit(self._parts, shard)))
            if not plans:
                return
            number, plan = plans.popleft()
            for part in plan.result():
                yield number, part

    def _parts(self, shard: ShardRange) -> list[Part]:
        return list(self._fold.parts(shard, self._size) or ())


class _Buffer:
    """The arrays of one part: in main memory, and on the device."""

    part: Part

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device, self._stream = device, stream
        self._host = self._there = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None
        """When main memory may be written again."""
        self._used: torch.cuda.Event | None = None
        """When the device's memory may."""
        self._lock = Lock()

    def begin(self, part: Part, pool: ThreadPoolExecutor) -> None:
        """Hands out what is to be read of a part, once the buffer is free."""
        self.part, self._end, self._places = part, 0, []
        for name, (shape, dtype) in part.arrays.items():
            nbytes = math.prod(shape) * dtype.itemsize
            self._places.append((name, slice(self._end, self._end + nbytes), shape, dtype))
            self._end += -(-nbytes // ALIGNED) * ALIGNED
        if self._copied is not None:
            self._copied.synchronize()
        if self._end > len(self._host):
            self._reserve(self._end)
        reads = list(part.reads(self._views(self._host)))
        self._left, self._failed, self._ready = len(reads), list[BaseException](), Event()
        for read in reads:
            pool.submit(self._work, read)

    def take(self) -> Mapping[str, Tensor]:
        """The arrays on the device, for what is computed from now on."""
        self._ready.wait()
        for error in self._failed:
            raise error
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self._views(self._there)

    def release(self) -> None:
        """What was computed until now was all."""
        if self._stream is not None:
            self._used = torch.cuda.current_stream(self._device).record_event()

    def _work(self, read: Callable[[], object]) -> None:
        """One of the reads; the last one sends the buffer to the device."""
        try:
            read()
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._send()
                self._ready.set()
        except BaseException as error:  # raised by the thread that folds
            self._failed.append(error)
            self._ready.set()

    def _send(self) -> None:
        if self._stream is None:
            self._there = self._host.to(self._device)
            return
        assert self._used is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used)
            self._there[: self._end].copy_(self._host[: self._end], non_blocking=True)
            self._copied = self._stream.record_event()

    def _reserve(self, size: int) -> None:
        """Memory for so many bytes; that of a GPU is written only once nothing else uses it."""
        on_gpu = self._stream is not None
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        if on_gpu:
            self._there = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._used = torch.cuda.current_stream(self._device).record_event()

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        """The arrays in some memory."""
        return {
            name: memory[place].view(dtype).view(shape)
            for name, place, shape, dtype in self._places
        }
