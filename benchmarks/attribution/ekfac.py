"""EK-FAC from the ledger's rows, to compare `run.influence` with: no query is asked this way.

The samples' gradients are taken as training last saw them. In the eigenbases of `E[a aᵀ]` and
`E[b bᵀ]` the Fisher matrix of a layer is nearly diagonal; its diagonal is the mean square of the
samples' gradients in that basis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dualform.ledger import Book
from dualform.memory.blocks import Sides, matrix_shape
from dualform.memory.forms import form_named
from dualform.memory.shared import AnySides
from dualform.read import Run
from dualform.read.contributions import Source
from dualform.read.engine import ShardRange
from dualform.read.explain import ends, query_batches
from dualform.read.grouping import BySample
from dualform.read.influence import gradients_at
from dualform.read.samples_matrix.matrix import SamplesMatrix
from dualform.read.scan import chunks, row_sides
from dualform.read.scores import Array
from dualform.read.step_gradients import streams_of
from dualform.read.targets import Asked, Parameters, Target

Bases = tuple[Tensor | None, Tensor | None]
"""Of both sides of a book's rows; None where a side is left as it is."""


def ekfac(run: Run, model: nn.Module, x: Any, target: Target, damping: float = 0.1) -> Array:
    """(samples, queries): how much the target would fall without each sample.

    Args:
        damping: in units of the mean of the diagonal, book by book.
    """
    source, asked = run.source, Asked(model, x, target)
    matrix = SamplesMatrix(source.accounting, BySample(source.numbers)).of_last_visits()
    bases = {book.name: eigenbases(source, book) for book in matrix.books}
    _, point = ends(model, source)
    parts = [
        solved(matrix, bases, gradients_at(asked, point, queries), damping)
        for queries in query_batches(asked, source)
    ]
    return torch.cat(parts, 1).numpy()


def solved(
    matrix: SamplesMatrix, bases: dict[str, Bases], directions: Parameters, damping: float
) -> Tensor:
    """(samples, directions): `C (Λ + λ)⁻¹ g` in the eigenbases."""
    count = len(next(iter(directions.values())))
    total = torch.zeros(matrix.groups, count, dtype=torch.float64)
    for book in matrix.books:
        whole, (on_a, on_b) = matrix.whole(book), bases[book.name]
        square = torch.zeros(whole.region.shape)
        for columns in matrix.blocks([whole]):
            square += turned(columns.dense(), on_a, on_b).square().sum(0).cpu() / matrix.groups
        size = (square + damping * float(square.mean(dtype=torch.float64))).clamp_min(1e-30)
        asked = turned(whole.matrices(directions[book.name]), on_a, on_b).cpu() / size
        for columns in matrix.blocks([whole]):
            found = turned(columns.dense(), on_a, on_b).flatten(1).cpu()
            total[columns.groups] += (found @ asked.flatten(1).T.to(found)).double()
    return total


def turned(matrices: Tensor, on_a: Tensor | None, on_b: Tensor | None) -> Tensor:
    """`Uᵀ M V` for each matrix."""
    if on_a is not None:
        matrices = on_a.T.to(matrices) @ matrices
    return matrices if on_b is None else matrices @ on_b.to(matrices)


def eigenbases(source: Source, book: Book) -> Bases:
    """Of the rows that samples left when they were last seen."""
    terms = list(book.terms.values())
    shapes = {matrix_shape(book.shape, term.view, term.groups) for term in terms}
    plain = all(term.at == (0, 0) and term.groups == 1 for term in terms)
    if not plain or len(shapes) > 1 or not all(form_named(t.form).has_sides for t in terms):
        return None, None
    ((height, width),) = shapes
    on_a = torch.zeros(height, height, dtype=torch.float64)
    on_b = torch.zeros(width, width, dtype=torch.float64)
    for sides in last_rows(source, book):
        if not isinstance(sides, Sides) or sides.a.shape[1] != height:
            return None, None  # rows without sides of their own, or of a part of the matrix
        on_a += (sides.a.T @ sides.a).double().cpu()
        if sides.b is not None:
            on_b += (sides.b.T @ sides.b).double().cpu()
    has_b = any(form_named(term.form).is_product for term in terms)
    return torch.linalg.eigh(on_a).eigenvectors, torch.linalg.eigh(on_b)[1] if has_b else None


def last_rows(source: Source, book: Book) -> Iterator[AnySides]:
    """A book's rows of the last step that saw their sample, chunk by chunk."""
    shards = ShardRange.of(source.ledger, 1, source.until)
    for stream in streams_of(source.ledger, book):
        last = torch.zeros(len(source.numbers), dtype=torch.long)
        for shard in shards:
            for chunk in chunks(shard, stream):
                place = torch.searchsorted(source.numbers, chunk.samples.long())
                last.scatter_reduce_(0, place, chunk.steps, "amax")
        for shard in shards:
            for chunk in chunks(shard, stream):
                place = torch.searchsorted(source.numbers, chunk.samples.long())
                yield row_sides(chunk, book.terms[stream.name])[chunk.steps == last[place]]
