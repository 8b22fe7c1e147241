"""Folding on a Ray cluster: parts of the run on its nodes, merged there in a tree.

A part is a task, so Ray begins it again elsewhere if its process or its node dies. The same parts
are merged in the same order as by `Threads`, whatever the cluster is and whatever died: so the bits
are the same, too.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from dualform.errors import ClusterError, DualformError, ReadingError
from dualform.read.engine.interface import Block, BlockFold, Engine, Fold, Partial
from dualform.read.engine.parts import PART_BYTES, in_parts
from dualform.read.engine.remote import fold_part, merge_partials
from dualform.read.engine.shards import ShardRange
from dualform.read.engine.threads import Serial, fold_progress, steps_read
from dualform.read.progress import LateProgress
from dualform.version import __version__

RETRIES = 3
"""How often a part is begun again whose process or node died."""
TOGETHER = 8
"""How many small partial results one task merges; a power of 2, so that the order is the same."""
SMALL_BYTES = 1 << 20
"""How large a partial result is at most so that a task merges more than two."""
REACHED_SECONDS = 10.0
"""How long to wait for an answer from an address; Ray itself would try for minutes."""
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

    def reduce(
        self, fold: Fold[Partial], shards: Sequence[ShardRange], onto: Partial | None = None
    ) -> Partial:
        """The result of all shards."""
        if torch.device(fold.device).type != "cpu":
            raise ReadingError(
                f"engine='ray' computes on processors, and device='{fold.device}' was given: open "
                "the run without a device, or with engine='threads'."
            )
        parts = in_parts(fold, shards, self._part_bytes)
        if len(parts) < 2:
            return Serial().reduce(fold, shards, onto)
        total = self._reduced(fold, shards, parts)
        return total if onto is None else fold.merge(onto, total)

    def reduce_blocks(
        self, fold: BlockFold[Block], shards: Sequence[ShardRange]
    ) -> Iterator[Block]:
        """By the process that asked: to send blocks takes longer than to make them."""
        return fold.blocks(shards)

    def _reduced(
        self,
        fold: Fold[Partial],
        shards: Sequence[ShardRange],
        parts: Sequence[Sequence[ShardRange]],
    ) -> Partial:
        """The result of the parts: folded by tasks, whose results other tasks merge."""
        sent = [self._ray.put((fold, list(shards)))]
        slots, at, tasks = self._slots(), 0, list[tuple[Any, Any]]()
        for number, part in enumerate(parts):
            task = self._task(fold_part, slots[number * len(slots) // len(parts)], returns=2)
            tasks.append(task(sent, at, at + len(part), self._cpus, __version__))
            at += len(part)
        partials, every = [partial for _, partial in tasks], [news for news, _ in tasks]
        together = TOGETHER if fold.partial_bytes <= SMALL_BYTES else 2
        while len(partials) > 1:
            groups = [partials[at : at + together] for at in range(0, len(partials), together)]
            merge = self._task(merge_partials, slots[0])
            partials = [merge(sent, *group) for group in groups]
            every += partials
        news = {done: part for (done, _), part in zip(tasks, parts, strict=True)}
        try:
            with fold_progress(fold, shards) as progress:
                while news:
                    for done in self._finished([*news], progress):
                        part = news.pop(done)
                        self._get(done, part)
                        progress.advance(steps_read(fold, part))
                while not self._finished(partials, progress):
                    pass
                merged: Partial = self._get(partials[0], shards)
                return merged
        except BaseException:
            for task in every:
                self._ray.cancel(task)
            raise

    def _finished(self, tasks: list[Any], progress: LateProgress) -> list[Any]:
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

    def _task(self, function: Callable[..., Any], node: str, returns: int = 1) -> Any:
        """A function to be called on a node, or elsewhere if that is gone."""
        strategies = import_module("ray.util.scheduling_strategies")
        remote = self._ray.remote(function).options(
            num_cpus=self._cpus,
            num_returns=returns,
            max_retries=RETRIES,
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node, soft=True),
        )
        return remote.remote

    def _slots(self) -> list[str]:
        """The nodes by their names, each once for every task that it can do at a time.

        Parts are handed out in this order, the same for each question: so a node reads what it has
        read before, and has it in memory.
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
            "that `ray start --head` prints, or leave it out to start one on this machine."
        ) from error
    return ray
