"""Twins: one forward pass is computed several times at once, each time with other inputs.

A *world* is the forward pass as it would have been with other inputs for some samples. What differs
there from the real pass depends on those samples. The model's own code runs only once: below
autograd, each torch operation is made for real, and again for each world in which one of its
arguments differs. Training sees nothing of it, and random numbers are the same in all worlds.

A world keeps a copy of each piece of memory whose contents differ there. So views, and changes in
place, need no care: a tensor's twin is the same view of the copy. Where there is no room for a copy
(`world_memory.py`), the world has *lost* the tensor, and everything that is computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dualform.owners.calls import (
    COUNTING,
    MOVING,
    SHAPES_ONLY,
    Autocast,
    Draws,
    call_there,
    is_number,
    is_view,
    random_sources,
    same_randomness,
    tensors_of,
    written_by,
)
from dualform.owners.patterns import spread
from dualform.owners.world_memory import HOST_BYTES, LEAST, WorldMemories, extent, key_of
from dualform.private import TorchDispatchMode, storage_key, without_modes

ELEMENTS = 128
"""So many elements of a row are compared, where it has more."""
ROUNDINGS = 64.0
"""By more than so many roundings of a row's largest element must something differ to count.

Kernels may add up in another order each time. In 32 and 64 bits the roundings of many additions
then reach the result.
"""
ROUNDINGS_16 = 4.0
"""The same for numbers of 16 bits or fewer.

Kernels add these up in 32 bits, and round the result once. So two orders of addition differ by one
rounding, and by a few more where earlier results already did. 64 roundings of a bfloat16 would be
half of the number itself.
"""

NONE: frozenset[int] = frozenset()
Geometry: TypeAlias = tuple[int, int, torch.Size, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is known of a call before it is made."""

    worlds: Sequence[int]
    """Where it is made again."""
    lost: frozenset[int]
    """Where that cannot be."""
    written: Sequence[Tensor]
    """What it changes in place."""
    sources: list[Draws]
    """What it draws random numbers from."""


class Twins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, follows what differs in each of some worlds.

    >>> x = torch.tensor([1.0, 2.0])
    >>> twins = Twins(1)
    >>> twins.change([x], 0, [torch.tensor([1.0, 5.0])])
    >>> with twins:
    ...     y = 2 * x
    >>> twins.differing(y, dims=0)
    tensor([[False,  True]])
    """

    def __init__(self, worlds: int, room: int = HOST_BYTES, kept: int = LEAST) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = [True] * worlds
        """The worlds that were not given up for want of memory."""
        self.failed = ""
        """The first operation that a world could not make."""
        self.guard: Callable[..., Any] = lambda action, *args: action(*args)
        """Runs what follows the worlds. A recorder's returns None after a failure."""
        self._memories = WorldMemories(worlds, room, kept)
        self._shared: dict[Geometry, list[Tensor | None]] = {}
        """Twins of tensors whose elements share memory, such as expanded ones."""
        self._autocast = Autocast()

    def __enter__(self) -> Twins:
        self._autocast.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._autocast.__exit__(*error)  # type: ignore[no-untyped-call]

    # What is asked

    def change(self, tensors: Sequence[Tensor], world: int, twins: Sequence[Tensor]) -> None:
        """Gives tensors other contents in one world.

        They are given together because several may be parts of one piece of memory. The world has
        lost those that there is no room for.
        """
        self._memories.span(tensors)
        for tensor, twin in zip(tensors, twins, strict=True):
            if shares_memory(tensor):
                known = self._shared.setdefault(_geometry(tensor), [None] * len(self.alive))
                known[world] = twin
            elif self._memories.can_own(tensor, world):
                self._memories.own(tensor, world)
                self.twin(tensor, world).copy_(twin)
            else:
                self._memories.of(tensor).lose([world])

    def differing(self, tensor: Tensor, dims: int) -> Tensor:
        """(worlds, …): which rows of a tensor differ in each world, by more than rounding.

        A row is made of the last `dims` dimensions; some elements of it tell.
        """
        lead = tensor.shape[: tensor.ndim - dims]
        found = torch.zeros(len(self.alive), *lead, dtype=torch.bool, device=tensor.device)
        worlds = self._worlds([tensor]) if tensor.numel() else []
        if not worlds:
            return found
        places = spread(tensor.numel() // lead.numel(), ELEMENTS).to(tensor.device)
        seen = [tensor, *(self.twin(tensor, world) for world in worlds)]
        some = torch.stack([t.detach().reshape(*lead, -1)[..., places] for t in seen])
        real, twins = some[0], some[1:]
        same = real == twins
        if tensor.is_floating_point():
            reach = real.abs().amax(-1, keepdim=True) * rounding_reach(tensor.dtype)
            same |= (real - twins).abs() <= reach
            same |= real.isnan() & twins.isnan()
        found[worlds] = ~same.all(-1)
        return found

    def lost(self, tensor: Tensor) -> Tensor:
        """(worlds,): where nobody knows whether the tensor differs."""
        piece = self._memories.get(tensor)
        gone = set() if piece is None else piece.lost
        return torch.tensor([world in gone for world in range(len(self.alive))])

    def is_lost(self, tensor: Tensor) -> bool:
        """Whether the tensor may differ in some worlds, and in none is it known how."""
        piece = self._memories.get(tensor)
        return piece is not None and bool(piece.lost) and all(copy is None for copy in piece.copies)

    def moves(self, tensor: Tensor) -> bool:
        """Whether the data decided where the tensor's elements are."""
        piece = self._memories.get(tensor)
        return piece is not None and piece.moved

    def twin(self, tensor: Tensor, world: int) -> Tensor:
        """The tensor as it is in a world; itself where nothing differs."""
        if self._shared and (known := self._shared.get(_geometry(tensor))):
            twin = known[world]
            return tensor if twin is None else twin
        memory = self._memories.get(tensor)
        copy = None if memory is None else memory.copies[world]
        if memory is None or copy is None:
            return tensor
        start, end = extent(tensor)
        start, end = start - memory.start, end - memory.start
        if start < 0 or end > copy.nbytes() or start % tensor.itemsize:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(copy, start // tensor.itemsize, tensor.shape, tensor.stride())

    def clear(self) -> None:
        """Lets go of all worlds."""
        self._memories.clear()
        self._shared.clear()

    # What is seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Makes the call, and makes it again in each world where something differs."""
        kwargs = kwargs or {}
        with self._autocast.around(func):
            ahead = self.guard(self._look_ahead, func, args, kwargs)
            out = self._really(func, args, kwargs)
            if ahead is not None:
                self.guard(self._follow, func, args, kwargs, out, ahead)
        return out

    def _look_ahead(self, func: Any, args: Any, kwargs: Any) -> Ahead:
        """Says in which worlds a call differs, and gives them memory for what it writes."""
        self._memories.tick()
        given = tensors_of((*args, *kwargs.values()))
        shapes = func.overloadpacket.__name__ in SHAPES_ONLY | COUNTING
        worlds, lost = ([], NONE) if shapes else (self._worlds(given), self._lost(given))
        if is_view(func):
            return Ahead(worlds, NONE, [], [])  # its memory is what it is given, lost or not
        written = written_by(func, args, kwargs)
        worlds = [w for w in worlds if w not in lost and self._may_differ(written, given, w)]
        made = self._memories.affordable(worlds, self._memories.missing(written, worlds))
        for world in made:
            for tensor in written:
                self._memories.own(tensor, world)
        sources = random_sources(func, args, kwargs) if made else []
        return Ahead(made, lost.union(worlds).difference(made), written, sources)

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any, ahead: Ahead) -> None:
        """Makes a call that was made for real again in the worlds where it differs."""
        given, results = tensors_of((*args, *kwargs.values())), tensors_of(out)
        if is_view(func):
            self._share_views(func, args, kwargs, out, ahead.worlds)
            return
        worlds = [world for world in ahead.worlds if self.alive[world]]
        made = self._memories.affordable(worlds, self._memories.missing(results, worlds))
        differing = [t for t in given if self._shared or self._memories.get(t) is not None]
        with same_randomness(ahead.sources) as start_again:
            for world in made:
                start_again()
                self._live(func, args, kwargs, differing, out, world)
        lost = ahead.lost.union(worlds).difference(made)
        if lost:
            self._lose(given, [*results, *ahead.written], lost)
        self._mark(func.overloadpacket.__name__, given, out, bool(ahead.worlds or ahead.lost))

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The real call; worlds are given up rather than that they leave no memory for it."""
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not any(self.alive):
                raise
            self.give_up(range(len(self.alive)))
            return func(*args, **kwargs)

    def _live(
        self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], out: Any, world: int
    ) -> None:
        """Makes a call in one world, and keeps what it gives there."""
        twins = self._twins(given, world)

        def there(tensor: Tensor) -> Tensor:
            return twins.get(id(tensor), tensor)

        try:
            found = call_there(func, args, kwargs, there, out)
        except torch.OutOfMemoryError:
            self.give_up([world])
            return
        except Exception as error:  # a world's numbers may be such as no model would meet
            self.failed = self.failed or f"{func}: {error}"
            return
        exact = not any(is_number(t) for t in given if id(t) in twins)
        for real, twin in zip(tensors_of(out), tensors_of(found), strict=False):
            told = real.dtype != torch.bool and (exact or is_number(real))
            if told and real.shape == twin.shape:
                self._keep(real, twin, world)

    def _twins(self, given: Sequence[Tensor], world: int) -> dict[int, Tensor]:
        """What stands for the arguments that differ in a world.

        Numbers are content. Integers are content where no number differs: they look something up in
        a table that all worlds share. Otherwise they arrange content, and stay as they are.
        """
        found = [(t, twin) for t in given if (twin := self.twin(t, world)) is not t]
        numbers = [(t, twin) for t, twin in found if is_number(t)]
        return {id(t): twin for t, twin in numbers or found}

    def _may_differ(self, written: Sequence[Tensor], given: Sequence[Tensor], world: int) -> bool:
        """Whether a world may hold something else in what is written; not if numbers decide it."""
        if all(is_number(t) for t in written):
            return True
        masks = any(t.dtype == torch.bool for t in written)
        return not masks and not any(is_number(t) for t in given if self.twin(t, world) is not t)

    def _keep(self, real: Tensor, twin: Tensor, world: int) -> None:
        memory = self._memories.of(real)
        copy, new = memory.copies[world], twin.untyped_storage()
        key = storage_key(new)
        if copy is not None and storage_key(copy) == key:
            return  # it was written in place
        alike = (twin.stride(), twin.storage_offset()) == (real.stride(), real.storage_offset())
        if alike and new.nbytes() == real.untyped_storage().nbytes() and key_of(real) != key:
            self._memories.hold(memory, world, new)
        else:
            self._memories.own(real, world)
            self.twin(real, world).copy_(twin)

    def _lose(
        self, given: Sequence[Tensor], results: Sequence[Tensor], lost: Iterable[int]
    ) -> None:
        """The results of a call are not known in these worlds, so far as they could differ there.

        Integers could not where numbers decided them: worlds take the real ones.
        """
        pieces = [self._memories.get(t) for t in given if is_number(t)]
        exact = not any(piece.differs for piece in pieces if piece is not None)
        for tensor in results:
            if tensor.dtype != torch.bool and (exact or is_number(tensor)):
                self._memories.of(tensor).lose(lost)

    def _worlds(self, given: Sequence[Tensor]) -> list[int]:
        """The worlds in which any of these tensors differs."""
        known: list[Sequence[object]] = [piece.copies for piece in self._memories.use(given)]
        if self._shared:
            known += [self._shared[g] for t in given if (g := _geometry(t)) in self._shared]
        found = zip(*known, strict=True)
        return [w for w, copies in enumerate(found) if any(copy is not None for copy in copies)]

    def _lost(self, given: Sequence[Tensor]) -> frozenset[int]:
        """The worlds in which nobody knows what a call is given.

        As in `_twins`, integers do not matter where numbers differ.
        """
        if not any(piece.lost for piece in self._memories.use(given)):
            return NONE
        pieces = [(t, piece) for t in given if (piece := self._memories.get(t)) is not None]
        numbers = NONE.union(*(piece.lost for t, piece in pieces if is_number(t)))
        others = NONE.union(*(piece.lost for t, piece in pieces if not is_number(t)))
        differing = self._worlds([t for t in given if is_number(t)])
        return numbers | others.difference(differing)

    def _share_views(
        self, func: Any, args: Any, kwargs: Any, out: Any, worlds: Iterable[int]
    ) -> None:
        """A view of a tensor whose elements share memory has a twin of its own."""
        if not self._shared or _geometry(args[0]) not in self._shared:
            return
        for world in worlds:
            found = func(self.twin(args[0], world), *args[1:], **kwargs)
            for real, twin in zip(tensors_of(out), tensors_of(found), strict=True):
                known = self._shared.setdefault(_geometry(real), [None] * len(self.alive))
                known[world] = twin

    def _mark(self, name: str, given: Sequence[Tensor], out: Any, differs: bool) -> None:
        """Follows which integers the data decided, and what was moved by them."""
        pieces = [(self._memories.get(t), is_number(t)) for t in given]
        known = [(piece, number) for piece, number in pieces if piece is not None]
        decided = any(piece.decided or not number for piece, number in known)
        moved = any(piece.moved for piece, _ in known) or (decided and name in MOVING)
        if not (differs or decided or moved):
            return
        for tensor in tensors_of(out):
            if not is_number(tensor):
                self._memories.of(tensor).decided = True
            elif moved:
                self._memories.of(tensor).moved = True

    def give_up(self, worlds: Sequence[int]) -> None:
        """Lets go of some worlds, which tell nothing any more."""
        self._memories.drop(worlds)
        for world in worlds:
            self.alive[world] = False
            for twins in self._shared.values():
                twins[world] = None


@contextmanager
def outside() -> Iterator[None]:
    """What is computed here belongs to no world and no graph, and is in main memory by default."""
    elsewhere = torch.get_default_device().type != "cpu"  # a device's context costs time a call
    with torch.no_grad(), without_modes(), torch.device("cpu") if elsewhere else nullcontext():
        yield


def shares_memory(tensor: Tensor) -> bool:
    """Whether several elements of a tensor are the same place in memory.

    >>> shares_memory(torch.zeros(3, 1).expand(3, 2)), shares_memory(torch.zeros(3, 2))
    (True, False)
    """
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def rounding_reach(dtype: torch.dtype) -> float:
    """How much of a row's largest element rounding may change.

    >>> rounding_reach(torch.bfloat16), rounding_reach(torch.float32) < 1e-5
    (0.03125, True)
    """
    info = torch.finfo(dtype)
    return info.eps * (ROUNDINGS_16 if info.bits <= 16 else ROUNDINGS)


def _geometry(tensor: Tensor) -> Geometry:
    return key_of(tensor), int(tensor.storage_offset()), tensor.shape, tensor.stride()
