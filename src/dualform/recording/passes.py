"""Forward and backward passes: whose samples a call belongs to, and what a pass comes to."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from dualform.ledger.samples import SampleId
from dualform.owners import Batch, Trial
from dualform.private import current_backward, will_execute


class Batches:
    """The batch that each call belongs to: one for every forward pass of the whole model."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._count = 0
        self._batch: Batch | None = None
        self._named = False
        self._pending: list[Batch] = []
        """Those begun since the last backward pass."""
        self._arrived: Batch | None = None
        """The one whose errors came last, in a backward pass after the last forward pass."""

    def name(self, ids: Tensor | Sequence[SampleId]) -> None:
        """The samples of the forward passes to come in this step."""
        self._named, self._arrived = True, None
        self._pending.append(self._new(ids))

    def end_step(self) -> None:
        """The optimizer has stepped."""
        self._step += 1
        self._pending, self._arrived = [], None
        if not self._named:
            self._batch = None

    def begin(self, given: Iterable[Tensor]) -> Batch | None:
        """A forward pass of the whole model begins, given these tensors: its batch, if new."""
        again = current_backward() >= 0  # by checkpointing
        if again and self._named:
            return None
        batch = self._next()
        self._arrived = batch if again else None
        batch.begin(tensor.shape for tensor in given)
        return None if again else batch

    def begin_inside(self, given: Sequence[Tensor]) -> Batch | None:
        """The same for a part of the model that the loop calls by itself."""
        if current_backward() >= 0 or not given:
            return None
        batch = self._current()
        if batch.size < 0:
            batch.begin_inside(given[0].shape)
        return batch

    def part(self, whole: Batch, owners: Tensor) -> Batch:
        """A batch of single rows, each of which belongs to one sample of a whole one."""
        samples = whole.sample_of()
        first = torch.zeros_like(samples)
        first[samples.flip(0)] = torch.arange(len(samples), device="cpu").flip(0)
        self._count += 1
        batch = Batch(self._count, None, whole.step, len(owners))
        batch.whole, batch.places = whole, first[owners]
        return batch

    def of_call(self) -> Batch | None:
        """The batch that a call now belongs to; None where that cannot be known.

        In a backward pass checkpointing makes calls again: those of the batch whose errors came
        last, or of the only one there is.
        """
        if current_backward() < 0:
            return self._current()
        if self._arrived is None and len(self._pending) == 1:
            self._arrived = self._pending[0]
        return self._arrived

    def arrive(self, batch: Batch) -> None:
        """Errors of a batch have come, in the backward pass that is running."""
        self._arrived = batch
        self._pending.clear()

    def _next(self) -> Batch:
        batch = self._current()
        if self._named:
            return batch if batch.size < 0 else self._new(batch.ids)
        if batch.begun:
            batch = self._new(None)
        self._pending.append(batch)
        return batch

    def _current(self) -> Batch:
        """Ids are for their own step only."""
        batch = self._batch
        if batch is None or (self._named and batch.step != self._step):
            return self._new(None)
        return batch

    def _new(self, ids: Tensor | Sequence[SampleId] | None) -> Batch:
        self._count += 1
        self._batch = Batch(self._count, ids, self._step)
        return self._batch


class Here(threading.local):
    """How deep in calls of the model a thread is: another may be evaluating it meanwhile."""

    depth = 0
    trial: Trial | None = None
    """The experiment that the forward pass is."""


class Reached:
    """Whether a backward pass will add to a parameter's gradient, or only passes by.

    The gradient of an input (`torch.autograd.grad(loss, x)`, an attack, a saliency map) passes by.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._nodes: dict[str, Node] = {}

    def __call__(self, books: Iterable[str]) -> bool:
        """Whether it adds to any of these."""
        for book in books:
            node = self._nodes.get(book) or self._find(book)
            try:
                if node is not None and will_execute(node):
                    return True
            except RuntimeError:  # torch.autograd.grad(loss, parameters): the loop may use it
                return True
        return False

    def _find(self, book: str) -> Node | None:
        """What adds to the parameter's gradient; it is there while the parameter is trained."""
        if not self._parameters[book].requires_grad:
            return None
        self._nodes[book] = get_gradient_edge(self._parameters[book]).node
        return self._nodes[book]
