"""The ridge dual of the ledger: `S = Σ C (1 + CᵀC/λ)⁻¹ g` over lines of parameters.

`C` is samples × one line of a parameter's matrix, along its longer side: what goes into one unit of
a layer, as a rule. A line is inverted through the smaller of `CᵀC` and `C Cᵀ`; where both are big,
in the basis `Q` of the leading directions, found by a randomized method. What the basis leaves out
is not dropped: there the matrix is taken for a multiple of the identity, its mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dualform.errors import ReadingError
from dualform.ledger import Book
from dualform.read.free_memory import free_memory
from dualform.read.samples_matrix.basis_lines import BasisLines
from dualform.read.samples_matrix.block_sums import BasisGrams
from dualform.read.samples_matrix.columns import Columns, longest
from dualform.read.samples_matrix.coordinates import Coordinates
from dualform.read.samples_matrix.grams import bands, line_grams
from dualform.read.samples_matrix.matrix import Matrix
from dualform.read.samples_matrix.sparse import SparseLines

OVERSAMPLED = 16
"""How many more directions are tried than are kept."""
EXACT = 4096
"""Lines of at most so many parameters, or samples, are inverted exactly."""
RANK = 512
"""How many leading directions are kept beyond that."""
WELL_CONDITIONED = 1 << 14
"""Up to this ratio of its trace to λ a line is solved in the precision of its contributions."""
KEPT_BYTES = 1 << 30
"""How much of what does not depend on the queries is kept for the next of them."""


@dataclass(frozen=True)
class Ridge:
    """`K = X Xᵀ` as `Q M Qᵀ + τ (1 − Q Qᵀ)`, ready to be damped and solved.

    >>> exact = Ridge(None, torch.tensor([[2.0]], dtype=torch.float64), 0.0, 2.0, 1)
    >>> round(float(exact.damped(0.5).solve(torch.tensor([[6.0]], dtype=torch.float64))), 6)
    2.0
    """

    Q: Tensor | None
    """(side, rank), orthonormal; None where M is K itself."""
    M: Tensor
    tail: float
    """τ: the mean of the eigenvalues outside the basis."""
    trace: float
    samples: int

    @property
    def scale(self) -> float:
        """The mean squared size of a sample's contributions, in units of which it is damped."""
        return self.trace / max(1, self.samples)

    @property
    def inside(self) -> float:
        """The trace within the basis."""
        return float(self.M.diagonal().sum(dtype=torch.float64))

    def damped(self, damping: float) -> Damped:
        """`K + λ` with `λ = damping · scale`, inverted."""
        added = damping * self.scale
        if not math.isfinite(added):
            raise ReadingError(
                "what some samples contributed is not finite, so that it cannot be inverted: "
                "`dualform info RUN --check` says whether the run is damaged."
            )
        precise = self.trace > WELL_CONDITIONED * added
        system = self.M.double() if precise else self.M.clone()
        if added:  # something was contributed
            system.diagonal().add_(added)
            system = torch.cholesky_inverse(torch.linalg.cholesky(system)).mul_(added)
        return Damped(self, added, system)


@dataclass(frozen=True)
class Damped:
    """`K + λ`, with which any number of systems can be solved."""

    ridge: Ridge
    added: float
    """λ."""
    inverse: Tensor
    """`(1 + M / λ)⁻¹`."""

    def solve(self, b: Tensor) -> Tensor:
        """(side, queries): `(1 + K / λ)⁻¹ b`."""
        b, Q, added = b.to(self.inverse).cpu(), self.ridge.Q, self.added
        if not added:
            return b
        if Q is None:
            return (b.T @ self.inverse).T  # which is symmetric
        Q = Q.to(b)
        inside = Q.T @ b
        outside = (b - Q @ inside) * (added / (added + self.ridge.tail))
        return Q @ (self.inverse @ inside) + outside

    def left(self) -> float:
        """The trace of `K (1 + K / λ)⁻¹`: what solving leaves of K."""
        Q, M, tail, added = self.ridge.Q, self.ridge.M, self.ridge.tail, self.added
        if not added:
            return 0.0
        kept = torch.dot(self.inverse.reshape(-1), M.to(self.inverse).reshape(-1))
        outside = 0 if Q is None else len(Q) - len(M)
        return float(kept) + outside * tail * added / (added + tail)


def make_ridge(X: Tensor, rank: int, samples: int) -> Ridge:
    """K itself where the rank is as large as its side, else its leading directions."""
    side = len(X)
    if rank >= side:
        return exact_ridge(_gram(X), samples)
    tried = min(rank + OVERSAMPLED, side)
    start = torch.randn(side, tried, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(_times_gram(X, start)).Q
    trace = float(X.square().sum(dtype=torch.float64))
    return _nystrom(basis, _times_gram(X, basis), rank, trace, samples)


def exact_ridge(K: Tensor, samples: int) -> Ridge:
    """K itself."""
    return Ridge(None, K.cpu(), 0.0, float(K.diagonal().sum(dtype=torch.float64)), samples)


def _gram(X: Tensor) -> Tensor:
    """`X Xᵀ`, of which only one half is computed."""
    side = len(X)
    K = X.new_empty(side, side)
    each = max(128, -(-side // 4))
    for at in range(0, side, each):
        rows = slice(at, at + each)
        K[rows, : at + each] = X[rows] @ X[: at + each].T
        K[:at, rows] = K[rows, :at].T
    return K


def _times_gram(X: Tensor, basis: Tensor) -> Tensor:
    """`X Xᵀ B`."""
    return (X @ (X.T @ basis.to(X))).double().cpu()


def _nystrom(basis: Tensor, product: Tensor, rank: int, trace: float, samples: int) -> Ridge:
    """The leading eigenvectors of `K B (Bᵀ K B)⁻¹ Bᵀ K`, given `K B` for an orthonormal B."""
    small = basis.T @ product
    values, vectors = torch.linalg.eigh((small + small.T) / 2)
    kept = values > values[-1] * 1e-12
    root = product @ (vectors[:, kept] / values[kept].sqrt())
    U, S, _ = torch.linalg.svd(root, full_matrices=False)
    Q, M = U[:, :rank], torch.diag(S[:rank].square())
    left = max(0.0, trace - float(M.diagonal().sum()))
    return Ridge(Q, M, left / max(1, len(Q) - rank), trace, samples)


@dataclass
class _Sums:
    """What solving leaves, over all lines."""

    trace: float = 0.0
    inside: float = 0.0
    left: float = 0.0

    def add(self, line: Damped) -> Damped:
        """Takes a line, and hands it on."""
        self.trace += line.ridge.trace
        self.inside += line.ridge.inside
        self.left += line.left()
        return line

    def add_lines(self, trace: float, left: float) -> None:
        """Takes lines that were solved as a whole."""
        self.trace, self.inside = self.trace + trace, self.inside + trace
        self.left += left

    def shares(self) -> tuple[float, float]:
        """How much of the trace is inside of the bases, and how much is left."""
        if not self.trace:
            return 1.0, 1.0
        return self.inside / self.trace, self.left / self.trace


class Lines:
    """All lines of a matrix, solved one by one; what does not depend on queries is kept."""

    def __init__(self, rank: int | None) -> None:
        self._rank = rank
        self._known: dict[tuple[str, int, int], list[Ridge]] = {}
        self._in_bases: dict[str, BasisLines] = {}
        self._bytes = 0
        self._left: dict[float, float] = {}
        self.kept = 1.0
        """The share of the contributions' squared size that is solved, not taken for its mean."""

    def left(self, damping: float) -> float:
        """The share of it that solving leaves, once it was solved with this damping."""
        return self._left[damping]

    def solve(self, matrix: Matrix, directions: Mapping[str, Tensor], damping: float) -> Tensor:
        """(samples, queries): `Σ C (1 + CᵀC/λ)⁻¹ g`.

        In one scan, where the samples' contributions to a book fit into memory; else in two.
        """
        queries = len(next(iter(directions.values())))
        total = torch.zeros(matrix.groups, queries, dtype=torch.float64)
        sums = _Sums()
        books = [book for book in matrix.books if book.name not in matrix.coordinates]
        for own in matrix.coordinates.values():
            total += self._in_coordinates(matrix, own, directions[own.book.name], damping, sums)
        large = [book for book in books if self._is_large(matrix, book)]
        for columns in matrix.columns([book for book in books if book not in large]):
            asked = columns.lines_of(directions[columns.book.name])
            C = columns.lines(columns.values)
            sparse = SparseLines.of(C) if self._exact(C) else None
            damped = self._damped(self._ridges(columns, C, sparse), damping, sums)
            total += _solved(C, sparse, asked, damped)
        solved: list[tuple[Columns, Tensor]] = []
        for band in bands([matrix.whole(book) for book in large]):
            for part, ridges in self._band_ridges(matrix, band):
                asked = part.lines_of(directions[part.book.name])
                _solve_lines(asked, self._damped(ridges, damping, sums))
                solved.append((part, asked))
        if solved:
            total += matrix.product(solved)
        if damping not in self._left:
            self.kept, self._left[damping] = sums.shares()
        return total

    def _in_coordinates(
        self, matrix: Matrix, own: Coordinates, asked: Tensor, damping: float, sums: _Sums
    ) -> Tensor:
        """What a book adds that is in the coordinates of its bases; asked (queries, lines, side).

        In one scan, where all samples fit into memory; else in one for what is inverted, and one
        for the product.
        """
        book, whole = own.small, matrix.whole(own.small)
        parts = None if matrix.is_large(book) else list(matrix.columns([book]))
        lines = self._in_bases.get(book.name) or BasisLines.of(own)
        if not lines.nbytes:
            if parts is None:
                lines = matrix.sum_blocks([whole], partial(BasisGrams, own=own))
            for columns in parts or ():
                lines.add(columns)
            if self._bytes + lines.nbytes <= KEPT_BYTES:
                self._in_bases[book.name], self._bytes = lines, self._bytes + lines.nbytes
        solved, *shares = lines.solved(asked, damping, matrix.groups)
        if damping not in self._left:
            sums.add_lines(*shares)
        question = own.back(solved)
        if parts is None:
            return matrix.product([(whole, whole.lines_of(question))])
        total = torch.zeros(matrix.groups, len(asked), dtype=torch.float64)
        for columns in parts:
            total[columns.groups] += (columns.values @ columns.of(question).T).double().cpu()
        return total

    def _is_large(self, matrix: Matrix, book: Book) -> bool:
        """Whether its lines are inverted through their own side, some samples at a time."""
        if not matrix.is_large(book):
            return False
        side = longest(book)
        return matrix.groups >= side and rank_of(side, self._rank) >= side

    def _damped(self, ridges: Iterable[Ridge], damping: float, sums: _Sums) -> Iterable[Damped]:
        """The lines, damped one at a time; what they leave is noted where it is not known yet."""
        damped = (ridge.damped(damping) for ridge in ridges)
        return damped if damping in self._left else map(sums.add, damped)

    def _band_ridges(
        self, matrix: Matrix, band: Sequence[Columns]
    ) -> Iterator[tuple[Columns, list[Ridge]]]:
        """The lines of some parts, those that are not known yet in one scan."""
        missing = [part for part in band if part.key not in self._known]
        made = zip(missing, line_grams(matrix, missing) if missing else (), strict=True)
        found = {part.key: [exact_ridge(K, matrix.groups) for K in grams] for part, grams in made}
        for part in band:
            known = self._known.get(part.key) or self._keep(part.key, found[part.key])
            yield part, known

    def _exact(self, C: Tensor) -> bool:
        """Whether lines are inverted exactly, through their own side."""
        return _tall(C) and rank_of(C.shape[2], self._rank) >= C.shape[2]

    def _ridges(self, columns: Columns, C: Tensor, sparse: SparseLines | None) -> list[Ridge]:
        """One for each line; known ones are not made again."""
        key = columns.key
        return self._known.get(key) or self._keep(key, self._made(C, sparse))

    def _keep(self, key: tuple[str, int, int], ridges: list[Ridge]) -> list[Ridge]:
        """Keeps the lines for the next queries, if there is room."""
        size = sum(r.M.nbytes + (0 if r.Q is None else r.Q.nbytes) for r in ridges)
        if self._bytes + size <= KEPT_BYTES:
            self._known[key], self._bytes = ridges, self._bytes + size
        return ridges

    def _made(self, C: Tensor, sparse: SparseLines | None) -> list[Ridge]:
        if sparse is not None:
            return [exact_ridge(K, len(C)) for K in sparse.grams()]
        rank = rank_of(min(C.shape[0], C.shape[2]), self._rank)
        tall = _tall(C)
        return [make_ridge(line.T if tall else line, rank, len(C)) for line in C.unbind(1)]


def _tall(C: Tensor) -> bool:
    return C.shape[0] >= C.shape[2]


def _solved(
    C: Tensor, sparse: SparseLines | None, asked: Tensor, damped: Iterable[Damped]
) -> Tensor:
    """(samples, queries): what some lines add; where samples are many, by one product for all.

    What is asked is lost: the solutions take its place.
    """
    if not _tall(C):
        lines = zip(C.unbind(1), asked.unbind(1), damped, strict=True)
        return torch.stack([one.solve(line @ g.T).double() for line, g, one in lines]).sum(0)
    _solve_lines(asked, damped)
    if sparse is not None:
        return sparse.times(asked).double().cpu()
    return (C.flatten(1) @ asked.flatten(1).T).double().cpu()


def _solve_lines(asked: Tensor, damped: Iterable[Damped]) -> None:
    """(queries, lines, side) as `(1 + CᵀC/λ)⁻¹` makes it, in place."""
    for g, one in zip(asked.unbind(1), damped, strict=True):
        g.copy_(one.solve(g.T).T)


def rank_of(side: int, rank: int | None) -> int:
    """How many directions are kept of a line, with this smaller side.

    >>> rank_of(784, None), rank_of(784, 32), rank_of(50_000, None)
    (784, 32, 512)
    """
    if rank is None:
        return side if side <= EXACT else RANK
    return min(rank, side)


def check_memory(side: int, rank: int | None) -> None:
    """Says before anything is allocated that it will not fit; for lines up to this side."""
    kept = rank_of(side, rank)
    exact = kept >= side
    need, free = 8 * side * (3 * side if exact else 3 * (kept + OVERSAMPLED)), free_memory()
    if need > free:
        what = "the Gram matrix" if exact else f"a basis of {kept:,} directions"
        smaller = max(16, int(free / (48 * side)) // 16 * 16)
        raise ReadingError(
            f"{what} of a line of {side:,} needs {need / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB "
            f"are free; fewer directions need less: rank={min(smaller, 1024)}."
        )
