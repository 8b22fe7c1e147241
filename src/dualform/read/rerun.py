"""Running samples again on a copy of the model, to see the rows that they left in training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dualform.errors import ReadingError
from dualform.layers import (
    Finder,
    RowCollector,
    SampleRows,
    kinds,
    packing_order,
    shared_labels,
    usual_axis,
)
from dualform.ledger import Ledger
from dualform.ledger.samples import SampleId
from dualform.private import before_compile, may_have_compiled
from dualform.read.gradients import differentiable
from dualform.read.queries import check_shapes, stream_of

Loss: TypeAlias = Callable[[nn.Module, list[SampleId]], Tensor]
"""Calls a model on the samples with some ids, as training did, and gives their loss."""


class Rerun:
    """Runs the loss of one sample at a time, with any weights; the user's model stays as it is.

    The copy is in the modes of the model, and is not compiled.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> rerun = Rerun(model, lambda net, ids: net(x[ids]).square().sum(), Ledger(run.path))
    >>> {layer: [rows.keys.shape for rows in found] for layer, found in rerun(3, {}).items()}
    {'2': [torch.Size([1, 5])], '0': [torch.Size([1, 4])]}
    """

    def __init__(self, model: nn.Module, loss: Loss, ledger: Ledger) -> None:
        self._given = before_compile(model) if isinstance(model, nn.Module) else model
        check_shapes(self._given, ledger)
        if not callable(loss):
            raise ReadingError(
                f"the loss is of type {type(loss).__name__}; give a function of a model and a list "
                "of ids: loss=lambda model, ids: F.cross_entropy(model(x[ids]), y[ids])."
            )
        self._loss, self._ledger = loss, ledger
        self._model = copy.deepcopy(self._given)
        known = dict(self._model.named_parameters())
        books = [book.name for book in ledger.info.books]
        find = Finder({name: known[name].requires_grad_() for name in books})
        packing_order(self._model, find)
        shared_labels(self._model, find)
        self._collector = RowCollector(find, kinds(), usual_axis(self._model))

    def __call__(
        self, sample: SampleId, weights: Mapping[str, Tensor]
    ) -> dict[str, list[SampleRows]]:
        """The rows that a sample's loss leaves at some weights: those of each call, by layer."""
        self._load(weights)
        with (
            _same_random_numbers(self._model),
            _without_gradients(self._given),
            _uncompiled(),
            self._collector.rows_of(1) as found,
        ):
            with differentiable(), self._collector:
                value = self._loss(self._model, [sample])
            self._differentiate(value, sample)
        by_layer: dict[str, list[SampleRows]] = {}
        for rows in found:
            stream = stream_of(rows.site, rows.record, self._ledger)
            if stream is not None:
                by_layer.setdefault(stream.name, []).append(rows)
        return by_layer

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor]) -> None:
        self._model.zero_grad()
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            if name in weights:
                tensor.copy_(weights[name])

    def _differentiate(self, value: Any, sample: SampleId) -> None:
        if not isinstance(value, Tensor) or value.numel() != 1:
            is_tensor = isinstance(value, Tensor)
            held = f"shape {tuple(value.shape)}" if is_tensor else f"type {type(value).__name__}"
            raise ReadingError(
                f"the loss of sample {sample!r} is of {held}; give one number: "
                "loss=lambda model, ids: F.cross_entropy(model(x[ids]), y[ids])."
            )
        if value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]  # reentrant checkpoints need it
        if all(parameter.grad is None for parameter in self._model.parameters()):
            raise ReadingError(
                f"the loss of sample {sample!r} does not depend on the parameters of the model "
                "that it is called with. Call that model, a copy of yours with the weights of "
                "training, and no other: loss=lambda model, ids: …; detach nothing."
            )


@contextmanager
def _same_random_numbers(model: nn.Module) -> Iterator[None]:
    """Puts torch's random states back to where they were."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)):
        yield


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Keeps the gradients of a model as they are, also if a loss runs it by mistake."""
    parameters = list(model.parameters())
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Runs what is compiled as it was written: only so its calls can be seen."""
    if not may_have_compiled():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
