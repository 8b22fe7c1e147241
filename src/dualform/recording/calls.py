"""Where calls of the model are seen: three mechanisms behind one interface.

A `CallSource` tells a watcher when a forward pass begins, and of every call that uses a parameter.

`FunctionCalls` sees every torch function that runs inside the model. So it sees a parameter however
it is used: by a layer, by `F.linear(x, self.w[:8])`, by `x @ w`. Its price is one Python call for
each torch function, also for those without parameters.

`LayerHooks` sees the calls of plain layers only (`plain_layers.py`), by a forward hook on each. Its
price is one Python call for each layer. It takes over after the first step, where that step has
shown that plain layers, and such as are kept by step, are all the model is made of. A step of a
perceptron of two layers took 326 µs with hooks, 372 µs without them, and 162 µs without recording:
it counts where the interpreter is what a step waits for. Should the loop use a parameter in another
way later on, its rows do not explain its gradient, which the probes notice.

`CompiledCalls` (`captured.py`) sees no calls: it is for models that torch has compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualform.layers import (
    Finder,
    Hook,
    Seen,
    Site,
    Use,
    Watching,
    is_scripted,
    kinds,
    packing_order,
    shared_labels,
)
from dualform.private import current_backward, own_parameters
from dualform.recording.guard import FORWARD, Guard
from dualform.recording.plain_layers import depends_on_shape, is_plain, use_of

Own: TypeAlias = Mapping[str, nn.Parameter | None]
"""What torch keeps of a module's own parameters, as they are at any time."""


class Watcher(Protocol):
    """Who is told of calls."""

    def begin_pass(self, module: nn.Module, args: Any, kwargs: Any, inside: bool) -> None:
        """A forward pass begins: of the model, or of a part `inside` it that the loop calls."""

    def see(self, use: Seen) -> None:
        """A call has used a parameter."""


class CallSource(Protocol):
    """Tells a watcher of the calls of a model."""

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call of the model, whose hooks stay until it ends."""

    def narrowed(self, uses: int, by_step: Collection[str]) -> CallSource:
        """After the first step, which made so many uses: a cheaper source, where one will do.

        Nobody needs the rows of books that are kept `by_step`.
        """

    def close(self) -> None:
        """Takes every hook off."""


class _Depth(threading.local):
    """How deep in calls of the model a thread is: another may be evaluating it meanwhile."""

    value = 0


class FunctionCalls:
    """Sees every torch function inside the model, by a function mode around its calls."""

    def __init__(
        self,
        model: nn.Module,
        find: Finder,
        watcher: Watcher,
        guard: Guard,
        mode: Watching | None = None,
    ) -> None:
        self._model, self._find, self._watcher, self._guard = model, find, watcher, guard
        self._mode = mode or Watching(find, kinds(), watcher.see)
        self._depth = _Depth()
        self._around_model = () if is_scripted(model) else self._around(model, self._enter_model)
        self._around_parts = {
            part: self._around(part, self._enter_part)
            for part in model.modules()
            if part is not model and not is_scripted(part)
        }
        self._notes = (*shared_labels(model, find), *packing_order(model, find))
        """Hooks that tell the finder what it must know."""
        self._called_alone: set[nn.Module] = set()
        """Parts that were called by themselves: by the loop, or by checkpointing."""
        self.loop_calls_parts = False
        """Whether the loop was one of them."""
        self._layer_calls = 0
        """How often modules that have parameters were called."""

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call of the model, whose hooks stay until it ends."""
        return self._depth.value > 0

    def narrowed(self, uses: int, by_step: Collection[str]) -> CallSource:
        """Takes off hooks that the first step did not need; layer hooks if they see the same."""
        parts = self._around_parts
        self._around_parts = {part: parts[part] for part in parts if part in self._called_alone}
        for part in parts.keys() - self._called_alone:
            for handle in parts[part]:
                handle.remove()
        layers = [part for part in parts if own_parameters(part)]
        wanted = [layer for layer in layers if not self._are_by_step(layer, by_step)]
        if own_parameters(self._model) or not wanted or not all(map(is_plain, wanted)):
            return self
        if self._called_alone or uses != self._layer_calls:
            return self
        for handle in self._around_model:
            handle.remove()
        given = (self._find, self._watcher, self._guard)
        return LayerHooks(self._model, wanted, *given, self._notes)

    def _are_by_step(self, layer: nn.Module, by_step: Collection[str]) -> bool:
        """Whether all of a layer's own parameters are kept by step."""
        own = [self._find(p) for p in own_parameters(layer).values() if p is not None]
        return all(found is not None and found.book in by_step for found in own)

    def close(self) -> None:
        """Takes every hook off."""
        parts = [handle for pair in self._around_parts.values() for handle in pair]
        for handle in (*self._around_model, *parts, *self._notes):
            handle.remove()

    def _around(self, module: nn.Module, enter: Callable[..., None]) -> Sequence[RemovableHandle]:
        return (
            module.register_forward_pre_hook(Hook(enter), with_kwargs=True, prepend=True),
            module.register_forward_hook(Hook(self._leave), always_call=True),
        )

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._enter()
        self._watcher.begin_pass(module, args, kwargs, inside=False)

    def _enter_part(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._enter()
        if not torch.is_grad_enabled():
            return
        self._layer_calls += bool(own_parameters(module))
        if self._depth.value == 1:  # called by itself, not from within the model
            self._called_alone.add(module)
            self.loop_calls_parts = self.loop_calls_parts or current_backward() < 0
            self._watcher.begin_pass(module, args, kwargs, inside=True)

    def _enter(self) -> None:
        self._depth.value += 1
        if self._depth.value == 1:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._depth.value == 0:
            return  # the call was broken off before it was entered
        self._depth.value -= 1
        if self._depth.value == 0:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._find.recent.clear()


class LayerHooks:
    """Sees the calls of plain layers, by a forward hook on each."""

    is_inside = False

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        find: Finder,
        watcher: Watcher,
        guard: Guard,
        notes: Iterable[RemovableHandle],
    ) -> None:
        self._find, self._watcher, self._guard = find, watcher, guard
        self._sites: dict[nn.Module, tuple[object, Site]] = {}
        """The site of each layer whose keys are its inputs, with what it depends on."""
        begin = Hook(watcher.begin_pass, inside=False)
        self._handles = [
            *notes,
            model.register_forward_pre_hook(begin, with_kwargs=True),
            *(
                layer.register_forward_hook(
                    Hook(self._see, own_parameters(layer)),
                    prepend=True,  # before hooks that give another output
                )
                for layer in layers
            ),
        ]

    def narrowed(self, uses: int, by_step: Collection[str]) -> CallSource:
        """Itself: nothing is cheaper."""
        return self

    def close(self) -> None:
        """Takes every hook off."""
        for handle in self._handles:
            handle.remove()

    def _see(self, own: Own, layer: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        """A layer that has its `own` parameters was called."""
        if self._guard.failure is not None:
            self._guard.after_failure()
        elif args:
            use = None
            try:
                use = self._use(own, layer, args[0], out)
            except Exception as error:
                self._guard.caught(FORWARD, error)
            if use is not None:
                self._watcher.see(use)

    def _use(self, own: Own, layer: nn.Module, x: Any, out: Tensor) -> Seen | None:
        """The use of a layer; its site is that of the last call, as long as that holds."""
        weight, bias = own["weight"], own["bias"]
        if weight is None or not weight.requires_grad or self._find.labels:
            return use_of(self._find, layer, weight, bias, x, out)
        trained: tuple[Any, ...] = (id(weight), id(bias), bias is not None and bias.requires_grad)
        if depends_on_shape(layer):
            trained = (*trained, x.shape[1:])
        known = self._sites.get(layer)
        if known is not None and known[0] == trained and isinstance(x, Tensor):
            return Use(known[1], (out,), x)
        use = use_of(self._find, layer, weight, bias, x, out)
        if isinstance(use, Use) and use.key is x and use.value is None:
            self._sites[layer] = (trained, use.site)
        return use
