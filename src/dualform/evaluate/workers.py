"""Trainings in worker processes: many at a time, each with the samples and the seed it is given."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from dualform.errors import EvaluationError, RetrainingError
from dualform.read.scores import Array

Ids: TypeAlias = NDArray[np.int64]
Task: TypeAlias = Callable[[Ids, int], Any]
"""`task(ids, seed)` trains on the samples at these positions; returns one number a query."""


@runtime_checkable
class StackedTask(Protocol):
    """A task that can train many networks at once, as an accelerator likes it."""

    @property
    def at_once(self) -> int:
        """How many at most; 0 to train one by one, as any other task."""

    def __call__(self, ids: Ids, seed: int) -> Any:
        """As any task."""

    def stacked(self, ids: Sequence[Ids], seeds: Sequence[int]) -> Sequence[Any]:
        """The same for several, whose samples are equally many."""


@dataclass(frozen=True)
class Job:
    """One training: its name in messages, the samples to train on, and the seed."""

    name: str
    ids: Ids
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What came of a job: its outputs, or what went wrong, in one line and in full."""

    job: Job
    outputs: Array | None
    problem: str = ""
    traceback: str = ""


class TaskTraceback(Exception):
    """Where a task failed, in the words of the process it ran in."""


def train_all(
    task: Task, jobs: Sequence[Job], done: Callable[[Job, Array], object], workers: int | None
) -> None:
    """Runs the jobs, and says of each that it is done, as they come, in any order.

    A task that trains many at once does so here, in this process. After a failure no further job
    is begun; those under way are finished, then it raises.

    Args:
        workers: how many processes; None for one a core. 0 trains in this process.
    """
    if workers is not None and workers < 0:
        raise EvaluationError(f"workers={workers}: give a number of processes, or 0 for none.")
    count = min(len(jobs), (os.cpu_count() or 1) if workers is None else workers)
    failure = None
    if isinstance(task, StackedTask) and task.at_once:
        outcomes = _stacked(task, jobs)
    else:
        outcomes = _elsewhere(task, jobs, count) if count else _here(task, jobs)
    with closing(outcomes):  # whatever happens, no process is left behind
        for outcome in outcomes:
            if outcome.outputs is not None:
                done(outcome.job, outcome.outputs)
            else:
                failure = failure or outcome
    if failure is not None:
        raise RetrainingError(f"{failure.job.name}: {failure.problem}") from (
            TaskTraceback("\n" + failure.traceback) if failure.traceback else None
        )


def _here(task: Task, jobs: Sequence[Job]) -> Generator[Outcome, None, None]:
    for job in jobs:
        outcome = Outcome(job, *_attempt(lambda: task, job.ids, job.seed))
        yield outcome
        if outcome.outputs is None:
            return


def _stacked(task: StackedTask, jobs: Sequence[Job]) -> Generator[Outcome, None, None]:
    """Jobs with equally many samples are trained together, as many as the task takes."""
    ordered = sorted(jobs, key=lambda job: len(job.ids))
    for _, alike in itertools.groupby(ordered, lambda job: len(job.ids)):
        while some := list(itertools.islice(alike, task.at_once)):
            ids, seeds = [job.ids for job in some], [job.seed for job in some]
            try:
                found = [_outputs(one) for one in task.stacked(ids, seeds)]
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                yield Outcome(some[0], None, problem, traceback.format_exc())
                return
            yield from itertools.starmap(Outcome, zip(some, found, strict=True))


def _elsewhere(task: Task, jobs: Sequence[Job], count: int) -> Generator[Outcome, None, None]:
    waiting, pickled = deque(jobs), _pickled(task)
    threads = max(1, (os.cpu_count() or 1) // count)
    workers = [_Worker(pickled, threads) for _ in range(count)]
    try:
        while waiting or any(worker.job for worker in workers):
            for worker in workers:
                if waiting and worker.job is None:
                    worker.give(waiting.popleft())
            busy = {worker.connection: worker for worker in workers if worker.job}
            for connection in wait(list(busy)):
                outcome = busy[connection].take()  # type: ignore[index]
                if outcome.outputs is None:
                    waiting.clear()
                yield outcome
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process of its own, which trains one job at a time."""

    def __init__(self, pickled: bytes, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, pickled, threads))
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self.job: Job | None = None

    def give(self, job: Job) -> None:
        self.job = job
        try:
            self.connection.send((job.ids, job.seed))
        except ConnectionError:
            return  # `take` says that the process has died

    def take(self) -> Outcome:
        assert self.job is not None
        job, self.job = self.job, None
        try:
            return Outcome(job, *self.connection.recv())
        except (EOFError, ConnectionError):
            self._process.join()
            return Outcome(job, None, self._epitaph)

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()
        self.connection.close()

    @property
    def _epitaph(self) -> str:
        code = self._process.exitcode or 0
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name} (out of memory?)."
        return (
            f"its process ended with exit code {code}. A script that starts worker processes needs "
            'its main part under `if __name__ == "__main__":`.'
        )


def _pickled(task: Task) -> bytes:
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EvaluationError(
            f"task={task!r} cannot be sent to worker processes ({error}); give a function at the "
            "top of a module, or functools.partial of one; workers=0 trains in this process."
        ) from error


def _serve(connection: Connection[Any, Any], pickled: bytes, threads: int) -> None:
    """A worker's life: train what comes until nothing comes any more."""
    begin_worker(threads)
    while True:
        ids, seed = connection.recv()
        connection.send(_attempt(lambda: _loaded(pickled), ids, seed))


def begin_worker(threads: int) -> None:
    """Makes this process one that works for its parent: it ends when the parent does.

    Args:
        threads: how many torch uses here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(threads)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@functools.lru_cache(maxsize=1)
def _loaded(pickled: bytes) -> Task:
    task: Task = pickle.loads(pickled)
    return task


def _attempt(load: Callable[[], Task], ids: Ids, seed: int) -> tuple[Array | None, str, str]:
    """The outputs; or else what went wrong, as text, since not every exception can travel."""
    try:
        return _outputs(load()(ids, seed)), "", ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", traceback.format_exc()


def _outputs(found: Any) -> Array:
    if isinstance(found, torch.Tensor):
        found = found.detach().cpu()
    outputs = np.atleast_1d(np.asarray(found, dtype=np.float64))
    if outputs.ndim != 1 or not np.isfinite(outputs).all():
        raise EvaluationError(
            f"the task returned {'shape ' + str(outputs.shape) if outputs.ndim != 1 else outputs}; "
            "expected one finite number a query."
        )
    return outputs
