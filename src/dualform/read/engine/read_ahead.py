"""Reading ahead of a fold: what it will ask of the next shards is on its way while it computes.

Some threads read files into buffers in main memory. A buffer that is full is copied to the device
of the fold, on a stream of its own, and then read into again; the fold waits for its copy alone. So
the disk, the bus and the device work at the same time. On processors there is no copy.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

import torch
from torch import Tensor

from dualform.errors import ReadingError
from dualform.read.engine.bus import Bus, bus_to
from dualform.read.engine.devices import exact_products
from dualform.read.engine.interface import Fold, Part, Partial
from dualform.read.engine.serial import Serial, fold_progress
from dualform.read.engine.shards import ShardRange
from dualform.read.progress import reporting

READERS = max(2, min(16, os.cpu_count() or 1))
"""How many threads read files: each copies from the system's memory slower than a bus takes it."""
BUFFERS = 4
"""How many chunks are read or copied at the same time; and how many a device has room for."""
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
        buffers: how many chunks are read or copied at the same time. Each takes `chunk_bytes` of
            main memory, and as much of the device.
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


class _Memory:
    """Memory for the arrays of one part after the other."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.free: torch.cuda.Event | None = None
        """The mark of a GPU behind what it does with it."""


class _Chunk:
    """A part on its way from files to where it is computed with."""

    host: _Memory
    there: _Memory
    """On the device; on processors that is main memory."""
    copied: torch.cuda.Event

    def __init__(self, number: int, part: Part) -> None:
        self.number, self.part = number, part
        """The number of its shard, and what it has of it."""
        self.size, self._places = 0, list[tuple[str, slice, tuple[int, ...], torch.dtype]]()
        for name, (shape, dtype) in part.arrays.items():
            nbytes = math.prod(shape) * dtype.itemsize
            self._places.append((name, slice(self.size, self.size + nbytes), shape, dtype))
            self.size += -(-nbytes // ALIGNED) * ALIGNED
        self._lock, self.ready = Lock(), Event()
        self.error: BaseException | None = None

    def reads(self) -> list[Callable[[], object]]:
        """What is to be read into main memory, by any threads."""
        found = list(self.part.reads(self.arrays(self.host))) or [lambda: None]
        self._left = len(found)
        return found

    def one_more(self) -> bool:
        """One of the reads is done; whether all are."""
        with self._lock:
            self._left -= 1
            return not self._left

    def arrays(self, memory: _Memory) -> dict[str, Tensor]:
        """The arrays in some memory."""
        return {
            name: memory.bytes[place].view(dtype).view(shape)
            for name, place, shape, dtype in self._places
        }


class _Reading:
    """Some shards on their way to a fold, which asks for them in order.

    One thread hands out what is to be read, as soon as there is memory for it. Others read, and
    whoever has read the last bytes of a chunk begins its copy to the device.
    """

    def __init__(
        self,
        fold: Fold[Any],
        shards: Sequence[ShardRange],
        size: int,
        readers: int,
        buffers: int,
    ) -> None:
        self._fold, self._shards, self._size = fold, shards, size
        self._bus = bus_to(torch.device(fold.device))
        self._hosts, self._theres = SimpleQueue[_Memory](), SimpleQueue[_Memory]()
        for _ in range(buffers):
            self._hosts.put(_Memory())
            self._theres.put(_Memory())
        self._begun = SimpleQueue[_Chunk | BaseException | None]()
        self._tasks = SimpleQueue[tuple[_Chunk, Callable[[], object]] | None]()
        self._next: _Chunk | None = None
        """What the fold is given next, where it is known."""
        self._at, self._all, self._closed = 0, False, False
        """The number of the shard that is folded; whether no more is read; and whether by force."""
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="dualform-plan")
        works = [self._hand_out, *[self._read] * readers]
        self._threads = [Thread(target=work, name="dualform-read") for work in works]

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what is under way; the memory is let go only then."""
        self._closed = True
        self._planner.shutdown(cancel_futures=True)
        self._hosts.put(_Memory())  # in case that it is waited for
        self._theres.put(_Memory())
        begun = [thread for thread in self._threads if thread.ident is not None]
        for _thread in begun:
            self._tasks.put(None)
        for thread in begun:
            thread.join()
        if self._bus is not None:
            self._bus.end()

    def shards(self) -> Iterator[ShardRange]:
        """Each shard, with what is read of it where the fold says what that is."""
        if not self._shards or self._fold.parts(self._shards[0], self._size) is None:
            yield from self._shards
            return
        for thread in self._threads:
            thread.start()
        for number, shard in enumerate(self._shards):
            self._at = number
            yield replace(shard, ahead=self)
            if (chunk := self._peek()) is not None and chunk.number == number:
                name, fold = chunk.part.stream, type(self._fold).__name__
                raise RuntimeError(f"{fold}.parts names '{name}', which its fold did not read.")

    def of(self, shard: ShardRange, stream: str) -> Iterator[tuple[Part, Mapping[str, Tensor]]]:
        """The parts of a stream in the shard that is folded; arrays are valid until the next."""
        while (chunk := self._peek()) is not None:
            if (chunk.number, chunk.part.stream) != (self._at, stream):
                return
            yield chunk.part, self._arrays(chunk)
            self._next = None
            if self._bus is None:
                self._hosts.put(chunk.host)
            else:
                chunk.there.free = self._bus.computed()
                self._theres.put(chunk.there)

    def _peek(self) -> _Chunk | None:
        """What the fold is given next; None behind the last."""
        if self._next is None and not self._all:
            begun = self._begun.get()
            if isinstance(begun, BaseException):
                raise begun
            self._next, self._all = begun, begun is None
        return self._next

    def _arrays(self, chunk: _Chunk) -> Mapping[str, Tensor]:
        """Those on the device, for what is computed from now on."""
        chunk.ready.wait()
        if chunk.error is not None:
            raise chunk.error
        if self._bus is not None:
            self._bus.wait(chunk.copied)
        return chunk.arrays(chunk.there)

    def _hand_out(self) -> None:
        """The work of one thread: which parts are read next, and into which memory."""
        try:
            for number, part in self._plan():
                chunk = _Chunk(number, part)
                chunk.host = chunk.there = self._main_memory(chunk.size)
                if self._bus is not None:
                    chunk.there = self._device_memory(chunk.size, self._bus)
                if self._closed:
                    return
                reads = chunk.reads()
                self._begun.put(chunk)
                for read in reads:
                    self._tasks.put((chunk, read))
            self._begun.put(None)
        except BaseException as error:  # raised by the thread that folds
            self._begun.put(error)

    def _main_memory(self, size: int) -> _Memory:
        """So many bytes, as soon as some are free."""
        memory = self._hosts.get()
        if memory.free is not None:
            memory.free.synchronize()
        if size > len(memory.bytes) and not self._closed:
            plain = partial(torch.empty, dtype=torch.uint8)
            memory.bytes = (self._bus.main_memory if self._bus is not None else plain)(size)
        return memory

    def _device_memory(self, size: int, bus: Bus) -> _Memory:
        """So many bytes of the GPU, as soon as some are handed back; copies wait for their mark."""
        memory = self._theres.get()
        if (memory.free is None or size > len(memory.bytes)) and not self._closed:
            memory.bytes, memory.free = bus.device_memory(size), bus.computed()
        return memory

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

    def _read(self) -> None:
        """The work of the other threads."""
        while (task := self._tasks.get()) is not None:
            chunk, read = task
            if self._closed:
                continue
            try:
                read()
                if chunk.one_more():
                    self._send(chunk)
                    chunk.ready.set()
            except BaseException as error:  # raised by the thread that folds
                chunk.error = error
                chunk.ready.set()

    def _send(self, chunk: _Chunk) -> None:
        """Begins to copy a chunk to the device; main memory is free once it is copied."""
        if self._bus is not None:
            assert chunk.there.free is not None
            source, into = (memory.bytes[: chunk.size] for memory in (chunk.host, chunk.there))
            chunk.copied = chunk.host.free = self._bus.copy(source, into, chunk.there.free)
            self._hosts.put(chunk.host)
