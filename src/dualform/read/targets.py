"""Targets: the number that is asked about, one for each query.

A target is the model's output for a class, a function of the output, or a loss with labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dualform.errors import ReadingError
from dualform.layers import first_tensor
from dualform.private import BATCH_NORM, DROPOUT, tree_flatten, tree_map, tree_unflatten
from dualform.read.queries import arguments
from dualform.read.query_axis import query_axis, select

Parameters: TypeAlias = Mapping[str, Tensor]
Target: TypeAlias = (
    int
    | Sequence[int]
    | Tensor
    | Callable[[Any], Tensor]
    | tuple[Callable[..., Tensor], Any]
    | None
)
"""A class for all queries or one each; a function of one query's output; a loss and its labels."""

TOGETHER = 128
"""How many queries the model is called with at a time."""


class Asked:
    """Some queries, and the number that is asked of each.

    >>> asked = Asked(nn.Linear(3, 2), torch.ones(4, 3), target=1)
    >>> asked.values({}).shape, asked.names[0]
    (torch.Size([4]), '0: output 1')
    """

    def __init__(self, model: nn.Module, x: Any, target: Target = None) -> None:
        _refuse_random(model)
        _refuse_changing(model)
        given = first_tensor(x)
        if given is None or not given.numel():
            held = "no tensor" if given is None else f"one of shape {tuple(given.shape)}"
            raise ReadingError(
                f"x must hold queries as a tensor, at least one; it holds {held}. "
                "torch.as_tensor(x) makes one of an array."
            )
        self.model = model
        args = arguments(x)
        self._x, self._arguments = tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (x, args)
        )
        self.axis = query_axis(model, self._x)
        """Which dimension of x counts the queries."""
        self.count = int(given.shape[self.axis])
        self._chosen: tuple[list[int], Any] = ([], ((), {}))
        self._together = TOGETHER
        self._target, self._labels, asked = self._read(target)
        self.names = [f"{query}: {words}" for query, words in enumerate(asked)]
        self._together = TOGETHER if self._separable() else 1

    def batches(self, queries: Sequence[int]) -> list[Sequence[int]]:
        """The queries in parts that the model is called with."""
        size = self._together
        return [queries[at : at + size] for at in range(0, len(queries), size)]

    def inputs(self, queries: Sequence[int]) -> Any:
        """Some queries, in the form of x."""
        return select(self._x, self.axis, self.count, torch.tensor(queries))

    def output(self, call: Callable[..., Any], queries: Sequence[int], within: Any = None) -> Any:
        """What the model gives for some queries, called within a context if there is one."""
        if self._chosen[0] != list(queries):  # a path asks the same at each of its points
            chosen = select(self._arguments, self.axis, self.count, torch.tensor(queries))
            self._chosen = (list(queries), chosen)
        args, kwargs = self._chosen[1]
        with nullcontext() if within is None else within:
            return call(*args, **kwargs)

    def numbers(
        self, call: Callable[..., Any], queries: Sequence[int], within: Any = None
    ) -> Tensor:
        """(queries,): the numbers asked about, from what the model gives (see `output`)."""
        parts = _split(self.output(call, queries, within), len(queries), self.axis)
        return torch.stack([self._number(*pair) for pair in zip(parts, queries, strict=True)])

    def values(self, parameters: Parameters, queries: Sequence[int] | None = None) -> Tensor:
        """(queries,): the numbers asked about, with these parameters in place of the model's."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self.model, dict(parameters), args, kwargs)

        chosen = range(self.count) if queries is None else queries
        with torch.no_grad():
            parts = [self.numbers(call, batch) for batch in self.batches(chosen)]
        return torch.cat(parts).double().cpu()

    def _number(self, output: Any, query: int) -> Tensor:
        """One query's number; its output has a batch of one."""
        labels = () if self._labels is None else (self._labels[query : query + 1],)
        value = self._target(output, *labels)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ReadingError(
                f"the target must be one number for each query; it gave {shape} for one query, "
                "whose output has a batch of 1. Sum or choose: target=lambda out: out[0, 3]."
            )
        return value.reshape(())

    def _separable(self) -> bool:
        """Whether queries that are asked together get the numbers they get alone.

        They do not where the target is a mean over the batch, or an output cannot be split.
        """
        some = range(min(3, self.count))
        alone = [self.values({}, [query]) for query in some]
        wide = any(p.dtype in (torch.float32, torch.float64) for p in self.model.parameters())
        tolerance = 1e-4 if wide else 3e-2
        return torch.allclose(self.values({}, some), torch.cat(alone), tolerance, tolerance)

    def _read(self, target: Target) -> tuple[Callable[..., Tensor], Tensor | None, list[str]]:
        """The function of output (and labels), the labels, and the target in words."""
        if isinstance(target, tuple) and len(target) == 2 and callable(target[0]):
            loss, labels = target[0], torch.as_tensor(target[1])
            self._check_length(labels, "labels")
            return loss, labels, ["loss"] * self.count
        if callable(target):
            return target, None, ["target"] * self.count
        classes = self._classes(target)
        return _class_output, classes, [f"output {c}" for c in classes.tolist()]

    def _classes(self, target: Any) -> Tensor:
        asked = range(self.count) if target is None else range(1)
        with torch.no_grad():
            found = [_outputs(self.output(self.model, b)) for b in self.batches(asked)]
        if sum(map(len, found)) != len(asked):
            raise ReadingError(
                f"called with {len(asked)} of x's dimension {self.axis}, the model gives "
                f"{sum(map(len, found))} outputs: that dimension is taken for the queries"
                + (", since its layers take time first" if self.axis else "")
                + "; give x in that order, or a function of one query's output as target."
            )
        if target is None:
            return torch.cat(found).argmax(1).cpu()
        width, classes = found[0].shape[1], _integers(target)
        if classes.ndim == 0:
            classes = classes.expand(self.count)
        self._check_length(classes, "classes")
        if (
            classes.is_floating_point()
            or classes.ndim != 1
            or bool((classes < 0).any() or (classes >= width).any())
        ):
            raise ReadingError(
                f"target={target!r}: the model has outputs 0 to {width - 1}; give one for all "
                "queries, one for each, a function of the output, or (loss, labels)."
            )
        return classes.long()

    def _check_length(self, given: Tensor, what: str) -> None:
        if given.shape[:1] != (self.count,):
            raise ReadingError(
                f"got {what} of shape {tuple(given.shape)} for {self.count} queries; give one for "
                "each query."
            )


def _integers(target: Any) -> Tensor:
    try:
        return torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ReadingError(
            f"target={target!r}: give a class (an integer) for all queries, one for each, a "
            "function of the output, or (loss, labels)."
        ) from error


def _length(leaf: Any, axis: int) -> int | None:
    return leaf.shape[axis] if isinstance(leaf, Tensor) and leaf.ndim > axis else None


def _split(output: Any, count: int, axis: int) -> list[Any]:
    """The output of each query, as if the model had been called with it alone."""

    def split(leaf: Any) -> Sequence[Any]:
        sequences = isinstance(leaf, Tensor) and leaf.ndim > 2
        for dimension in (axis, 0) if sequences else (0, axis):
            if _length(leaf, dimension) == count:
                return torch.split(leaf, 1, dimension)
        holds = not isinstance(leaf, Tensor) and getattr(leaf, "__dict__", None)
        return _split_object(leaf, count, axis) if holds else [leaf] * count

    leaves, tree = tree_flatten(output)
    parts = zip(*map(split, leaves), strict=True)
    return [tree_unflatten(list(part), tree) for part in parts]


def _split_object(output: Any, count: int, axis: int) -> list[Any]:
    """The same for an object of any class, by its attributes."""
    parts = [copy.copy(output) for _ in range(count)]
    for part, attributes in zip(parts, _split(vars(output), count, axis), strict=True):
        vars(part).update(attributes)
    return parts


def _outputs(output: Any) -> Tensor:
    """(queries, classes); transformers' models call it logits."""
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor) or found.ndim != 2:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ReadingError(
            f"a class is asked for, but the model gives {shape} and not (queries, classes); give "
            "x as a batch, or a function of one query's output: target=lambda out: out[0, -1, 3]."
        )
    return found


def _class_output(output: Any, label: Tensor) -> Tensor:
    found = _outputs(output)
    return found.gather(1, label[:, None].to(found.device))


def _refuse_random(model: nn.Module) -> None:
    """What a model gives in training mode is random, or depends on the other queries."""
    for name, module in model.named_modules():
        rate = getattr(module, "p" if isinstance(module, DROPOUT) else "dropout", 0)
        drops = isinstance(rate, float) and rate > 0
        if module.training and (drops or isinstance(module, BATCH_NORM)):
            raise ReadingError(
                f"the model is in training mode, and '{name}' ({type(module).__name__}) makes its "
                "output random or dependent on the batch; call model.eval() first."
            )


def _refuse_changing(model: nn.Module) -> None:
    """What changes its weights when it is called has no derivative, and would not be left as is."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ReadingError(
                f"'{name}' ({type(module).__name__}) has max_norm={module.max_norm}: it changes "
                "its weights whenever it is called, and its output cannot be differentiated; limit "
                "its rows after optimizer.step() instead."
            )
