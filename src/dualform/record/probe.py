"""Probes: one vector a step that tells whether the rows explain the gradient, and by what factor.

Training changes gradients on their way to the optimizer: a loss scale is divided out, clipping
shrinks them, a discarded backward pass never counts. None of it is assumed; it is measured. At each
step the recorder takes `u = G r` of the gradient the optimizer is about to use (r fixed, random,
several of them for narrow layers). The rows give the same probe, `w = Σ error (x·r)`, and `u = κ w`
must hold for one number κ, the step's *factor*. Where it does not, the rows do not explain the
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dualform.record.plan import Source
from dualform.record.tape import Page

MISMATCH = 1000.0
"""How many roundings of their terms two probes may differ by."""
UNSCALED = 32.0
"""How many roundings a factor may differ from 1 and still be 1."""


@dataclass
class StreamRows:
    """The rows of one stream over some steps, sample by sample."""

    keys: Tensor
    values: Tensor
    segments: Tensor
    """(segments, 3): index of the step, batch number, positions of each sample."""
    counts: Tensor
    """(segments,): rows."""

    @property
    def at(self) -> Tensor:
        """(rows,): the index of each row's step."""
        return self.segments[:, 0].repeat_interleave(self.counts)

    def keep(self, segments: Tensor) -> StreamRows:
        """Only the segments where the mask is true."""
        rows = segments.repeat_interleave(self.counts).to(self.keys.device)
        return StreamRows(
            self.keys[rows], self.values[rows], self.segments[segments], self.counts[segments]
        )


def lay_out(source: Source, page: Page, first: int, last: int) -> StreamRows | None:
    """A page's slots of steps `first` to `last` as rows; None where it has none.

    Slots whose rows cannot be told apart by sample are left out, and the probe then fails.
    """
    chosen = [
        (at, step - first, batch)
        for at, (step, batch) in enumerate(page.marks)
        if first <= step <= last
    ]
    rows_a_slot = math.prod(page.form[0][:-1])
    fitting = [
        (at, step, batch)
        for at, step, batch in chosen
        if batch.size and rows_a_slot % batch.size == 0
    ]
    if not fitting:
        return None
    keys, values = _slots(page, [at for at, _, _ in fitting])
    keys, values = source.kind.rows(keys, values)
    if keys.ndim > 3 and keys.shape[1] != fitting[0][2].size == keys.shape[2]:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    table = [(step, batch.number, rows_a_slot // batch.size) for _, step, batch in fitting]
    return StreamRows(
        keys.reshape(-1, keys.shape[-1]),
        values.reshape(-1, values.shape[-1]),
        torch.tensor(table),
        torch.full((len(fitting),), rows_a_slot),
    )


def _slots(page: Page, chosen: list[int]) -> tuple[Tensor, Tensor]:
    """The chosen slots; without a copy where they are neighbors, as they nearly always are."""
    start, stop = chosen[0], chosen[-1] + 1
    if stop - start == len(chosen):
        return page.keys[start:stop], page.values[start:stop]
    return page.keys[chosen], page.values[chosen]


@dataclass(frozen=True)
class Evidence:
    """What the rows of one account say its gradient was, step by step."""

    streams: dict[int, list[StreamRows]]
    biased: dict[int, bool]
    vectors: Tensor
    """(inputs, vectors): what the gradients were multiplied with."""
    outputs: slice
    """Where the probes were taken."""
    u: Tensor
    """(steps, numbers): the probe of the gradient that was used, flat."""
    touched: Tensor
    """(steps, 2): whether the step changed weights, and biases, of the account by row."""

    @cached_property
    def pieces(self) -> list[tuple[int, StreamRows]]:
        """All rows, with the index of their source."""
        return [(index, rows) for index, pieces in self.streams.items() for rows in pieces]

    @cached_property
    def active(self) -> Tensor:
        """(steps,): whether the step touched the account at all."""
        return self.touched.any(1)

    @cached_property
    def sums(self) -> tuple[Tensor, Tensor]:
        """The rows' probe of each step (steps, numbers), and the size of its terms (steps,).

        The size takes `|x·r|` for `‖x‖`, which it is on average, to spare a pass over the keys.
        """
        w, size = torch.zeros_like(self.u), torch.zeros(len(self.u), dtype=torch.float64)
        for index, rows in self.pieces:
            at = rows.at.to(rows.keys.device)
            keys, values, weight, bias = self._parts(index, rows, at)
            inner = (keys @ self.vectors.to(keys)) * weight[:, None] + bias[:, None]
            w += _sum_by(at, (values[:, :, None] * inner[:, None, :]).flatten(1), len(w))
            reach = torch.linalg.vector_norm(inner, dim=1)
            size += _sum_by(at, reach * torch.linalg.vector_norm(values, dim=1), len(w))
        return w, size

    @cached_property
    def reach(self) -> Tensor:
        """(steps,): the size of the probes' terms, `Σ ‖x‖ ‖e‖`; found only where it is needed."""
        size = torch.zeros(len(self.u), dtype=torch.float64)
        for index, rows in self.pieces:
            at = rows.at.to(rows.keys.device)
            keys, values, weight, bias = self._parts(index, rows, at)
            norm = torch.linalg.vector_norm(keys, dim=1) * weight + bias
            size += _sum_by(at, norm * torch.linalg.vector_norm(values, dim=1), len(size))
        return size

    def _parts(
        self, index: int, rows: StreamRows, at: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys and probed values, and for each row whether it counts for weight and bias."""
        wide = torch.promote_types(rows.values.dtype, torch.float32)
        touched = self.touched.to(at.device)[at].to(wide)
        bias = touched[:, 1] * self.biased[index]
        return rows.keys.to(wide), rows.values[:, self.outputs].to(wide), touched[:, 0], bias

    @property
    def rounding(self) -> float:
        """The relative rounding of the coarsest numbers involved."""
        dtypes = [rows.values.dtype for _, rows in self.pieces] or [torch.float32]
        coarse = max(torch.finfo(dtype).eps for dtype in dtypes)
        return coarse if coarse < 1e-4 else coarse / 250  # 16-bit rows are summed in 32 bits

    def agrees(self, factor: Tensor) -> Tensor:
        """(steps,): whether `u = κ w` to within rounding."""
        w, size = self.sums
        gap = torch.linalg.vector_norm(self.u - factor[:, None] * w, dim=1)
        allowed = MISMATCH * self.rounding
        agrees: Tensor = (gap <= allowed * size * factor.abs()) | ~self.active
        if not agrees.all():
            reach = self.reach * factor.abs() + torch.linalg.vector_norm(self.u, dim=1)
            agrees = agrees | (gap <= allowed * reach)
        return agrees

    def own_factor(self) -> Tensor:
        """(steps,): the κ that fits this account best."""
        w, _ = self.sums
        return _ratio((self.u * w).sum(1), w.square().sum(1))

    def from_batch(self, at: int, first: int) -> Evidence:
        """The same without the batches of step `at` that came before `first`."""
        kept = {
            index: [p.keep((p.segments[:, 0] != at) | (p.segments[:, 1] >= first)) for p in pieces]
            for index, pieces in self.streams.items()
        }
        return replace(self, streams=kept)

    def batches(self, at: int) -> list[int]:
        """The batches that left rows in step `at`, in order."""
        tables = [rows.segments for _, rows in self.pieces]
        return sorted({int(n) for table in tables for n in table[table[:, 0] == at][:, 1]})


def settle_factors(evidence: Sequence[Evidence]) -> tuple[list[Evidence], Tensor, Tensor]:
    """Finds κ for each step and account: evidence, factors and agreement (steps, accounts).

    One κ for all accounts where it fits (clipping by global norm, loss scales), because together
    they determine it best; each account its own where not. An account that agrees with neither
    is tried without its earlier backward passes: `zero_grad` may have thrown those away.
    """
    shared = _shared_factor(evidence)
    settled, factors, agreed = [], [], []
    for account in evidence:
        factor, agrees = _account_factor(account, shared)
        for at in torch.nonzero(~agrees).flatten().tolist():
            account, factor[at], agrees[at] = _without_discarded(account, at, factor[at])
        settled.append(account)
        factors.append(torch.where(agrees & account.active, factor, 0.0))
        agreed.append(agrees)
    return settled, torch.stack(factors, 1), torch.stack(agreed, 1)


def _shared_factor(evidence: Sequence[Evidence]) -> Tensor:
    """The least-squares κ over all accounts, each weighted by how exactly it is known."""
    above = below = torch.zeros(len(evidence[0].u), dtype=torch.float64)
    for account in evidence:
        w, size = account.sums
        weight = torch.where(account.active & (size > 0), (account.rounding * size) ** -2, 0.0)
        above = above + weight * (account.u * w).sum(1)
        below = below + weight * w.square().sum(1)
    factor = _ratio(above, below)
    doubt = UNSCALED / below.clamp_min(1e-300).sqrt()
    return torch.where((factor - 1).abs() <= doubt, 1.0, factor)


def _account_factor(account: Evidence, shared: Tensor) -> tuple[Tensor, Tensor]:
    agrees = account.agrees(shared)
    own = account.own_factor()
    return torch.where(agrees, shared, own), agrees | account.agrees(own)


def _without_discarded(account: Evidence, at: int, factor: Tensor) -> tuple[Evidence, Tensor, bool]:
    for first in account.batches(at)[1:]:
        trial = account.from_batch(at, first)
        own = trial.own_factor()
        if bool(trial.agrees(own)[at]):
            return trial, own[at], True
    unexplained = account.from_batch(at, 2**62)  # rows that explain nothing are not kept
    return unexplained, factor, False


def _sum_by(at: Tensor, terms: Tensor, count: int) -> Tensor:
    sums = torch.zeros(count, *terms.shape[1:], dtype=terms.dtype, device=terms.device)
    return sums.index_add_(0, at, terms).to("cpu", torch.float64)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below.clamp_min(1e-300), 1.0)
