"""Tallies: accounts side by side, and the factor of each at each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dualform.recording.probe import Evidence, Part

MISMATCH = 1000.0
"""How many roundings of their terms two probes may differ by."""
UNSCALED = 32.0
"""How many roundings a factor may differ from 1 and still be 1."""


@dataclass(frozen=True)
class Tally:
    """The probes of some accounts: those of the gradients, u, and those of the rows, w."""

    u: list[Tensor]
    """For each account (steps, numbers)."""
    w: list[Tensor]
    size: Tensor
    """(steps, accounts): how large the terms of w are."""
    touched: Tensor
    """(steps, accounts): whether the step changed the account at all."""
    rounding: Tensor
    """(accounts,): relative."""

    @classmethod
    def of(cls, accounts: Sequence[Evidence]) -> Tally:
        """Probes the rows of all accounts, and brings what they say into main memory at once."""
        parts = [account.parts() for account in accounts]
        said = iter(
            in_double([t for group in parts for part in group for t in (part.probe, part.size)])
        )
        sums = [_sums(account, group, said) for account, group in zip(accounts, parts, strict=True)]
        return cls(
            [account.u for account in accounts],
            [w for w, _ in sums],
            torch.stack([size for _, size in sums], 1),
            torch.stack([account.touched for account in accounts], 1),
            torch.tensor([account.rounding for account in accounts], dtype=torch.float64),
        )

    @cached_property
    def products(self) -> tuple[Tensor, Tensor, Tensor]:
        """(steps, accounts) each: u·w, w·w and the length of u."""
        pairs = list(zip(self.u, self.w, strict=True))
        return (
            torch.stack([(u * w).sum(1) for u, w in pairs], 1),
            torch.stack([w.square().sum(1) for w in self.w], 1),
            torch.stack([torch.linalg.vector_norm(u, dim=1) for u in self.u], 1),
        )

    def agrees(self, factor: Tensor) -> Tensor:
        """(steps, accounts): whether `u = κ w` to within rounding, with κ (steps, accounts)."""
        each = zip(self.u, self.w, factor.unbind(1), strict=True)
        gaps = [torch.linalg.vector_norm(u - k[:, None] * w, dim=1) for u, w, k in each]
        reach = self.size * factor.abs() + self.products[2]
        return (torch.stack(gaps, 1) <= MISMATCH * self.rounding * reach) | ~self.touched

    def own_factor(self) -> Tensor:
        """(steps, accounts): the κ that fits each account best."""
        return _ratio(*self.products[:2])

    def shared_factor(self) -> Tensor:
        """(steps,): the least-squares κ over all accounts, each weighted by how well it knows."""
        known = self.touched & (self.size > 0)
        weight = torch.where(known, (self.rounding * self.size) ** -2, 0.0)
        above, below = ((weight * product).sum(1) for product in self.products[:2])
        factor = _ratio(above, below)
        doubt = UNSCALED / below.clamp_min(1e-300).sqrt()
        return torch.where((factor - 1).abs() <= doubt, 1.0, factor)


def _sums(
    account: Evidence, parts: Sequence[Part], said: Iterator[Tensor]
) -> tuple[Tensor, Tensor]:
    """The rows' probe of each step (steps, numbers), and the size of its terms (steps,)."""
    w, size = torch.zeros_like(account.u), account.u.new_zeros(len(account.u))
    for part in parts:
        w[:, part.columns].index_add_(0, part.at, next(said))
        counts = account.active[part.at, part.columns.start]
        size.index_add_(0, part.at, next(said) * counts)
    return torch.where(account.active, w, 0.0), size


def settle_factors(evidence: Sequence[Evidence]) -> tuple[list[Evidence], Tensor, Tensor]:
    """Finds κ for each step and account: evidence, factors and agreement (steps, accounts).

    One κ for all accounts where it fits (clipping by global norm, loss scales), because together
    they determine it best; each account its own where not. An account that agrees with neither
    is tried without its earlier backward passes: `zero_grad` may have thrown those away.
    """
    tally = Tally.of(evidence)
    shared = tally.shared_factor()[:, None].expand_as(tally.size)
    fits, own = tally.agrees(shared), tally.own_factor()
    factors, agreed = torch.where(fits, shared, own), fits | tally.agrees(own)
    settled = list(evidence)
    for at, account in torch.nonzero(~agreed).tolist():
        settled[account], factors[at, account], agreed[at, account] = _without_discarded(
            settled[account], at, factors[at, account]
        )
    factors = torch.where(agreed & tally.touched, factors, 0.0)
    return [account.of_touched() for account in settled], factors, agreed


def _without_discarded(account: Evidence, at: int, factor: Tensor) -> tuple[Evidence, Tensor, bool]:
    for first in account.batches(at)[1:]:
        trial = account.from_batch(at, first)
        tally = Tally.of([trial])
        own = tally.own_factor()
        if bool(tally.agrees(own)[at, 0]):
            return trial, own[at, 0], True
    unexplained = account.from_batch(at, 2**62)  # rows that explain nothing are not kept
    return unexplained, factor, False


def in_double(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors as float64 in main memory; all in one transfer where they come from a GPU.

    >>> in_double([torch.ones(2), torch.zeros(1, 1)])
    [tensor([1., 1.], dtype=torch.float64), tensor([[0.]], dtype=torch.float64)]
    """
    if not any(t.is_cuda for t in tensors):
        return [t.double() for t in tensors]
    flat = torch.cat([t.reshape(-1) for t in tensors]).to("cpu", torch.float64)
    parts = torch.split(flat, [t.numel() for t in tensors])
    return [part.reshape(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below.clamp_min(1e-300), 1.0)
