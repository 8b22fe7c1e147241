"""Parameters of which each process holds a part, as `fully_shard` of torch leaves them.

Such a parameter is a `DTensor`: its shape is that of the whole, its memory that of a part. What a
recorder copies or compares of it, it copies or compares of the part; what it computes of the whole
is a sum over the parts of all processes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from dualform.errors import RecordingError
from dualform.ledger import Awaited
from dualform.private import own_parameters, version_of
from dualform.recording.processes import Line


@dataclass(frozen=True)
class Portion:
    """The part of a tensor that a process holds: some places along one dimension.

    >>> part = Portion((3, 2), dim=0, start=1, stop=2)
    >>> part.widened(torch.ones(1, 2))
    tensor([[0., 0.],
            [1., 1.],
            [0., 0.]])
    """

    shape: tuple[int, ...]
    """The whole tensor's."""
    dim: int
    start: int
    stop: int
    counts: bool = True
    """Whether it counts in a sum over all processes; of equal parts, one does."""

    @property
    def elements(self) -> int:
        """How many elements it has."""
        others = self.shape[: self.dim] + self.shape[self.dim + 1 :]
        return math.prod(others) * (self.stop - self.start)

    def widened(self, own: Tensor) -> Tensor:
        """The whole tensor, zero where other processes hold it."""
        whole = own.new_zeros(self.shape)
        if self.counts:
            whole.narrow(self.dim, self.start, self.stop - self.start).copy_(own)
        return whole

    def lines(self, view: str) -> slice | None:
        """The lines of the whole as a matrix that the part covers; None where it cuts lines."""
        if self.dim or view not in ("rows", "flat"):
            return None
        size = math.prod(self.shape[1:]) if view == "flat" else 1
        return slice(self.start * size, self.stop * size)


def is_sharded(tensor: Any) -> bool:
    """Whether each process holds a part of a tensor.

    >>> is_sharded(torch.zeros(2))
    False
    """
    loaded = sys.modules.get("torch.distributed.tensor")  # to import it takes seconds
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: its part, or all of it; in the tensor's own memory.

    >>> x = torch.zeros(2)
    >>> local(x) is x
    True
    """
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        own: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return own


def part_of(tensor: Any) -> Portion | None:
    """Which part of a tensor this process holds; None where it holds all of it, in its own right.

    >>> part_of(torch.zeros(2)) is None
    True
    """
    if not is_sharded(tensor):
        return None
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    dim, start, stop, counts = 0, 0, shape[0] if shape else 1, True
    for along, placement in enumerate(tensor.placements):
        at = mesh.get_local_rank(along)
        if placement.is_shard():
            dim = placement.dim
            most = -(-shape[dim] // mesh.size(along))
            start = min(at * most, shape[dim])
            stop = min(start + most, shape[dim])
        else:
            counts = counts and at == 0
    return Portion(shape, dim, start, stop, counts)


def changes_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, through itself or through its part.

    >>> x = torch.zeros(2)
    >>> x += 1
    >>> changes_of(x)
    1
    """
    return version_of(tensor) + (version_of(local(tensor)) if is_sharded(tensor) else 0)


def all_sharded(model: nn.Module) -> None:
    """Puts away whole parameters that an earlier forward pass has left in the place of parts."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def refuse_sharded(model: nn.Module) -> None:
    """Refuses parameters that are divided otherwise than `fully_shard` divides them."""
    loaded = sys.modules  # to import these takes seconds; where nobody has, there are none
    fsdp = loaded.get("torch.distributed.fsdp")
    for name, parameter in model.named_parameters():
        if fsdp is not None and isinstance(parameter, fsdp.FlatParameter):
            raise RecordingError(
                f"'{name}' is a flat parameter of FullyShardedDataParallel, which joins several "
                "parameters and cuts them anywhere. Use torch.distributed.fsdp.fully_shard, which "
                "keeps each parameter by itself, or DistributedDataParallel."
            )
        if is_sharded(parameter):
            _refuse_placements(name, parameter, _is_in_fully_sharded(model, name))


def refuse_apart(parameters: Mapping[str, Tensor], of: int) -> None:
    """Refuses sharded parameters of which not all parts belong to the processes that record."""
    for name, parameter in parameters.items():
        if is_sharded(parameter) and parameter.device_mesh.size() != of:  # type: ignore[attr-defined]
            there = parameter.device_mesh.size()  # type: ignore[attr-defined]
            raise RecordingError(
                f"'{name}' is sharded over {there} processes, and {of} are to record: the parts of "
                "all belong to one run. Leave processes=… out, and give fully_shard a mesh of all "
                "processes."
            )


def _is_in_fully_sharded(model: nn.Module, name: str) -> bool:
    """Whether the parameter is in a module that `fully_shard` was called with."""
    fsdp, at = sys.modules.get("torch.distributed.fsdp"), model
    found = fsdp is not None and isinstance(at, fsdp.FSDPModule)
    for step in name.split(".")[:-1]:
        at = at.get_submodule(step)
        found = found or (fsdp is not None and isinstance(at, fsdp.FSDPModule))
    return found


def _refuse_placements(name: str, parameter: Any, by_fully_shard: bool) -> None:
    mesh, placements = parameter.device_mesh, parameter.placements
    kinds = [type(placement).__name__ for placement in placements]
    if by_fully_shard and kinds in (["Shard"], ["Replicate", "Shard"]):
        return
    listed = ", ".join(map(str, placements))
    raise RecordingError(
        f"'{name}' is a DTensor on a mesh of {mesh.size()} processes, placed as ({listed}): tensor "
        "parallelism divides calls as well as parameters, so that no process has whole rows. What "
        "is recorded is fully_shard over one mesh of all processes, which divides nothing but "
        "parameters, and DistributedDataParallel."
    )


class StandIns:
    """Whole parameters that stand in the place of sharded ones while a module runs.

    Called with a tensor, it gives the name of the parameter that the tensor stands in for now.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        names = {id(p): name for name, p in parameters.items() if is_sharded(p)}
        self._places = [
            (own, attribute, names[id(parameter)])
            for module in model.modules()
            for own in [own_parameters(module)]
            for attribute, parameter in own.items()
            if id(parameter) in names
        ]
        self.whole: dict[str, Tensor] = {}
        """The stand-ins that were met, by the names of the parameters."""

    def __bool__(self) -> bool:
        return bool(self._places)

    def __call__(self, tensor: Tensor) -> str | None:
        """The parameter that a tensor stands in for, or None."""
        for own, attribute, name in self._places:
            if own.get(attribute) is tensor:
                self.whole[name] = tensor
                return name
        return None


class Piece(NamedTuple):
    """A copy of this process's part of a tensor."""

    own: Tensor
    part: Portion


Kept: TypeAlias = Tensor | Piece
"""What a process copies of a tensor: all of it, or its part."""


class Gathering:
    """Whole tensors in process 0, put together from the parts of all processes, one at a time.

    Process 0 asks for them by writing `arrays`. All others, and process 0 for what it did not ask
    for, `drain`, as leaving the `with` statement does. So no process holds more than its own parts,
    and one whole tensor.

    >>> gathering = Gathering(Line(), {"w": torch.ones(2)})
    >>> gathering.drain(); gathering.arrays
    {'w': tensor([1., 1.])}
    """

    def __init__(self, line: Line, kept: Mapping[str, Kept]) -> None:
        self._line = line
        pieces = {name: each for name, each in kept.items() if isinstance(each, Piece)}
        self._waiting = self._exchange(pieces)
        self.arrays: dict[str, Tensor | Awaited] = {
            name: self._awaited(each) if isinstance(each, Piece) else each
            for name, each in kept.items()
        }
        """What process 0 writes: each array by name, those in parts when their turn comes."""

    def __enter__(self) -> Gathering:
        return self

    def __exit__(self, *error: object) -> None:
        self.drain()

    def taken(self) -> dict[str, Tensor]:
        """All of it at once: whole tensors in process 0, nothing in others."""
        if self._line.rank:
            self.drain()
            return {}
        return {n: t if isinstance(t, Tensor) else t.take() for n, t in self.arrays.items()}

    def drain(self) -> None:
        """Does this process's share for everything that was not gathered yet."""
        for _ in self._waiting:
            pass

    def _awaited(self, piece: Piece) -> Awaited:
        return Awaited(piece.part.shape, piece.own.dtype, lambda: next(self._waiting))

    def _exchange(self, pieces: Mapping[str, Piece]) -> Iterator[Tensor]:
        """The whole tensors in turn; in other processes than the first, their own parts."""
        if not pieces:
            return
        own = [[p.part.dim, p.part.start, p.part.stop, p.part.counts] for p in pieces.values()]
        places = self._line.said(own)
        for at, piece in enumerate(pieces.values()):
            parts = [Portion(piece.part.shape, *said[at]) for said in places]
            yield _joined(self._line, piece.own, parts)


def _joined(line: Line, own: Tensor, parts: Sequence[Portion]) -> Tensor:
    """One whole tensor in process 0; in others, their own part again."""
    flat = own.contiguous().reshape(-1).view(torch.uint8)
    sent = flat.new_zeros(max([part.elements for part in parts]) * own.dtype.itemsize)
    sent[: len(flat)] = flat
    found = line.gather(sent)
    if found is None:
        return own
    whole = own.new_empty(parts[0].shape)
    for part, received in zip(parts, found, strict=True):
        place = whole.narrow(part.dim, part.start, part.stop - part.start)
        if part.counts and part.elements:
            place.copy_(received[: place.nbytes].view(own.dtype).view(place.shape))
    return whole
