"""Books that are summarized, in the coordinates of their bases: as small as summaries are.

What a sample adds to such a book is `U S Vᵀ`. In the matrix samples × parameters, the small matrix
`S` takes its place. A book may have several bases, since they are renewed; then U and V hold all of
them. Lines are what they are in the whole book: along its longer side, with coordinates in the
basis of that side. A line of a unit is `u S`, with u the unit's row of U: `across` has these rows.

An optimizer that moves elements by different amounts, `h`, has a metric. Where `h` is about `p qᵀ`,
`√h ∘ (U S Vᵀ)` lies in the bases `√p U` and `√q V`, and S has coordinates there. A question passes
through all of `h` before it is projected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.ledger import Book, Ledger, Stream, Term
from dualform.memory.blocks import Sides, as_matrix, from_matrix
from dualform.memory.forms import form_named
from dualform.memory.summary import Bases, Matrices, SummarySides
from dualform.read.engine.shards import stream_bases
from dualform.read.replay import damped_inverse
from dualform.read.samples_matrix.columns import shape_of
from dualform.read.scan import summary_sides

OUTSIDE = 0.1
"""Directions of which the bases of a book have less together are left out of its coordinates."""


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a book's matrix: a basis, and how far elements along it move.

    >>> side = Side.of([torch.eye(3)[:, :2]], torch.tensor([2.0, 1.0, 1.0]))
    >>> side.rows(torch.tensor([[1.0, 0.0, 5.0]])).abs()
    tensor([[2., 0.]])
    """

    basis: Tensor | None
    """(side, k), orthonormal; None where the side is whole."""
    far: Tensor
    """(side,): the square root of how far elements move."""
    turned: Tensor | None
    """(side, k): what coordinates are taken along, an orthonormal basis of `far ∘ basis` ∘ far."""
    mixed: Tensor | None
    """(k, k): the coordinates of the basis itself."""

    @classmethod
    def of(cls, bases: Sequence[Tensor | None], far: Tensor) -> Side:
        """A side on which entries are kept in these bases."""
        known = [basis for basis in bases if basis is not None]
        if not known or len(known) < len(bases) or sum(b.shape[1] for b in known) >= len(far):
            return cls(None, far, None, None)
        basis = _joined(torch.cat(known, 1).to(far))
        turned, mixed = torch.linalg.qr(far[:, None] * basis)
        return cls(basis, far, far[:, None] * turned, mixed)

    @property
    def size(self) -> int:
        """How many coordinates it has."""
        return len(self.far) if self.basis is None else self.basis.shape[1]

    def rows(self, rows: Tensor, begin: int = 0) -> Tensor:
        """(rows, k): vectors (rows, width) that begin somewhere, in coordinates."""
        part = slice(begin, begin + rows.shape[1])
        if self.turned is not None:
            return rows @ self.turned[part].to(rows)
        whole = rows.new_zeros(len(rows), len(self.far))
        whole[:, part] = rows * self.far[part].to(rows)
        return whole

    def places(self, places: Tensor) -> Tensor:
        """(rows, k): the unit vectors of some places, in coordinates."""
        assert self.turned is not None
        return self.turned[places]

    def whole(self, questions: Tensor) -> Tensor:
        """(…, side): questions (…, k) to coordinates, as they are asked of vectors: of `rows`."""
        if self.turned is not None:
            return questions @ self.turned.T.to(questions)
        return questions * self.far.to(questions)

    def of_basis(self, basis: Tensor | None) -> Tensor:
        """(k, own k): what makes coordinates of those in another basis, or in none."""
        if basis is not None:
            return self.rows(basis.T.to(self.far)).T
        return torch.diag(self.far) if self.turned is None else self.turned.T

    def asked(self, questions: Tensor) -> Tensor:
        """(…, k): questions (…, side) to what moved, as they are put to coordinates."""
        if self.basis is None or self.mixed is None:
            return questions / self.far.to(questions)
        along = questions @ self.basis.to(questions)
        mixed = self.mixed.to(along)
        found: Tensor = torch.linalg.solve_triangular(mixed, along, upper=True, left=False)
        return found


@dataclass(frozen=True, eq=False)
class Coordinates:
    """A book in the coordinates of its bases: `small` takes its place in the matrix."""

    small: Book
    """As large as a summary; fed by the same streams."""
    book: Book
    height: Side
    width: Side
    tall: bool
    """Whether lines run along the height, since it is the longer side."""
    across: Tensor | None
    """(lines, k): how much of each coordinate of the shorter side a line has; None for its own."""
    far: Tensor
    """(lines,): the square root of how far the elements of a line move."""
    moved: Tensor | None
    """h, of the book's shape; None where all elements move alike."""
    bases: Mapping[str, Bases | None]
    """What each stream's records are kept in; None where they are rows."""

    @classmethod
    def of(
        cls, ledger: Ledger, book: Book, moved: Tensor | None, device: torch.device | str
    ) -> Coordinates:
        """Those of all bases that the book has had."""
        streams = [ledger.info.stream(name) for name in book.terms]
        bases = {s.name: stream_bases(ledger.basis_shards, s, device) for s in streams}
        sided = [name for name, term in book.terms.items() if form_named(term.form).has_sides]
        term = next(iter(book.terms.values()))
        far = [torch.ones(side, device=device) for side in shape_of(book, term)]
        if moved is not None:
            moved = damped_inverse(moved.float().reciprocal())
            far = [side.sqrt() for side in _rank_one(as_matrix(moved, term.view, term.groups))]
        tall, plain = len(far[0]) > len(far[1]), [torch.ones_like(side) for side in far]
        U = [found.outputs for name in sided if (found := bases[name]) is not None]
        V = [found.inputs for found in bases.values() if found is not None]
        height = Side.of(U, far[0] if tall else plain[0])
        width = Side.of(V, plain[1] if tall else far[1])
        across, own = (width.basis, far[1]) if tall else (height.basis, far[0])
        terms = dict.fromkeys(book.terms, Term("outer", "rows"))
        small = Book(book.name, (height.size, width.size), book.dtype, terms)
        return cls(small, book, height, width, tall, across, own, moved, bases)

    def asked(self, directions: Tensor) -> Tensor:
        """(directions, lines, side): directions (directions, *shape), as they are put to lines."""
        term = next(iter(self.book.terms.values()))
        moved = directions if self.moved is None else directions * self.moved.to(directions)
        seen = torch.stack([as_matrix(d, term.view, term.groups) for d in moved])
        found = self.height.asked(seen.mT) if self.tall else self.width.asked(seen)
        return found / self.far[:, None].to(found)

    def lines(self, small: Tensor, some: slice = slice(None)) -> Tensor:
        """(lines, groups, side): what each group added to some lines, of (groups, k_o, k_i)."""
        parts = (small if self.tall else small.mT).permute(2, 0, 1)  # (across, groups, side)
        if self.across is None:
            return parts[some] * self.far[some, None, None].to(parts)
        rows = (self.across[some] * self.far[some, None]).to(parts)
        return (rows @ parts.flatten(1)).reshape(len(rows), *parts.shape[1:])

    def back(self, lines: Tensor) -> Tensor:
        """(directions, k_o, k_i): directions (directions, lines, side) as groups are asked them."""
        scaled = lines * self.far[:, None].to(lines)
        found = scaled if self.across is None else self.across.T.to(scaled) @ scaled
        return found.mT if self.tall else found

    def whole(self, questions: Tensor) -> Tensor:
        """(directions, *shape): questions (directions, k_o, k_i), as the rows are asked them."""
        term, shape = next(iter(self.book.terms.values())), self.book.shape
        found = self.height.whole(self.width.whole(questions).mT).mT
        return torch.stack([from_matrix(one, shape, term.view, term.groups) for one in found])

    def sides(self, stream: Stream, keys: Tensor, values: Tensor) -> Sides | SummarySides:
        """A stream's records as the blocks that they add to the small book."""
        term, bases = self.book.terms[stream.name], self.bases[stream.name]
        if bases is None:
            rows = form_named(term.form).rows(keys, values, term.groups, term.at)
            b = rows.a.new_ones(len(rows), 1) if rows.b is None else rows.b
            return self._placed(rows, self.width.rows(b, rows.at[1]), None)
        kept = summary_sides(stream, term, keys, values, bases).kept
        if isinstance(kept, Matrices):
            sides = (self.height.of_basis(bases.outputs), self.width.of_basis(bases.inputs))
            return SummarySides(kept, Bases(*sides))
        assert kept.b is not None
        if bases.inputs is None:
            return self._placed(kept, self.width.rows(kept.b, kept.at[1]), bases.outputs)
        return self._placed(kept, kept.b, bases.outputs, self.width.of_basis(bases.inputs))

    def _placed(
        self, rows: Sides, b: Tensor, outputs: Tensor | None, along: Tensor | None = None
    ) -> Sides | SummarySides:
        """Rows with `b` in coordinates, or in what `along` makes coordinates of."""
        top, across = rows.at[0], None
        if rows.a.ndim == 1 and self.height.turned is None:
            places = rows.a + top
            sides = Sides(places, b * self.height.far[places][:, None].to(b))
        elif rows.a.ndim == 1:
            sides = Sides(self.height.places(rows.a + top).to(b), b)
        elif outputs is None:
            sides = Sides(self.height.rows(rows.a, top), b)
        else:
            sides, across = Sides(rows.a, b), self.height.of_basis(outputs)
        if along is None and across is None:
            return sides
        return SummarySides(sides, Bases(across, along))


def _joined(bases: Tensor) -> Tensor:
    """(side, k): an orthonormal basis of what several bases span; without what is hardly in any.

    >>> _joined(torch.eye(3)[:, [0, 1, 0]]).shape
    torch.Size([3, 2])
    """
    energy, vectors = torch.linalg.eigh((bases.T @ bases).double())
    kept = vectors[:, energy > OUTSIDE].to(bases)
    basis: Tensor = torch.linalg.qr(bases @ kept).Q
    return basis


def _rank_one(h: Tensor) -> tuple[Tensor, Tensor]:
    """p and q, with `p qᵀ` about `h`: means along both sides.

    >>> p, q = _rank_one(torch.tensor([[2.0, 4.0], [6.0, 12.0]]))
    >>> (p[:, None] * q).round()
    tensor([[ 2.,  4.],
            [ 6., 12.]])
    """
    root = h.mean().sqrt()
    return h.mean(1) / root, h.mean(0) / root


def has_coordinates(ledger: Ledger, book: Book) -> bool:
    """Whether a book is summarized, and all its streams see it as the same matrix, in bases.

    A table that is only read has no basis along its height.
    """
    streams = [ledger.info.stream(name) for name in book.terms]
    views = {(term.view, term.groups) for term in book.terms.values()}
    sided = [form_named(book.terms[s.name].form).has_sides for s in streams if any(s.bases)]
    plain = not any(stream.shared for stream in streams)
    return any(sided) and plain and len(views) == 1 and views.pop()[1] == 1
