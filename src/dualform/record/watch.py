"""The hooks: what a training step leaves behind, at the least possible cost to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualform.errors import RecordingError
from dualform.ledger.samples import SampleId, check_ids
from dualform.record.plan import Source
from dualform.record.tape import Batch, Page, Pool, Tape


class Watch:
    """Hooks on a model's layers; backward passes write to one tape a layer."""

    def __init__(self, model: nn.Module, sources: Sequence[Source], step: int) -> None:
        self.pool = Pool()
        self.step = step
        """The step under way."""
        self.bytes = 0
        """How much has been written since `take`."""
        self._tapes = [Tape(self.pool) for _ in sources]
        self._batches = 0
        self._batch: Batch | None = None
        self._named = False
        self._root = model.register_forward_pre_hook(self._begin_forward)
        self._handles: dict[int, RemovableHandle] = {
            index: source.module.register_forward_hook(self._forward_hook(index, source))
            for index, source in enumerate(sources)
        }

    def samples(self, ids: Tensor | Sequence[SampleId]) -> None:
        """Names the samples of the next forward pass."""
        ids = ids.clone() if isinstance(ids, Tensor) else list(ids)
        check_ids(ids)
        self._named = True
        self._new_batch(ids)

    def end_step(self) -> None:
        """The optimizer has stepped; what comes belongs to the next step."""
        self.step += 1
        if not self._named:
            self._batch = None

    def peek(self) -> dict[int, list[Page]]:
        """The pages of each layer, without taking them."""
        return {index: tape.pages for index, tape in enumerate(self._tapes)}

    def take(self) -> dict[int, list[Page]]:
        """The pages of each layer; `pool.give_back` them once they are written.

        Rows of the step under way (a checkpoint between backward and step) move to new pages.
        """
        self.bytes = 0
        taken = {index: tape.take() for index, tape in enumerate(self._tapes)}
        for index, pages in taken.items():
            for page in pages:
                for at, (step, batch) in enumerate(page.marks):
                    if step == self.step:
                        x, error = page.key_slots[at], page.value_slots[at]
                        self.bytes += self._tapes[index].write(step, batch, x, error)
        return taken

    def drop(self, sources: Sequence[int]) -> None:
        """Stops watching some layers."""
        for index in sources:
            if index in self._handles:
                self._handles.pop(index).remove()

    def close(self) -> None:
        """Takes every hook off."""
        for handle in (self._root, *self._handles.values()):
            handle.remove()

    def _new_batch(self, ids: Tensor | Sequence[SampleId] | None) -> Batch:
        self._batches += 1
        self._batch = Batch(self._batches, ids, self.step)
        return self._batch

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._named:
            self._named_batch()
        else:
            self._new_batch(None)

    def _named_batch(self) -> Batch:
        if self._batch is None or self._batch.step != self.step:
            raise RecordingError(
                "recorder.samples(ids) named the samples of earlier steps, but not of this one; "
                "call it before every forward pass that trains, and validate under torch.no_grad()."
            )
        return self._batch

    def _forward_hook(self, index: int, source: Source) -> Callable[..., None]:
        layer, tape = source.stream.name, self._tapes[index]
        trained = [getattr(source.module, name) for name in source.kind.shape(source.module).forms]
        first, last = trained[0], trained[-1]

        def forward(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            node = out.grad_fn
            if node is None or not args or not (first.requires_grad or last.requires_grad):
                return  # a call by keyword leaves no rows: the probe will tell
            x = args[0]
            batch = self._named_batch() if self._named else self._batch or self._new_batch(None)
            if not batch.size:
                batch.begin(layer, x)

            def backward(errors: Sequence[Tensor]) -> None:
                self.bytes += tape.write(self.step, batch, x, errors[0])

            node.register_prehook(backward)

        return forward
