"""Folding on a Ray cluster: parts of the run on its nodes, merged there in a tree.

A part is a task, so Ray begins it again elsewhere if its process or its node dies. The same parts
are merged in the same order as by `Threads`, whatever the cluster is and whatever died: so the bits
are the same, too.
"""

from __future__ import annotations

import os
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from dualform.errors import ClusterError, DualformError, ReadingError
from dualform.read.engine.interface import Block, BlockFold, BlockSum, Engine, Fold, Partial
from dualform.read.engine.parts import PART_BYTES, in_parts
from dualform.read.engine.remote import Pieces, fold_part, merge_partials, sum_piece
from dualform.read.engine.serial import Serial, fold_progress, steps_read
from dualform.read.engine.shards import ShardRange
from dualform.read.progress import LateProgress
from dualform.version import __version__

PIECES = 16
"""In how many pieces a sum over blocks is cut at most: each reads all shards."""
RETRIES = 3
"""How often a part is begun again whose process or node died."""
TOGETHER = 8
"""How many small partial results one task merges; a power of 2, so that the order is the same."""
SMALL_BYTES = 1 << 20
"""How large a partial result is at most so that a task merges more than two."""
REACHED_SECONDS = 10.0
"""How long to wait for an answer from an address; Ray itself would try for minutes."""
AHEAD = 2
"""How many tasks are sent to each processor: one that runs, and one that can begin after it."""
PATIENCE = 0.2
"""Seconds after which whoever watches is told again, and may cancel."""


class Ray(Engine):
    """Folds on a Ray cluster whose machines see the run folder at the same path.

    The process that asks connects to the cluster, or starts one on its own machine. It cuts the
    run into parts, and tasks fold them. What is one part only it folds itself, such as the few
    steps that a replay goes through at a time, or a small run.

    >>> import dualform
    >>> engine = dualform.engine("ray", address="10.0.0.1:6379")  # doctest: +SKIP
    >>> dualform.open("/shared/runs/digits", engine=engine).audit()  # doctest: +SKIP

    Args:
        address: of the cluster, or "auto" for the one of this machine. By default the cluster that
            this process is connected to, or that of the variable RAY_ADDRESS, or a new one.
        cpus: processors that a task takes, and threads that torch uses in it.
        part_bytes: how large the files of a part are at least.
    """

    def __init__(
        self, address: str | None = None, *, cpus: int = 1, part_bytes: int = PART_BYTES
    ) -> None:
        self._ray = _connected(address)
        self._cpus, self._part_bytes = cpus, part_bytes
        task = {"num_cpus": cpus, "max_retries": RETRIES}
        self._fold = self._ray.remote(num_returns=2, **task)(fold_part)
        self._sum = self._ray.remote(num_returns=2, **task)(sum_piece)
        self._merge = self._ray.remote(**task)(merge_partials)

    @property
    def speedup(self) -> float:
        """How many processors fold, for each that torch uses in this process."""
        return max(1.0, len(self._slots()) * self._cpus / torch.get_num_threads())

    def reduce(
        self, fold: Fold[Partial], shards: Sequence[ShardRange], onto: Partial | None = None
    ) -> Partial:
        """The result of all shards."""
        self._require_processors(fold.device)
        parts = in_parts(fold, shards, self._part_bytes)
        if len(parts) < 2:
            return Serial().reduce(fold, shards, onto)
        total = self._reduced(fold, shards, parts)
        return total if onto is None else fold.merge(onto, total)

    def reduce_blocks(
        self, fold: BlockFold[Block], shards: Sequence[ShardRange]
    ) -> Iterator[Block]:
        """Made by this process: to send blocks takes longer than to make them. See `sum_blocks`."""
        return fold.blocks(shards)

    def _require_processors(self, device: torch.device | str) -> None:
        if torch.device(device).type != "cpu":
            raise ReadingError(
                f"engine='ray' computes on processors, and device='{device}' was given: open "
                "the run without a device, or with engine='threads'."
            )

    def sum_blocks(self, asked: BlockSum[Partial], shards: Sequence[ShardRange]) -> Partial:
        """In pieces, each of which makes its own blocks; they round otherwise than one sum does."""
        self._require_processors(asked.device)
        small = sum(shard.nbytes for shard in shards) < self._part_bytes
        if small or len(pieces := asked.cut(PIECES)) < 2:
            return asked.total(shards)
        works = [_Work((number,), shards, 1) for number in range(len(pieces))]
        with LateProgress("samples", len(works)) as progress:
            merged: Partial = self._done(self._sum, (Pieces(pieces), shards), works, 2, progress)
            return merged

    def _reduced(
        self,
        fold: Fold[Partial],
        shards: Sequence[ShardRange],
        parts: Sequence[Sequence[ShardRange]],
    ) -> Partial:
        """The result of the parts."""
        together = TOGETHER if fold.partial_bytes <= SMALL_BYTES else 2
        between = pairwise([0, *accumulate(map(len, parts))])
        works = [
            _Work(some, part, steps_read(fold, part))
            for some, part in zip(between, parts, strict=True)
        ]
        with fold_progress(fold, shards) as progress:
            merged: Partial = self._done(self._fold, (fold, shards), works, together, progress)
            return merged

    def _done(
        self,
        begin: Any,
        question: tuple[Any, Sequence[ShardRange]],
        works: Sequence[_Work],
        together: int,
        progress: LateProgress,
    ) -> Any:
        """What some works give, merged; progress is told work by work, by this thread.

        Whoever watches may cancel: then no other work begins, and those that have begun are not
        waited for. They are not cancelled, since `ray.cancel` ends the process that asks if a task
        comes to its end at the same moment (Ray 2.60).
        """
        asked, shards = question
        sent = [self._ray.put((asked, list(shards)))]  # in a list: see `fold_part`
        tree = _Tree(len(works), together, lambda group: self._merge.remote(sent, *group))
        queue = _Queue(len(works), self._slots())
        running: dict[Any, tuple[int, str, Any]] = {}
        while running or queue.waiting:
            for number, node in queue.begin():
                task = begin.options(scheduling_strategy=self._on(node))
                given = (*works[number].given, self._cpus, __version__)
                news, partial = task.remote(sent, *given)
                running[news] = (number, node, partial)
            for news in self._ended([*running], progress):
                number, node, partial = running.pop(news)
                self._get(news, works[number].shards)
                tree.add(number, partial)
                queue.end(node)
                progress.advance(works[number].size)
        while not self._ended([tree.root], progress):
            pass
        return self._get(tree.root, shards)

    def _ended(self, tasks: list[Any], progress: LateProgress) -> list[Any]:
        """The tasks that have ended after a while; whoever watches may cancel."""
        ended, _ = self._ray.wait(tasks, timeout=PATIENCE, fetch_local=False)
        if not ended:
            progress.tell()
        return list(ended)

    def _get(self, task: Any, shards: Sequence[ShardRange]) -> Any:
        """What a task gave, or the error that ended it; `shards` are those that it is about."""
        try:
            return self._ray.get(task)
        except self._ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, DualformError) else _failed(error, shards)) from error
        except self._ray.exceptions.RayError as error:
            raise _failed(error, shards) from error

    def _on(self, node: str) -> Any:
        """On a node, or elsewhere if that is gone."""
        strategies = import_module("ray.util.scheduling_strategies")
        return strategies.NodeAffinitySchedulingStrategy(node, soft=True)

    def _slots(self) -> list[str]:
        """The nodes by their names, each once for every task that it can do at a time.

        The order is the same for each question: so a node reads what it has read before, and its
        system has that in memory.
        """
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        processors = {name: nodes[name]["Resources"].get("CPU", 0) for name in sorted(nodes)}
        slots = [name for name, own in processors.items() for _ in range(int(own // self._cpus))]
        if not slots:
            raise ClusterError(
                f"no node of the Ray cluster has {self._cpus} processors for a task; the "
                f"{len(nodes)} nodes have {', '.join(f'{own:g}' for own in processors.values())}."
            )
        return slots


class _Work(NamedTuple):
    """What a task is given, the shards that it is about, and how much of the progress it is."""

    given: tuple[int, ...]
    shards: Sequence[ShardRange]
    size: float


class _Queue:
    """Which part begins where, as soon as its node has room: its own, or one that a slower has.

    >>> queue = _Queue(7, ["a", "b"])
    >>> queue.begin()
    [(0, 'a'), (1, 'a'), (4, 'b'), (5, 'b')]
    >>> queue.end("b"), queue.end("b"), queue.begin(), queue.waiting
    (None, None, [(6, 'b'), (3, 'b')], True)
    """

    def __init__(self, parts: int, slots: Sequence[str]) -> None:
        self._own = {node: deque[int]() for node in slots}
        for number in range(parts):
            self._own[slots[number * len(slots) // parts]].append(number)
        self._room = {node: AHEAD * slots.count(node) for node in self._own}

    @property
    def waiting(self) -> bool:
        """Whether some parts have not begun."""
        return any(self._own.values())

    def begin(self) -> list[tuple[int, str]]:
        """The parts that begin now, and on which nodes."""
        begun = []
        for node, own in self._own.items():
            while self._room[node] and own:
                begun.append((own.popleft(), node))
                self._room[node] -= 1
        while self.waiting and max(self._room.values()):
            node = max(self._room, key=lambda node: self._room[node])
            begun.append((max(self._own.values(), key=len).pop(), node))
            self._room[node] -= 1
        return begun

    def end(self, node: str) -> None:
        """A part has ended there."""
        self._room[node] += 1


class _Tree:
    """Merges the partial results of neighbors as they come, in the order of `in_tree`.

    >>> tree = _Tree(3, 2, lambda group: "({} {})".format(*group))
    >>> for number in (2, 1, 0):
    ...     tree.add(number, f"{number}")
    >>> tree.root
    '((0 1) 2)'

    Args:
        together: how many are merged at a time; a power of 2.
    """

    def __init__(self, parts: int, together: int, merge: Callable[[list[Any]], Any]) -> None:
        self._together, self._merge = together, merge
        self._held: dict[tuple[int, int], Any] = {}
        """By level and number."""
        self._counts = [parts]
        while self._counts[-1] > 1:
            self._counts.append(-(-self._counts[-1] // together))

    @property
    def root(self) -> Any:
        """All of them, once all have come."""
        return self._held[len(self._counts) - 1, 0]

    def add(self, number: int, partial: Any) -> None:
        """One that has come; merged with its neighbors if they have come before."""
        for level, count in enumerate(self._counts):
            self._held[level, number] = partial
            first = number - number % self._together
            group = [(level, at) for at in range(first, min(first + self._together, count))]
            if count == 1 or not all(key in self._held for key in group):
                return
            partials = [self._held.pop(key) for key in group]
            partial = partials[0] if len(partials) == 1 else self._merge(partials)
            number //= self._together


def _failed(error: Exception, shards: Sequence[ShardRange]) -> ClusterError:
    """What is said of a part that Ray gave up."""
    first, last = shards[0].shard.path, shards[-1].shard.path
    reason = str(error).strip().splitlines()[-1]
    return ClusterError(
        f"the shards from '{first}' to '{last}' could not be read on the Ray cluster, after "
        f"{RETRIES} more tries where a process or node died: {type(error).__name__}: {reason}"
    )


def _connected(address: str | None) -> Any:
    """Ray, connected to a cluster."""
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise ReadingError(
            'engine="ray" needs Ray, which is not installed: pip install "dualform[ray]".'
        ) from error
    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", own):
            raise ClusterError(
                f"address='{address}': this process is connected to the Ray cluster at '{own}'; "
                "leave the address out, or call ray.shutdown() first."
            )
        return ray
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that we start calls nobody
    try:
        if address is not None and (found := re.fullmatch(r"([^/]+):(\d+)", address)):
            socket.create_connection((found[1], int(found[2])), REACHED_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        raise ClusterError(
            f"cannot connect to a Ray cluster at address='{address}': {error}. Give the HOST:PORT "
            "that `ray start --head` prints, and set RAY_AUTH_MODE=token if the cluster asks for a "
            "token; or leave the address out to start a cluster on this machine."
        ) from error
    return ray
