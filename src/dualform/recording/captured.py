"""Recording a compiled model: calls that cannot be seen leave their records through taps.

The first steps run as the model was written, and show which calls can be tapped (`learning.py`,
`taps.py`). Once every weight has its bases, `CompiledCalls` takes over. From then on
the model is compiled with its taps, no call is seen any more, and each forward pass has probes of
its own, whose gradients are read before the optimizer's step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dualform.errors import RecorderFailedError
from dualform.layers import tensors_in
from dualform.owners import Batch
from dualform.private import (
    before_compile,
    compiled_call,
    compiled_like,
    compiler_error,
    set_compiled_call,
)
from dualform.recording.captured_sites import BundledSites, CapturedSite
from dualform.recording.guard import FORWARD, Guard
from dualform.recording.streams import RowWriter
from dualform.recording.taps import (
    TAPS,
    Capture,
    Taps,
)

KEPT = 2
"""A forward pass is waited for in so many steps: its backward pass may come late."""


class PassWatcher(Protocol):
    """Who is told of forward passes of a compiled model."""

    def begin_captured(self, args: Any, kwargs: Any) -> Batch | None:
        """A forward pass begins: its batch."""


class Pass(NamedTuple):
    """A forward pass whose records come, or came, with its backward pass."""

    step: int
    batch: Batch
    probes: list[Tensor]


class _Depth(threading.local):
    value = 0


class CompiledCalls:
    """Gives the passes of a compiled model their probes, and reads them."""

    def __init__(
        self, model: nn.Module, sites: Sequence[CapturedSite], watcher: PassWatcher, guard: Guard
    ) -> None:
        self._model, self._sites, self._watcher, self._guard = model, sites, watcher, guard
        self._bundled = BundledSites(sites)
        self._mode, self._depth = Capture(), _Depth()
        self._passes: list[Pass] = []
        self._largest, self._longest = 0, 0
        """The most samples of a batch, and the most numbers that a sample was given as."""
        for site in sites:
            taps = getattr(site.parameter, TAPS, None)
            if taps is None:
                taps = Taps()
                setattr(site.parameter, TAPS, taps)
            taps[site.kind] = site.tap
        self._wraps = before_compile(model) is not model
        self._inner: Any = model.forward if self._wraps else compiled_call(model)
        self._tapped = self._compile_tapped() if self._wraps else self._run_tapped
        self._put(self._call)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call of the model, whose hooks stay until it ends."""
        return self._depth.value > 0

    def narrowed(self, uses: int, by_step: Collection[str]) -> CompiledCalls:
        """Itself: nothing is cheaper."""
        return self

    def close(self) -> None:
        """Takes everything off the model."""
        self._put(self._inner)
        self._passes.clear()
        for site in self._sites:
            if hasattr(site.parameter, TAPS):
                delattr(site.parameter, TAPS)

    def collect(self, rows: RowWriter) -> None:
        """Writes the records that backward passes have left since it was called last."""
        for one in self._passes:
            self._bundled.write(one.probes, one.batch, rows)
            for site, probe in zip(self._sites, one.probes, strict=True):
                if probe.grad is not None:
                    site.write(probe.grad, one.batch, rows)
                    probe.grad = None
        first = rows.step - KEPT
        if self._passes and self._passes[0].step < first:
            self._passes = [one for one in self._passes if one.step >= first]

    def _put(self, call: Any) -> None:
        """Has the model run a function when it is called."""
        if self._wraps:
            self._model.forward = call
        else:
            set_compiled_call(self._model, call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled model, tapped where gradients are wanted.

        All else that torch has compiled runs as it was written, such as the optimizer's step: our
        hooks on it must not be compiled.
        """
        depth = self._depth
        with torch.compiler.set_stance("default"):
            if depth.value or not torch.is_grad_enabled() or not self._begin(args, kwargs):
                return self._inner(*args, **kwargs)
            depth.value = 1
            try:
                return self._tapped(*args, **kwargs)
            except compiler_error() as error:
                first = str(error).strip().partition("\n")[0]
                problem = f"torch cannot compile the model together with what records it: {first}"
                self._guard.caught(FORWARD, RecorderFailedError(problem))
            finally:
                depth.value = 0
            return self._inner(*args, **kwargs)

    def _run_tapped(self, *args: Any, **kwargs: Any) -> Any:
        with self._mode:
            return self._inner(*args, **kwargs)

    def _compile_tapped(self) -> Callable[..., Any]:
        """The model with its taps, compiled as the model was.

        The compiler sees how the mode is entered. So it is not there when the compiled code runs,
        where it would cost a call for each function of torch.
        """
        model, mode = before_compile(self._model), self._mode

        def tapped(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return model(*args, **kwargs)

        return compiled_like(self._model, tapped)

    def _begin(self, args: Any, kwargs: Any) -> bool:
        """Gives a forward pass its probes; whether it is recorded."""
        if self._guard.failure is not None:
            self._guard.after_failure()
            return False
        try:
            batch = self._watcher.begin_captured(args, kwargs)
            if batch is None or batch.size < 1:
                return False
            self._make_room(batch.size, tensors_in((args, kwargs)))
            probes = [site.new_probe(self._largest) for site in self._sites]
            self._mode.count = torch.empty(batch.size, 0, device="cpu")
            self._passes.append(Pass(batch.step, batch, probes))
        except Exception as error:
            self._guard.caught(FORWARD, error)
            return False
        return True

    def _make_room(self, samples: int, given: Iterable[Tensor]) -> None:
        """Larger batches and longer samples need larger probes, with which torch compiles anew."""
        self._largest = max(self._largest, samples)
        length = max((tensor.numel() for tensor in given), default=1) // samples
        if self._longest and length > self._longest:
            factor = -(-length // self._longest)
            for site in self._sites:
                site.grow(factor)
            length = factor * self._longest
        self._longest = max(self._longest, length)
