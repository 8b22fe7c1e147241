"""What the processes of a cluster do: fold a part of a run, or merge what parts gave."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from dualform.errors import ClusterError, DualformError
from dualform.read.engine.interface import BlockSum, Fold
from dualform.read.engine.parts import in_tree
from dualform.read.engine.shards import ShardRange
from dualform.version import __version__

_asked: dict[str, tuple[Any, Sequence[ShardRange]]] = {}
"""What this process was asked last, by the name of its reference."""


@dataclass(frozen=True)
class Pieces:
    """A sum over blocks, cut: what it shares with others is sent once."""

    pieces: Sequence[BlockSum[Any]]

    def merge(self, one: Any, other: Any) -> Any:
        """The sum of neighbors."""
        return self.pieces[0].merge(one, other)


def fold_part(
    sent: Sequence[Any], begin: int, end: int, threads: int, version: str
) -> tuple[None, Any]:
    """News that a part is folded, which are small, and its partial result.

    Args:
        sent: one reference to the fold and all shards, fetched once the version is known to be
            the same: other versions may have other classes.
    """
    check_version(version)
    torch.set_num_threads(threads)
    fold, shards = _question(sent)
    partial = fold.start()
    for shard in shards[begin:end]:
        partial = fold_shard(fold, partial, shard)
    return None, partial


def sum_piece(sent: Sequence[Any], number: int, threads: int, version: str) -> tuple[None, Any]:
    """News that a piece of a sum over blocks is made, and what it gave; see `fold_part`."""
    check_version(version)
    torch.set_num_threads(threads)
    asked, shards = _question(sent)
    require_folders(shards)
    try:
        return None, asked.pieces[number].total(shards)
    except DualformError as error:  # which names the shard
        error.args = (f"{error} It was read {_here()}.",)
        raise
    except Exception as error:
        raise ClusterError(
            f"samples of the shards from '{shards[0].shard.path}' to '{shards[-1].shard.path}' "
            f"could not be put together {_here()}: {type(error).__name__}: {error}."
        ) from error


def _here() -> str:
    return f"on the node '{platform.node()}'"


def merge_partials(sent: Sequence[Any], *partials: Any) -> Any:
    """The partial results of neighbors as one."""
    fold, _ = _question(sent)
    return in_tree(fold.merge, partials)


def _question(sent: Sequence[Any]) -> tuple[Any, Sequence[ShardRange]]:
    """The fold, or the pieces, and the shards: fetched once for all parts of this process."""
    name = sent[0].hex()
    if name not in _asked:
        _asked.clear()
        _asked[name] = import_module("ray").get(sent[0])
    return _asked[name]


def check_version(version: str) -> None:
    """Refuses what another version of dualform sends."""
    if version != __version__:
        raise ClusterError(
            f"the node '{platform.node()}' has dualform {__version__}, and {version} asks: install "
            f"the same on all machines, pip install dualform=={version}."
        )


def require_folders(shards: Sequence[ShardRange]) -> None:
    """Says which folder this machine does not see."""
    for folder in {shard.shard.path.parent for shard in shards}:
        if not folder.is_dir():
            raise ClusterError(
                f"there is no folder '{folder}' {_here()}: every machine of the cluster must see "
                f"the run at '{folder.parent}', such as on a shared file system."
            )


def fold_shard(fold: Fold[Any], partial: Any, shard: ShardRange) -> Any:
    """A partial result and a shard more; an error says which shard, and on which node."""
    path, where = shard.shard.path, _here()
    require_folders([shard])
    try:
        return fold.fold(partial, shard)
    except DualformError as error:  # of the same type as if it were read here
        error.args = (f"{error} It was the shard '{path}' {where}.",)
        raise
    except Exception as error:
        raise ClusterError(
            f"the shard '{path}' could not be read {where}: {type(error).__name__}: {error}."
        ) from error
