"""What the training samples of each class have added: to the weights, and so to any output.

`W_T = c0 W_0 + Σ_c P_c + R_T`, where `P_c` is the sum of all rows of the samples of class c. One
scan of the ledger makes these sums; contributions of classes to many outputs then need no other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dualform.ledger import Book, Stream
from dualform.read import Run
from dualform.read.engine import Fold, ShardRange
from dualform.read.explain import ends
from dualform.read.grouping import ByCell, Grouping
from dualform.read.scan import chunks, row_sides
from dualform.read.step_gradients import streams_of
from dualform.studies.linear_layers import layer_inputs, sensitivities

NODES = 64
"""At how many points of the line gradients are taken, at equal distances.

Where units switch, gradients jump: a rule of higher order would gain nothing.
"""


def by_group(run: Run, groups: Mapping[int, int]) -> ByCell:
    """Rows by the group of their sample; the groups are numbered from 0."""
    source = run.source
    lines = torch.tensor([groups[int(sample)] for sample in source.ids])
    bins = torch.zeros(run.steps + 1, dtype=torch.long)
    return ByCell(source.numbers, lines, bins, bins=1)


@dataclass(frozen=True)
class ClassParts:
    """What the samples of each class added to each parameter: (classes, *shape), in float64.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> parts = class_parts(run, {sample: sample % 2 for sample in range(8)})
    >>> change = run.state_dict()["0.weight"] - run.at(0).state_dict()["0.weight"]
    >>> bool((parts.books["0.weight"].sum(0) - change).abs().max() < 1e-6)
    True
    """

    books: Mapping[str, Tensor]

    def by_layer(self, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        """(queries, outputs, classes) for each linear layer: what classes add to each output.

        A layer is asked along the gradient of an output, given its input: its part of a class,
        applied to its input, moves the output by so much.
        """
        inputs = layer_inputs(model, x)
        with torch.no_grad():
            outputs = model(x[:1]).shape[1]
        every = (torch.full((len(x),), output) for output in range(outputs))
        directions = [sensitivities(model, x, output) for output in every]
        found = {}
        for layer, seen in inputs.items():
            weight, bias = self.books[f"{layer}.weight"], self.books[f"{layer}.bias"]
            moved = seen.cpu().to(weight) @ weight.mT + bias[:, None]
            along = torch.stack([one[layer] for one in directions]).to(weight)
            found[layer] = torch.einsum("cqi,oqi->qoc", moved, along)
        return found

    def through_network(self, run: Run, model: nn.Module, x: Tensor) -> Tensor:
        """(queries, outputs, classes): what `run.explain` says of classes, for all outputs at once.

        A class moved an output by `∫ ⟨∇f(W_0 + α (W_T − W_0)), P_c⟩ dα`. At each point of the line
        from the first weights to the last, that is what it adds by all layers together.
        """
        first, last = ends(model, run.source)
        here = copy.deepcopy(model)
        narrow = ClassParts({name: parts.float() for name, parts in self.books.items()})
        total = torch.zeros(())
        for node in range(NODES):
            alpha = (node + 0.5) / NODES
            point = {name: torch.lerp(first[name], last[name], alpha) for name in first}
            here.load_state_dict(point, strict=False)
            total = total + sum(part.double() for part in narrow.by_layer(here, x).values())
        return total / NODES


def class_parts(run: Run, groups: Mapping[int, int]) -> ClassParts:
    """Sums all rows by the class of their sample, in one scan for each parameter.

    Args:
        run: of an optimizer by which each step's rows count by one number, such as SGD.
        groups: the class of each training sample, numbered from 0.
    """
    accounting, grouping = run.source.accounting, by_group(run, groups)
    found = {}
    for book in run.info.books:
        numbers = accounting.numbers(book)
        fed_by = streams_of(accounting.ledger, book)
        fold = GroupParts(book, fed_by, numbers, grouping, accounting.device)
        found[book.name] = accounting.reader.reduce(fold, accounting.until)[:-1].cpu()
    return ClassParts(found)


@dataclass(frozen=True)
class GroupParts(Fold[Tensor]):
    """`Σ c a ⊗ b` over the rows of each group: (groups, *shape of the book), in float64."""

    book: Book
    fed_by: tuple[Stream, ...]
    numbers: Tensor
    """(T + 1,): the coefficient of a row by its step's number."""
    grouping: Grouping
    device: torch.device | str = "cpu"

    @property
    def streams(self) -> list[str]:
        """Those that feed the book."""
        return list(self.book.terms)

    def start(self) -> Tensor:
        """Zeros."""
        shape = (self.grouping.count, *self.book.shape)
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def fold(self, partial: Tensor, shard: ShardRange) -> Tensor:
        """Adds the rows of a shard to their groups."""
        for stream in self.fed_by:
            term = self.book.terms[stream.name]
            for chunk in chunks(shard, stream, self.device):
                order = torch.argsort(groups := self.grouping.of_chunk(chunk))
                counts = torch.bincount(groups, minlength=len(partial)).tolist()
                sides = row_sides(chunk, term)[order]
                numbers = self.numbers[chunk.steps][order]
                begin, slices = 0, []
                for count in counts:
                    slices.append(slice(begin, begin := begin + count))
                totals = sides.totals(slices, numbers, self.book.shape, term.view, term.groups)
                for into, total in zip(partial, totals, strict=True):
                    into += total
        return partial

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """The sum."""
        return one.add_(other)

    @property
    def partial_bytes(self) -> int:
        """Of all sums."""
        return 8 * self.grouping.count * self.book.size
