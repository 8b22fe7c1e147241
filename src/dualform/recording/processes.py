"""Several processes that record one training: what they tell each other, and how.

Each process has two *lines* to the others: its training thread has one, its writer's thread has
the other. On a line all processes say something of the same kind, and all hear what each has said.
So what they decide from it is the same in all of them. Where one process trains, a line does
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualform.errors import RecorderFailedError, RecordingError


class Line:
    """One thread's line to the same thread of the other processes.

    >>> line = Line()
    >>> line.numbers([3, 4]), line.said({"step": 1})
    ([[3, 4]], [{'step': 1}])
    >>> line.total([torch.ones(2)])
    [tensor([1., 1.])]
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.of = 1 if group is None else dist.get_world_size(group)

    def numbers(self, own: Sequence[int], wait: float | None = None) -> list[list[int]]:
        """The whole numbers of each process; raises after `wait` seconds without an answer."""
        if self.of == 1:
            return [list(own)]
        found = self._gather(torch.tensor(own, dtype=torch.int64), wait)
        return [part.tolist() for part in found]

    def said(self, own: Any) -> list[Any]:
        """What each process says: anything that JSON can."""
        if self.of == 1:
            return [own]
        text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        sizes = [size for (size,) in self.numbers([len(text)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = text
        found = self._gather(padded)
        return [
            json.loads(bytes(part[:size].tolist())) for part, size in zip(found, sizes, strict=True)
        ]

    def total(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all processes of tensors in main memory, in float64; the same in each."""
        return self._joined(own, torch.Tensor.sum)

    def largest(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The largest of all processes, element by element."""
        return self._joined(own, torch.Tensor.amax)

    def any(self, own: Sequence[bool], wait: float | None = None) -> list[bool]:
        """Which of these hold in some process; raises after `wait` seconds without an answer."""
        return [any(found) for found in zip(*self.numbers([*map(int, own)], wait), strict=True)]

    def gather(self, own: Tensor) -> list[Tensor] | None:
        """In process 0, the tensors of all processes, which have one size; None in others."""
        if self.of == 1:
            return [own]
        found = [torch.empty_like(own) for _ in range(self.of)] if self.rank == 0 else None
        with self._answered():
            dist.gather(own, found, group=self._open, group_dst=0)
        return found

    def sent(self, source: int, own: Tensor) -> Tensor:
        """A tensor that one process has; the others give one of its size and type."""
        if self.of > 1:
            with self._answered():
                dist.broadcast(own.view(torch.uint8), group=self._open, group_src=source)
        return own

    def close(self) -> None:
        """Cuts the line: whoever waits for this process is told that it does not answer."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):  # the training may have ended its processes already
                dist.destroy_process_group(group)

    def _joined(self, own: Sequence[Tensor], join: Any) -> list[Tensor]:
        if self.of == 1 or not own:
            return list(own)
        flat = torch.cat([tensor.reshape(-1).double() for tensor in own])
        if len({size for (size,) in self.numbers([len(flat)])}) > 1:
            raise RecorderFailedError(
                "the processes do not record the same steps of the same parameters; this is a "
                "defect of dualform. Please report it with the lines of your loop."
            )
        parts = join(torch.stack(self._gather(flat)), 0).split([t.numel() for t in own])
        return [part.reshape(t.shape) for part, t in zip(parts, own, strict=True)]

    def _gather(self, own: Tensor, wait: float | None = None) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.of)]
        with self._answered():
            work = dist.all_gather(found, own, group=self._open, async_op=True)
            assert work is not None
            if wait is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=wait))
        return found

    @property
    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("the line was cut")
        return self._group

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Says what it means that another process does not answer."""
        try:
            yield
        except RuntimeError as error:
            raise RecorderFailedError(
                f"process {self.rank} cannot go on recording: one of the {self.of} processes that "
                f"record does not answer ({error})."
            ) from error


class Processes:
    """The processes that record together; one, unless torch.distributed trains with several.

    >>> processes = Processes()
    >>> processes.rank, processes.of, processes.is_first
    (0, 1, True)
    """

    def __init__(self, steps: Line | None = None, writers: Line | None = None) -> None:
        self.steps, self.writers = steps or Line(), writers or Line()
        """The lines of the training threads, and of the writers' threads."""

    @classmethod
    def training(cls, model: nn.Module, count: int | None) -> Processes:
        """Those that train this model: all of torch.distributed, unless `count` says one."""
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if count not in (None, 1, world):
            raise RecordingError(
                f"processes={count!r}, and torch.distributed has {world}; give processes={world}, "
                "1 to record this process by itself, or leave it out."
            )
        group = getattr(model, "process_group", None)
        if isinstance(model, nn.parallel.DistributedDataParallel) and group is not None:
            averaged, wanted = dist.get_world_size(group), count or world
            if averaged != wanted:
                raise RecordingError(
                    f"the model averages its gradients over {averaged} processes, and {wanted} are "
                    "to record; make DistributedDataParallel without process_group."
                )
        if world == 1 or count == 1:
            return cls()
        return cls(*(Line(dist.new_group(backend="gloo")) for _ in range(2)))

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self.steps.rank

    @property
    def of(self) -> int:
        """How many there are."""
        return self.steps.of

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which begins a run and keeps its weights."""
        return self.rank == 0

    def close(self) -> None:
        """Cuts both lines."""
        self.steps.close()
        self.writers.close()
