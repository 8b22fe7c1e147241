"""Random states: what is read or tried beside the training must not move them."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

LIBRARIES = ("builtins", "torch", "numpy", "torchvision", "typing", "abc")
"""Their classes use only the global random states."""
MOST_PARTS = 20_000
"""So many objects are looked through for generators; a collection of more than 1,000 is data."""
Restore: TypeAlias = Callable[[], object]


@contextmanager
def undisturbed(*owners: object) -> Iterator[None]:
    """Puts every random state back as it was before: torch's, numpy's and Python's own.

    Generators are put back as well that `owners` hold, or that their functions use.

    >>> before = random.getstate(), torch.get_rng_state()
    >>> with undisturbed():
    ...     drawn = random.random(), torch.rand(1)
    >>> random.getstate() == before[0], torch.equal(torch.get_rng_state(), before[1])
    (True, True)
    """
    restore = [*_global_states(), *(_state(found) for found in _generators(owners))]
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def _global_states() -> Iterator[Restore]:
    yield functools.partial(random.setstate, random.getstate())
    yield functools.partial(np.random.set_state, np.random.get_state())
    yield _if_moved(torch.get_rng_state, torch.set_rng_state)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device in range(torch.cuda.device_count()):
            read = functools.partial(torch.cuda.get_rng_state, device)
            yield _if_moved(read, functools.partial(torch.cuda.set_rng_state, device=device))
    if torch.backends.mps.is_available():
        yield _if_moved(torch.mps.get_rng_state, torch.mps.set_rng_state)


def _if_moved(read: Callable[[], Tensor], write: Callable[[Tensor], object]) -> Restore:
    """What puts a state of torch back, if it has moved.

    Setting a state of CUDA has an effect even where it is the same: cuDNN then draws the dropout of
    recurrent layers anew.
    """
    before = read()

    def put_back() -> None:
        if not torch.equal(read(), before):
            write(before)

    return put_back


def _state(generator: Any) -> Restore:
    """What puts a generator back to where it is now."""
    if isinstance(generator, torch.Generator):
        return _if_moved(generator.get_state, generator.set_state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state())
    bits = generator.bit_generator
    return functools.partial(setattr, bits, "state", copy.deepcopy(bits.state))


_KINDS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


def _generators(owners: Iterable[object]) -> list[Any]:
    """The generators within some objects, each once."""
    found: list[Any] = []
    seen: dict[int, object] = {}  # which also keeps them, so that no number is used again
    waiting = deque(owners)
    while waiting and len(seen) < MOST_PARTS:
        thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        with suppress(ReferenceError):  # a proxy of something that is gone
            if isinstance(thing, _KINDS):
                found += [] if isinstance(thing, random.SystemRandom) else [thing]
            else:
                waiting.extend(_parts(thing))
    return found


def _parts(thing: Any) -> Iterable[Any]:
    """What an object is made of, and what its functions can reach; not its data."""
    if isinstance(thing, types.FunctionType):
        reached = thing.__globals__
        named = [reached[name] for name in thing.__code__.co_names if name in reached]
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)]
        return [*named, *cells, *(thing.__defaults__ or ())]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, dict):
        return list(thing.values()) if len(thing) <= 1000 else ()
    if isinstance(thing, list | tuple | set | frozenset):
        return thing if len(thing) <= 1000 else ()
    if isinstance(thing, type):
        is_library = thing.__module__.split(".")[0] in LIBRARIES
        return [] if is_library else list(vars(thing).values())
    if isinstance(thing, Tensor | np.ndarray | types.ModuleType):
        return ()
    return [*getattr(thing, "__dict__", {}).values(), *type(thing).__mro__[:-1]]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
