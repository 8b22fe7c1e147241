"""The hooks: what a training step leaves behind, at the least possible cost to it.

Nothing is computed or copied here that can wait for the writer's thread. A layer's input and the
error at its output are kept by reference; only inputs that come from outside the graph are copied,
because a data loader may reuse their memory (autograd guards the others until the backward pass).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualform.errors import RecordingError, SampleIdsError
from dualform.ledger.samples import SampleId
from dualform.record.plan import Source


@dataclass(slots=True)
class Batch:
    """One forward pass: whose samples its rows are. Without ids they are numbered in order."""

    number: int
    ids: Tensor | Sequence[SampleId] | None
    size: int = 0
    step: int = 0

    def begin(self, layer: str, x: Tensor) -> None:
        """Takes the size from the first layer that sees the batch, and holds the ids to it."""
        if self.ids is None:
            self.size = x.shape[0] if x.ndim > 1 else 1
        elif len(self.ids) in x.shape[: min(x.ndim - 1, 2)]:
            self.size = len(self.ids)
        else:
            raise SampleIdsError(
                f"recorder.samples got {len(self.ids)} ids, but layer '{layer}' sees a batch of "
                f"shape {tuple(x.shape)}; give one id for each sample of the batch."
            )


@dataclass(slots=True)
class Capture:
    """One use of a layer that took part in a backward pass."""

    source: int
    batch: Batch
    x: Tensor
    error: Tensor


class Watch:
    """Hooks on a model's layers; collects the captures of the step under way."""

    def __init__(self, model: nn.Module, sources: Sequence[Source]) -> None:
        self.captures: list[Capture] = []
        self._sources = sources
        self._batches = 0
        self._batch: Batch | None = None
        self._named = False
        self._step = 0
        self._handles: dict[int, RemovableHandle] = {
            index: source.module.register_forward_hook(
                self._forward_hook(index, source), with_kwargs=True
            )
            for index, source in enumerate(sources)
        }
        self._handles[-1] = model.register_forward_pre_hook(self._begin_forward)

    def samples(self, ids: Tensor | Sequence[SampleId]) -> None:
        """Names the samples of the next forward pass."""
        self._named = True
        self._new_batch(ids.clone() if isinstance(ids, Tensor) else list(ids))

    def take(self) -> list[Capture]:
        """The captures since the last call; the step is over."""
        captures, self.captures = self.captures, []
        self._step += 1
        if not self._named:
            self._batch = None
        return captures

    def drop(self, sources: Sequence[int]) -> None:
        """Stops watching some layers."""
        for index in sources:
            self._handles.pop(index).remove()
        self.captures = [c for c in self.captures if c.source not in sources]

    def close(self) -> None:
        """Takes every hook off."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def _new_batch(self, ids: Tensor | Sequence[SampleId] | None) -> Batch:
        self._batches += 1
        self._batch = Batch(self._batches, ids, step=self._step)
        return self._batch

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not self._named:
            self._new_batch(None)
        elif self._batch is None or self._batch.step != self._step:
            raise RecordingError(
                "recorder.samples(ids) named the samples of earlier steps, but not of this one; "
                "call it before every forward pass that trains."
            )

    def _forward_hook(self, index: int, source: Source) -> Callable[..., None]:
        layer = source.stream.name
        trained = [getattr(source.module, name) for name in source.kind.shape(source.module).forms]
        first, last = trained[0], trained[-1]

        def forward(
            module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: Tensor
        ) -> None:
            if not out.requires_grad or not (first.requires_grad or last.requires_grad):
                return
            x = args[0] if args else kwargs["input"]
            batch = self._batch or self._new_batch(None)
            if not batch.size:
                batch.begin(layer, x)
            kept = x.detach() if x.grad_fn is not None else x.detach().clone()

            def backward(errors: Sequence[Tensor]) -> None:
                self.captures.append(Capture(index, batch, kept, errors[0]))

            if out.grad_fn is not None:
                out.grad_fn.register_prehook(backward)

        return forward
