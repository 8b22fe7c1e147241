"""Torch operations as worlds make them: which differ in what way, and the few that need care."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dualform.private import schema_of


class Draws(Protocol):
    """What random numbers are drawn from."""

    def pause(self) -> None:
        """Remembers where the real call left it."""

    def restart(self) -> None:
        """Goes back to where the real call began."""

    def resume(self) -> None:
        """Goes on from where the real call left it."""


SHAPES_ONLY = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
}  # fmt: skip
"""Operations whose result depends on the shape of what they are given, not on its contents."""

CHOOSING = {"sort", "topk", "max", "min", "kthvalue", "median", "mode", "cummax", "cummin"}
"""Operations that choose elements, and say which: a world chooses the same ones."""

MOVING = {
    "index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "index_select",
    "index_add", "index_add_", "index_copy", "index_copy_", "gather", "scatter", "scatter_",
    "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "masked_select",
    "masked_scatter", "masked_scatter_", "take", "_pack_padded_sequence", "repeat_interleave",
}  # fmt: skip
"""Operations that move elements to where integers say."""

LOOKUPS = {
    "embedding", "embedding_renorm_", "_embedding_bag", "index", "_unsafe_index", "index_select",
    "gather", "take", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add",
    "index_add_", "index_put", "index_put_", "_index_put_impl_",
}  # fmt: skip
"""Operations that look integers up: where these are marked, a world looks up something else."""
COUNTING = {"bincount", "repeat_interleave", "histc", "one_hot"}
"""Operations that integers must not be too large for: worlds do without them."""
MARK = {torch.int64: 1 << 40, torch.int32: 1 << 24}
"""What is added to an integer to make it another one, which no table has."""

CALLING = {"_trilinear"}
"""Operations whose kernels make further calls, which autocast sees."""

BATCH_NORMS = {
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit",
    "_batch_norm_with_update",
}  # fmt: skip
"""Normalizations over the batch: worlds keep the statistics of the real one."""


def call_there(
    func: Any, args: Any, kwargs: Any, there: Callable[[Tensor], Tensor], out: Any
) -> Any:
    """What a call gives in a world, in which `there` has its arguments; here it gave `out`."""
    name = func.overloadpacket.__name__
    if name in CHOOSING and isinstance(out, tuple | list) and len(out) == 2:
        return (_choose(func, args, kwargs, there, out[1]),)
    if name in BATCH_NORMS and _argument(func, args, kwargs, "training", True):
        return (_normalize(args, there, out),)
    if name in LOOKUPS:
        args = _within_table(func, args, kwargs, there)
    given = [_replaced(value, there) for value in args]
    return func(*given, **{name: _replaced(value, there) for name, value in kwargs.items()})


def _replaced(value: Any, there: Callable[[Tensor], Tensor]) -> Any:
    """An argument as a world has it.

    It stands by itself: a function that calls itself from within another is a circle, which would
    keep the tensors of a world until Python collects its garbage.
    """
    if isinstance(value, list | tuple):
        return [_replaced(part, there) for part in value]
    return there(value) if isinstance(value, Tensor) else value


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results, which may be lists of tensors.

    >>> len(tensors_of((torch.zeros(2), 3, [torch.zeros(1), None])))
    2
    """
    if isinstance(values, Tensor):
        return [values] if values.layout == torch.strided and not values.is_nested else []
    if isinstance(values, list | tuple):
        return [tensor for part in values for tensor in tensors_of(part)]
    return []


def is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def is_view(func: Any) -> bool:
    """Whether an operation gives another view of what it is given, and changes nothing."""
    aliases = [result.alias_info for result in schema_of(func).returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes in place."""
    found = [
        args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_of(found)


def _argument(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str, default: Any
) -> Any:
    """An argument by its name."""
    for at, argument in enumerate(schema_of(func).arguments):
        if argument.name == name:
            standard = argument.default_value if argument.has_default_value() else default
            return args[at] if at < len(args) else kwargs.get(name, standard)
    return default


def _choose(
    func: Any, args: Any, kwargs: Any, there: Callable[[Tensor], Tensor], chosen: Tensor
) -> Tensor:
    """The elements that the real call chose, as they are in a world."""
    x, dim = there(args[0]), int(_argument(func, args, kwargs, "dim", -1))
    if not x.ndim or chosen.ndim == x.ndim:
        return x.gather(dim, chosen) if x.ndim else x
    return x.gather(dim, chosen.unsqueeze(dim)).squeeze(dim)


def _within_table(
    func: Any, args: Any, kwargs: Any, there: Callable[[Tensor], Tensor]
) -> tuple[Any, ...]:
    """The arguments of a world; marked integers name the next entry of a table."""
    table, dim = args[0], _argument(func, args, kwargs, "dim", None)

    def entry(value: Any, dim: int) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in MARK:
            return value
        twin, mark = there(value), MARK[value.dtype]
        other = (twin.remainder(mark) + 1) % table.shape[dim]
        return torch.where(twin.abs() >= mark // 2, other, twin)

    if func.overloadpacket.__name__ == "_embedding_bag":
        indices, offsets = entry(args[1], 0), there(args[2])
        bags = torch.searchsorted(args[2], torch.arange(len(indices)).to(offsets), right=True) - 1
        marked = (offsets != args[2])[bags]
        indices = torch.where(marked, (indices + 1) % len(table), indices)
        return table, indices, args[2].clone(), *args[3:]
    found = [table]
    for value in args[1:]:
        if isinstance(value, list | tuple):  # one index for each dimension
            found.append([entry(index, at) for at, index in enumerate(value)])
        else:
            found.append(entry(value, 0 if dim is None else dim))
    return tuple(found)


def _normalize(args: Any, there: Callable[[Tensor], Tensor], out: Sequence[Tensor]) -> Tensor:
    """A batch normalization of a world's input, by the statistics of the real one."""
    x, weight, scale = args[0], args[1], out[2]
    scale = scale if weight is None else scale * weight
    moved = (there(x) - x) * scale.view(1, -1, *[1] * (x.ndim - 2))
    found: Tensor = (out[0] + moved).to(out[0].dtype)
    return found


class Host:
    """A generator of the CPU.

    >>> source, drawn = Host(torch.default_generator), torch.rand(1)
    >>> source.pause(); source.restart(); again = torch.rand(1); source.resume()
    >>> bool(again == drawn)
    True
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._before = generator, generator.get_state()

    def pause(self) -> None:
        """Remembers where the real call left it."""
        self._after = self._generator.get_state()

    def restart(self) -> None:
        """Goes back to where the real call began."""
        self._generator.set_state(self._before)

    def resume(self) -> None:
        """Goes on from where the real call left it."""
        self._generator.set_state(self._after)


class Device:
    """A generator of a GPU. Setting its state would make cuDNN begin its own dropout anew.

    So it is lent copies of its state, and then given back its own.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._before = generator, generator.clone_state()

    def pause(self) -> None:
        """Remembers where the real call left it."""
        self._own = self._generator.graphsafe_get_state()

    def restart(self) -> None:
        """Goes back to where the real call began."""
        self._generator.graphsafe_set_state(self._before.clone_state())

    def resume(self) -> None:
        """Goes on from where the real call left it."""
        self._generator.graphsafe_set_state(self._own)


class DropoutState:
    """The tensor in which cuDNN keeps the random state of its recurrent layers' dropout.

    >>> state = torch.tensor([1, 2], dtype=torch.uint8)
    >>> source = DropoutState(state)
    >>> state += 1; source.pause(); source.restart(); print(state); source.resume(); print(state)
    tensor([1, 2], dtype=torch.uint8)
    tensor([2, 3], dtype=torch.uint8)
    """

    def __init__(self, state: Tensor) -> None:
        self._state, self._before = state, state.clone()

    def pause(self) -> None:
        """Remembers where the real call left it."""
        self._after = self._state.clone()

    def restart(self) -> None:
        """Goes back to where the real call began."""
        self._state.copy_(self._before)

    def resume(self) -> None:
        """Goes on from where the real call left it."""
        self._state.copy_(self._after)


def random_sources(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Draws]:
    """What a call that is about to be made draws random numbers from, if it draws any."""
    if isinstance(state := _argument(func, args, kwargs, "dropout_state", None), Tensor):
        return [DropoutState(state)]
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return []
    devices = {t.device for t in tensors_of((*args, *kwargs.values())) if t.is_cuda}
    usual = [torch.default_generator, *(torch.cuda.default_generators[d.index] for d in devices)]
    own = kwargs.get("generator")
    generators = usual if own is None else [own]
    return [Device(g) if g.device.type == "cuda" else Host(g) for g in generators]


class Autocast(TorchFunctionMode):
    """Notes under which autocast a model makes its calls, since below it that cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self._devices: tuple[str, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes the call."""
        self._devices = tuple(d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def around(self, func: Any) -> Iterator[None]:
        """Switches it on again for kernels that are made of further calls, which it casts."""
        with ExitStack() as on:
            if func.overloadpacket.__name__ in CALLING:
                for device in self._devices:
                    on.enter_context(torch.autocast(device))
            yield


@contextmanager
def same_randomness(sources: Sequence[Draws]) -> Iterator[Callable[[], None]]:
    """Gives a function that takes random numbers back to where they were; at the end they go on."""
    for source in sources:
        source.pause()

    def restart() -> None:
        for source in sources:
            source.restart()

    try:
        yield restart
    finally:
        for source in sources:
            source.resume()


def other(x: Tensor, dim: int, shift: int) -> Tensor:
    """Other contents for a tensor: integers are marked, numbers are those of other samples.

    >>> other(torch.tensor([1.0, 2.0, 2.0]), 0, 1), other(torch.zeros(2), 0, 1)
    (tensor([2., 1., 1.]), tensor([1., 1.]))
    """
    if x.dtype in MARK:
        return x + MARK[x.dtype]
    found = x.roll(shift, dim)
    for further in range(1, min(x.shape[dim], 8)):
        found = torch.where(found == x, x.roll(shift + further, dim), found)
    return torch.where(found == x, x + 1, found)  # where all samples have the same
