"""What is kept of each gradient: probes, taken just before the optimizer uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from dualform.ledger import Term
from dualform.memory.blocks import as_matrix, matrix_shape
from dualform.memory.forms import form_named
from dualform.memory.summary import Bases
from dualform.optimizers import Rule
from dualform.private import sparse_parts
from dualform.recording.bases import BookBases
from dualform.recording.pages import calls_are_dear
from dualform.recording.plan import Plan
from dualform.recording.probe import Look
from dualform.recording.shards import Portion, local

PROBED_ROWS = 128
"""Higher matrices are probed at so many neighboring rows, others after each hand-over."""
PROBED_COLUMN = 1 << 14
"""Parameters of one column are probed as a whole up to this size."""
ALL_PROBED = 8
"""In the first steps all books are probed."""
TURNS = 16
"""From then on, books that are summarized are probed once in so many steps, in turns."""
PROBE_NUMBERS = 32
"""A probe of fewer numbers could agree by accident: narrow matrices get several vectors."""


class GradientProbes:
    """Knows where and with what each gradient is probed, and probes it."""

    def __init__(self, plan: Plan, rule: Rule, bases: BookBases) -> None:
        self._plan, self._rule, self._bases = plan, rule, bases
        self.terms: dict[str, Term] = {}
        """The books that rows are known of, each with one of its terms."""
        self.looks: dict[str, Look] = {}
        """How each book that is kept by row is probed; steps hold it, so it is never changed."""
        self._vectors: dict[str, Tensor | None] = {}
        self._last_names: tuple[str, ...] = ()
        self._turn = 0

    def choose(self, books: Iterable[str]) -> None:
        """Probes these books from now on."""
        self.looks = {name: self.looks.get(name) or self._look(name) for name in books}

    def look_elsewhere(self) -> None:
        """Moves the probes of high matrices to other rows; those of summaries to new bases."""
        self._turn += 1
        self.looks = {name: self._look(name) for name in self.looks}

    def take(
        self, gradients: Mapping[str, Tensor], optimizer: Optimizer, step: int, in_turns: bool
    ) -> tuple[tuple[str, ...], Tensor]:
        """`u = G r` for matrices, columns as they are; all in one piece, with the books' names.

        Books that are summarized take turns: to multiply a gradient by two bases costs more than
        all else. Those that are probed say by what factor gradients were scaled. In a step of
        several passes there are no turns: if one pass was thrown away, each book must notice.
        """
        if in_turns and step > ALL_PROBED:
            summarized = [name for name in gradients if name in self._bases.found]
            turns = min(TURNS, len(summarized))
            waiting = {name for at, name in enumerate(summarized) if at % turns != step % turns}
            gradients = {name: g for name, g in gradients.items() if name not in waiting}
        probe = torch.cat([self._seen(name, gradient) for name, gradient in gradients.items()])
        scale = getattr(optimizer, "grad_scale", None)  # fused optimizers unscale themselves
        if scale is not None:
            probe = probe / scale.to(probe.device)
        names = tuple(gradients)
        if names != self._last_names:
            self._last_names = names
        return self._last_names, probe  # one object for the same names: steps are quickly compared

    def _seen(self, name: str, gradient: Tensor) -> Tensor:
        """What a step keeps of a gradient."""
        look, term = self.looks[name], self.terms[name]
        partial = look.partial
        part = self._plan.parts.get(name)
        if part is not None:
            return _of_part(local(gradient), part, look, term)
        if gradient.is_sparse:
            if term.view == "rows" and gradient.sparse_dim() == 1 and look.outputs is None:
                gradient, partial = _some_rows(gradient, look.rows), False
            else:
                gradient = gradient.to_dense()
        if look.vectors is None:
            flat = gradient.reshape(-1)
            return flat[look.rows] if partial else flat
        if term.view != "rows" or gradient.ndim > 2:
            gradient = as_matrix(gradient, term.view, term.groups)
        if look.outputs is not None:
            gradient = look.outputs.to(gradient).T @ gradient
        elif partial:
            gradient = gradient[look.rows]
        return (gradient if look.later else gradient @ look.vectors).flatten()

    def _look(self, name: str) -> Look:
        """Some rows of the book's matrix, and the vectors they are multiplied with."""
        term, parameter = self.terms[name], self._plan.parameters[name]
        height, width = matrix_shape(tuple(parameter.shape), term.view, term.groups)
        rows = PROBED_COLUMN if term.view == "flat" else PROBED_ROWS
        if not self._rule.in_parts:
            rows = height  # nothing else looks at the whole
        first = min(self._turn * rows % height, max(0, height - rows))
        chosen = slice(first, min(first + rows, height))
        bases = self._bases.found.get(name)
        if bases is not None:
            is_table = not form_named(term.form).has_sides
            return self._in_bases(bases, parameter, chosen, (height, width), is_table)
        if name not in self._vectors:
            self._vectors[name] = None if term.view == "flat" else self._random(name, height, width)
        later = form_named(term.form).is_product and calls_are_dear(parameter)
        return Look(chosen, self._vectors[name], later, partial=rows < height)

    def _in_bases(
        self,
        bases: Bases,
        parameter: Tensor,
        rows: slice,
        shape: tuple[int, int],
        is_table: bool,
    ) -> Look:
        """The look of a book that is summarized: its gradient in the bases.

        A table has too many places: only some of them are looked at.
        """
        V = torch.eye(shape[1]) if bases.inputs is None else bases.inputs
        vectors, whole = V.to(parameter.device, parameter.dtype), slice(0, shape[0])
        if bases.outputs is None and is_table:
            return Look(rows, vectors, partial=rows.stop - rows.start < shape[0])
        if bases.outputs is None:
            return Look(whole, vectors, partial=False, in_bases=True)
        U = bases.outputs.to(parameter.device, parameter.dtype)
        return Look(whole, vectors, partial=False, outputs=U, in_bases=True)

    def _random(self, name: str, height: int, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._plan.columns[name])  # not the user's
        count = min(width + 1, -(-PROBE_NUMBERS // height))
        vectors = torch.randn(width, count, generator=generator, dtype=torch.float64, device="cpu")
        parameter = self._plan.parameters[name]
        return vectors.to(parameter.device, parameter.dtype)


def _of_part(own: Tensor, part: Portion, look: Look, term: Term) -> Tensor:
    """What a step keeps of a gradient of which this process has a part; zero where it has none.

    The sum over all processes is what it would keep of the whole.
    """
    if not (part.counts and part.elements):
        return own.new_zeros(look.kept)
    lines = part.lines(term.view)
    if look.outputs is not None:
        assert look.vectors is not None
        matrix = as_matrix(part.widened(own), term.view, term.groups) if lines is None else own
        U = look.outputs.to(own) if lines is None else look.outputs[lines].to(own)
        return (U.T @ as_matrix(matrix, term.view) @ look.vectors).flatten()
    if lines is None:
        matrix = as_matrix(part.widened(own), term.view, term.groups)[look.rows]
    else:
        first, last = max(look.rows.start, lines.start), min(look.rows.stop, lines.stop)
        matrix = as_matrix(own, term.view)
        matrix = matrix[first - lines.start : max(first, last) - lines.start]
    if look.vectors is not None and not look.later:
        matrix = matrix @ look.vectors
    if lines is not None:
        above = min(first - look.rows.start, look.height - len(matrix))
        matrix = F.pad(matrix, (0, 0, above, look.height - len(matrix) - above))
    return matrix.flatten()


def _some_rows(gradient: Tensor, rows: slice) -> Tensor:
    """Some rows of a table's sparse gradient; only those are made dense."""
    (places, *_), values = sparse_parts(gradient)
    inside = (places >= rows.start) & (places < rows.stop)
    dense = values.new_zeros(rows.stop - rows.start, *values.shape[1:])
    return dense.index_add_(0, places[inside] - rows.start, values[inside])
