"""Twins: one forward pass is computed several times at once, each time with other inputs.

A *world* is the forward pass as it would have been with other inputs for some samples. What differs
there from the real pass depends on those samples. The model's own code runs only once: below
autograd, each torch operation is made for real, and again for each world in which one of its
arguments differs. Training sees nothing of it, and random numbers are the same in all worlds.

A world keeps a copy of each piece of memory whose contents differ there. So views, and changes in
place, need no care: a tensor's twin is the same view of the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

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
from dualform.private import TorchDispatchMode, storage_key, without_modes

HOST_BYTES = 2 << 30
"""How much memory all worlds together may take on a CPU; on a GPU, half of what is free."""
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

Geometry: TypeAlias = tuple[int, int, torch.Size, tuple[int, ...]]


@dataclass(slots=True)
class WorldMemory:
    """A piece of memory: its bytes from `start` to `end` in each world, where they differ."""

    ref: StorageWeakRef
    start: int
    end: int
    copies: list[UntypedStorage | None]

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum([copy.nbytes() for copy in self.copies if copy is not None])


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

    def __init__(self, worlds: int, room: int = HOST_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = [True] * worlds
        """The worlds that were not given up for want of memory."""
        self.failed = ""
        """The first operation that a world could not make."""
        self.guard: Callable[..., Any] = lambda action, *args: action(*args)
        """Runs what follows the worlds. A recorder's returns None after a failure."""
        self._room = room
        self._memory: dict[int, WorldMemory] = {}
        self._shared: dict[Geometry, list[Tensor | None]] = {}
        """Twins of tensors whose elements share memory, such as expanded ones."""
        self._decided: set[int] = set()
        """Memory that holds integers which the data decided."""
        self._moved: set[int] = set()
        """Memory whose elements are where such integers said."""
        self._calls, self._autocast = 0, Autocast()

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

        They are given together because several may be parts of one piece of memory.
        """
        self._span(tensors)
        for tensor, twin in zip(tensors, twins, strict=True):
            if shares_memory(tensor):
                known = self._shared.setdefault(_geometry(tensor), [None] * len(self.alive))
                known[world] = twin
            else:
                self._own(tensor, world)
                self.twin(tensor, world).copy_(twin)

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

    def moves(self, tensor: Tensor) -> bool:
        """Whether the data decided where the tensor's elements are."""
        return _key(tensor) in self._moved

    def twin(self, tensor: Tensor, world: int) -> Tensor:
        """The tensor as it is in a world; itself where nothing differs."""
        if self._shared and (known := self._shared.get(_geometry(tensor))):
            twin = known[world]
            return tensor if twin is None else twin
        memory = self._memory.get(_key(tensor))
        copy = None if memory is None else memory.copies[world]
        if memory is None or copy is None:
            return tensor
        start, end = _extent(tensor)
        start, end = start - memory.start, end - memory.start
        if start < 0 or end > copy.nbytes() or start % tensor.itemsize:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(copy, start // tensor.itemsize, tensor.shape, tensor.stride())

    def clear(self) -> None:
        """Lets go of all worlds."""
        self._memory.clear()
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
                self.guard(self._follow, func, args, kwargs, out, *ahead)
        return out

    def _look_ahead(self, func: Any, args: Any, kwargs: Any) -> tuple[list[int], list[Draws]]:
        """The worlds in which a call differs, with memory for it, and what it draws from."""
        given = tensors_of((*args, *kwargs.values()))
        shapes = func.overloadpacket.__name__ in SHAPES_ONLY | COUNTING
        worlds = [] if shapes else self._worlds(given)
        if is_view(func):
            return worlds, []
        written = written_by(func, args, kwargs)
        worlds = [w for w in worlds if self._may_differ(written, given, w)]
        for world in worlds:
            for tensor in written:
                self._own(tensor, world)
        return worlds, random_sources(func, args, kwargs) if worlds else []

    def _follow(
        self, func: Any, args: Any, kwargs: Any, out: Any, worlds: list[int], sources: list[Draws]
    ) -> None:
        """Makes a call that was made for real again in these worlds."""
        given = tensors_of((*args, *kwargs.values()))
        if is_view(func):
            self._share_views(func, args, kwargs, out, worlds)
            return
        with same_randomness(sources) as start_again:
            for world in worlds:
                start_again()
                self._live(func, args, kwargs, given, out, world)
        self._mark(func.overloadpacket.__name__, given, out, bool(worlds))
        self._tidy()

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The real call; worlds are given up rather than that they leave no memory for it."""
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not any(self.alive):
                raise
            self._give_up(range(len(self.alive)))
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
        memory = self._of(real)
        copy, new = memory.copies[world], twin.untyped_storage()
        key = storage_key(new)
        if copy is not None and storage_key(copy) == key:
            return  # it was written in place
        alike = (twin.stride(), twin.storage_offset()) == (real.stride(), real.storage_offset())
        if alike and new.nbytes() == real.untyped_storage().nbytes() and _key(real) != key:
            memory.copies[world] = new
        else:
            self._own(real, world)
            self.twin(real, world).copy_(twin)

    def _of(self, tensor: Tensor) -> WorldMemory:
        at, real = _key(tensor), tensor.untyped_storage()
        if at not in self._memory:
            ref = StorageWeakRef(real)  # type: ignore[no-untyped-call]
            self._memory[at] = WorldMemory(ref, 0, real.nbytes(), [None] * len(self.alive))
        return self._memory[at]

    def _own(self, tensor: Tensor, world: int) -> None:
        """Gives a world its own copy of a tensor's memory."""
        memory = self._of(tensor)
        if memory.copies[world] is None:
            memory.copies[world] = _copy(tensor.untyped_storage(), memory.start, memory.end)

    def _span(self, tensors: Sequence[Tensor]) -> None:
        """Copies of what may be a part of a whole dataset are no larger than they must be."""
        for tensor in tensors:
            new, (start, end) = _key(tensor) not in self._memory, _extent(tensor)
            memory = self._of(tensor)
            if not any(memory.copies):
                memory.start = start if new else min(memory.start, start)
                memory.end = end if new else max(memory.end, end)

    def _worlds(self, given: Sequence[Tensor]) -> list[int]:
        """The worlds in which any of these tensors differs."""
        known: list[Sequence[object]] = [
            self._memory[at].copies for t in given if (at := _key(t)) in self._memory
        ]
        if self._shared:
            known += [self._shared[g] for t in given if (g := _geometry(t)) in self._shared]
        found = zip(*known, strict=True)
        return [w for w, copies in enumerate(found) if any(copy is not None for copy in copies)]

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
        keys = [(_key(t), is_number(t)) for t in given]
        decided = any(
            key in self._decided or (key in self._memory and not number) for key, number in keys
        )
        moved = any(key in self._moved for key, _ in keys) or (decided and name in MOVING)
        if not (differs or decided or moved):
            return
        for tensor in tensors_of(out):
            if not is_number(tensor):
                self._decided.add(_key(tensor))
            elif moved:
                self._moved.add(_key(tensor))

    def _tidy(self) -> None:
        """Forgets memory that is no more, and gives worlds up that there is no room for."""
        self._calls += 1
        if self._calls % 32:
            return
        for at in [at for at, memory in self._memory.items() if memory.ref.expired()]:  # type: ignore[no-untyped-call]
            del self._memory[at]
            self._decided.discard(at)
            self._moved.discard(at)
        while self._room < sum([memory.nbytes for memory in self._memory.values()]):
            alive = [world for world, there in enumerate(self.alive) if there]
            self._give_up(alive[len(alive) // 2 :])

    def _give_up(self, worlds: Iterable[int]) -> None:
        for world in worlds:
            self.alive[world] = False
            for memory in self._memory.values():
                memory.copies[world] = None
            for twins in self._shared.values():
                twins[world] = None


@contextmanager
def outside() -> Iterator[None]:
    """What is computed here belongs to no world and no graph, and is in main memory by default."""
    with torch.no_grad(), without_modes(), torch.device("cpu"):
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


def room_for(tensor: Tensor) -> int:
    """How many bytes worlds may take where a tensor is.

    >>> room_for(torch.zeros(1)) == HOST_BYTES
    True
    """
    return torch.cuda.mem_get_info(tensor.device)[0] // 2 if tensor.is_cuda else HOST_BYTES


def _key(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _geometry(tensor: Tensor) -> Geometry:
    return _key(tensor), int(tensor.storage_offset()), tensor.shape, tensor.stride()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its memory, and the one after its last."""
    start = int(tensor.storage_offset())
    last = sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)])
    length = last + 1 if tensor.numel() else 0
    return start * tensor.itemsize, (start + length) * tensor.itemsize


def _copy(real: UntypedStorage, start: int, end: int) -> UntypedStorage:
    held = torch.empty(0, dtype=torch.uint8, device=real.device).set_(real)
    copy: UntypedStorage = held[start:end].clone().untyped_storage()
    return copy
