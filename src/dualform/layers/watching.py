"""Seeing a model's torch calls as uses of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from dualform.layers.rows import by_sample
from dualform.layers.use import Finder, Function, LayerKind, Seen, Site, Waits
from dualform.ledger.format import ROOT


class Hook(partial[None]):
    """A module's hook that stays behind: a copy of the module has one that does nothing instead.

    So a model that is copied or saved inside the loop takes nothing of the recorder with it, and
    files can be loaded where there is no dualform.

    >>> import copy
    >>> calls = []
    >>> hook = Hook(lambda module, args: calls.append(args))
    >>> hook(None, (1,)); copy.deepcopy(hook)(None, (2,)); calls
    [(1,)]
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, and gives None


class Watching(TorchFunctionMode):
    """While it is entered, every call that uses a known parameter is handed to `take`."""

    def __init__(
        self, find: Finder, kinds: Mapping[Function, LayerKind], take: Callable[[Seen], None]
    ) -> None:
        super().__init__()
        self._find, self._kinds, self._take = find, kinds, take

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Makes the call, and looks at it if its function belongs to a kind."""
        kind = self._kinds.get(func)
        if kind is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        out, use = kind.see(self._find, self._inside, func, args, kwargs or {})
        if use is not None:
            self._take(use)
        return out

    def _inside(self, func: Function, args: Any, kwargs: Any, axis: int) -> Any:
        """Runs a function with the calls inside it being watched."""
        before, self._find.axis = self._find.axis, axis
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            self._find.axis = before


def when_errors_come(
    use: Seen, action: Callable[[Sequence[Tensor | None]], None]
) -> RemovableHandle | None:
    """Hangs an action on the graph, for when the errors of a use are known.

    The hook is on the node, not on the tensor, which may yet be changed in place. The use forgets
    its outputs: a hook on their graph must not keep that graph alive. A hook on several outputs
    holds their graph, which holds the hook, so the handle is to be removed in the end.
    """
    outputs, use.outputs = use.outputs, ()
    if len(outputs) == 1:
        node = outputs[0].grad_fn
        return None if node is None else node.register_prehook(action)
    waiting = use.await_errors(action) if isinstance(use, Waits) else None
    if waiting is not None:
        return waiting
    if all(out.grad_fn is None for out in outputs):
        return None
    return torch.autograd.graph.register_multi_grad_hook(outputs, action)


class SampleRows(NamedTuple):
    """Rows that a call left, as many for each sample, sorted by sample."""

    site: Site
    keys: Tensor
    values: Tensor
    shared: Tensor | None
    """A matrix with which the blocks of all these rows are multiplied, where they are."""
    record: tuple[int, ...]
    """The shape of one record's key, of which a convolution makes several rows."""


class RowCollector(Watching):
    """Collects the rows that a backward pass leaves, sorted by sample.

    It is entered around the forward pass; `rows_of` says how many samples there are.

    >>> model, x = nn.Linear(3, 2), torch.ones(4, 3)
    >>> from dualform.layers import kinds
    >>> collector = RowCollector(Finder(dict(model.named_parameters())), kinds())
    >>> with collector.rows_of(4) as rows:
    ...     with collector:
    ...         loss = model(x).sum()
    ...     loss.backward()
    >>> rows[0].keys.shape, rows[0].values.shape
    (torch.Size([4, 3]), torch.Size([4, 2]))
    """

    def __init__(
        self, find: Finder, kinds: Mapping[Function, LayerKind], usual_axis: int = 0
    ) -> None:
        super().__init__(find, kinds, self._await_errors)
        self._usual_axis, self._samples = usual_axis, 0
        self._rows: list[SampleRows] = []
        self._hooks: list[RemovableHandle | None] = []

    @contextmanager
    def rows_of(self, samples: int) -> Iterator[list[SampleRows]]:
        """A list that the rows of a forward and a backward pass within are added to."""
        self._samples, self._rows = samples, []
        try:
            yield self._rows
        finally:
            # The graph's hooks hold uses, whose inputs' history is the graph: a circle that
            # Python does not see, so that it has to be broken by hand.
            for hook in filter(None, self._hooks):
                hook.remove()
            self._rows, self._hooks = [], []
            self._find.recent.clear()

    def _await_errors(self, use: Seen) -> None:
        self._hooks.append(when_errors_come(use, partial(self._add, use)))

    @torch.no_grad()
    def _add(self, use: Seen, errors: Sequence[Tensor | None]) -> None:
        """Adds a use's rows: now, while the graph of a computed weight is still there.

        Rows are left out where no dimension counts samples.
        """
        for rows in use.rows(errors):
            found = by_sample(rows, self._samples, self._usual_axis)
            if found is not None:
                shared = None if rows.shared is None else rows.shared.detach()
                self._rows.append(SampleRows(rows.site, *found, shared, rows.record))


def is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript runs the module, whose calls cannot be seen.

    >>> is_scripted(nn.Linear(2, 2))
    False
    """
    return isinstance(module, torch.jit.ScriptModule)


def shared_labels(model: nn.Module, find: Finder) -> list[RemovableHandle]:
    """Hooks that note under which of its names a shared parameter is being used."""
    owners = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [
        _note(owner, find, shared[0], name)
        for shared in names.values()
        if len(shared) > 1
        for name in shared
        if not is_scripted(owner := owners[name.rpartition(".")[0]])
    ]


def _note(owner: nn.Module, find: Finder, book: str, name: str) -> RemovableHandle:
    def note(module: nn.Module, args: Any) -> None:
        find.labels[book] = name

    return owner.register_forward_pre_hook(Hook(note))


def packing_order(model: nn.Module, find: Finder) -> list[RemovableHandle]:
    """Hooks that note how packed sequences, which are sorted by length, go back in order."""

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        packed = args and isinstance(args[0], PackedSequence)
        find.order = args[0].unsorted_indices if packed else None

    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    return [layer.register_forward_pre_hook(Hook(note)) for layer in layers]


def usual_axis(model: nn.Module) -> int:
    """Which dimension counts samples where shapes leave it open: 1 if layers take time first.

    >>> usual_axis(nn.Linear(2, 2)), usual_axis(nn.LSTM(2, 2))
    (0, 1)
    """
    kinds = (nn.RNNBase, nn.MultiheadAttention)
    first = [module.batch_first for module in model.modules() if isinstance(module, kinds)]
    return int(bool(first) and not any(first))


def first_tensor(given: Any) -> Tensor | None:
    """The first tensor with a dimension in nested arguments.

    >>> import torch
    >>> first_tensor(({"x": torch.zeros(4, 3)}, 5)).shape
    torch.Size([4, 3])
    """
    return next(iter(tensors_in(given)), None)


def tensors_in(given: Any) -> list[Tensor]:
    """All tensors with a dimension in nested arguments, in order.

    >>> import torch
    >>> [len(tensor) for tensor in tensors_in((torch.zeros(4), [5, {"y": torch.zeros(2)}]))]
    [4, 2]
    """
    if isinstance(given, Tensor):
        return [given] if given.ndim else []
    if isinstance(given, PackedSequence) or not isinstance(given, tuple | list | dict | Mapping):
        return []
    parts = given if isinstance(given, tuple | list) else given.values()
    return [tensor for part in parts for tensor in tensors_in(part)]


def stream_name(label: str) -> str:
    """What a stream is called: its layer, or its parameter where that has a name of its own.

    >>> [stream_name(n) for n in ("fc.weight", "attn.in_proj_weight", "rnn.weight_ih_l0", "cls")]
    ['fc', 'attn.in_proj', 'rnn.ih_l0', 'cls']
    """
    owner, _, name = label.rpartition(".")
    if name in ("weight", "bias"):
        return owner or ROOT
    short = name.removesuffix("_weight").removeprefix("weight_")
    return f"{owner}.{short}" if owner else short
