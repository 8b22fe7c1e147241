"""Factors: the one number of each step that leads from what rows say to what gradients are.

The rows of an account and its gradients are probed alike (`probe.py`). Where several processes
train, each has rows of its own, and the gradient is the average over all of them: so the probes of
rows are added up over the processes before they are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.recording.accounts import Evidence
from dualform.recording.probe import in_double
from dualform.recording.processes import Line

MISMATCH = 1000.0
"""How many roundings of their terms two probes may differ by."""
UNSCALED = 32.0
"""How many roundings a factor may differ from 1 and still be 1."""


@dataclass(frozen=True)
class Tally:
    """The probes of some accounts: those of the gradients, u, and those of the rows, w."""

    at: list[Tensor]
    """For each account, the steps that touched it and probed it, of which u and w are."""
    u: list[Tensor]
    """For each account (its steps, numbers)."""
    w: list[Tensor]
    size: Tensor
    """(steps, accounts): how large the terms of w are."""
    touched: Tensor
    """(steps, accounts): whether the step changed the account at all."""
    rounding: Tensor
    """(accounts,): relative."""

    @classmethod
    def of(cls, accounts: Sequence[Evidence], line: Line) -> Tally:
        """Probes the rows of all accounts, and brings what they say into main memory at once.

        Of several processes, w is the average.
        """
        parts = [account.parts() for account in accounts]
        said = iter(
            in_double([t for group in parts for part in group for t in (part.probe, part.size)])
        )
        steps = [torch.nonzero(account.touched).flatten() for account in accounts]
        ws, sizes = [], []
        for account, group, own in zip(accounts, parts, steps, strict=True):
            place = torch.zeros(len(account.u), dtype=torch.long)
            place[own] = torch.arange(len(own))
            w, size = torch.zeros_like(account.u[own]), account.u.new_zeros(len(account.u))
            for part in group:
                w[:, part.columns].index_add_(0, place[part.at], next(said))
                size.index_add_(0, part.at, next(said))
            ws.append(w / line.of)
            sizes.append(size / line.of)
        whole, *ws = line.total([torch.stack(sizes, 1), *ws])
        return cls(
            steps,
            [account.u[own] for account, own in zip(accounts, steps, strict=True)],
            ws,
            whole,
            torch.stack([account.touched for account in accounts], 1),
            torch.tensor([account.rounding for account in accounts], dtype=torch.float64),
        )

    @cached_property
    def products(self) -> tuple[Tensor, Tensor, Tensor]:
        """(steps, accounts) each: u·w, w·w and the length of u."""
        pairs = list(zip(self.u, self.w, strict=True))
        return (
            self._by_step([(u * w).sum(1) for u, w in pairs]),
            self._by_step([w.square().sum(1) for w in self.w]),
            self._by_step([torch.linalg.vector_norm(u, dim=1) for u in self.u]),
        )

    def _by_step(self, found: Sequence[Tensor]) -> Tensor:
        """(steps, accounts): what was found at each account's own steps, 0 at others."""
        whole = torch.zeros_like(self.size)
        for account, (at, numbers) in enumerate(zip(self.at, found, strict=True)):
            whole[at, account] = numbers
        return whole

    def agrees(self, factor: Tensor) -> Tensor:
        """(steps, accounts): whether `u = κ w` to within rounding, with κ (steps, accounts)."""
        each = zip(self.u, self.w, self.at, factor.unbind(1), strict=True)
        gaps = [torch.linalg.vector_norm(u - k[at, None] * w, dim=1) for u, w, at, k in each]
        reach = self.size * factor.abs() + self.products[2]
        return (self._by_step(gaps) <= MISMATCH * self.rounding * reach) | ~self.touched

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


def find_factors(evidence: Sequence[Evidence], line: Line) -> tuple[list[Evidence], Tensor, Tensor]:
    """Finds κ for each step and account: evidence, factors and agreement (steps, accounts).

    One κ for all accounts where it fits (clipping by global norm, loss scales), because together
    they determine it best; each account its own where not. An account that agrees with neither
    is tried without its earlier backward passes: `zero_grad` may have thrown those away.
    """
    chosen, found = list(evidence), Fit.of(evidence, line)
    if not bool(found.agreed.all()):
        for at, account in torch.nonzero(~found.agreed).tolist():
            chosen[account] = _without_discarded(chosen[account], at, line)
        found = Fit.of(chosen, line)
    unprobed = torch.stack([account.unprobed for account in chosen], 1)
    uniform = found.is_shared.all(0)  # where probed, all accounts had one factor
    factors = torch.where(unprobed, found.shared, found.factors)
    agreed = torch.where(unprobed, uniform[None].expand_as(unprobed), found.agreed)
    factors = torch.where(agreed & (found.touched | unprobed), factors, 0.0) / line.of
    return [account.of_touched() for account in chosen], factors, agreed


class Fit(NamedTuple):
    """The factors that lead from rows to gradients; all (steps, accounts)."""

    shared: Tensor
    """The one κ that fits all accounts of a step best."""
    factors: Tensor
    """That, where it fits; else the account's own."""
    is_shared: Tensor
    """Whether the shared one fits, or there is nothing to fit."""
    agreed: Tensor
    """Whether one of the two does."""
    touched: Tensor
    """Whether the step changed the account, and it was probed."""

    @classmethod
    def of(cls, evidence: Sequence[Evidence], line: Line) -> Fit:
        """Compares what rows and gradients say."""
        tally = Tally.of(evidence, line)
        shared = tally.shared_factor()[:, None].expand_as(tally.size)
        fits, own = tally.agrees(shared), tally.own_factor()
        return cls(
            shared,
            torch.where(fits, shared, own),
            fits | ~tally.touched,
            fits | tally.agrees(own),
            tally.touched,
        )


def _without_discarded(account: Evidence, at: int, line: Line) -> Evidence:
    """The account without the passes of a step that were thrown away before others came.

    Where no pass explains the gradient, it has no rows of that step.
    """
    batches = account.batches(at)
    passes = max(count for (count,) in line.numbers([len(batches)]))
    batches += [2**62] * (passes - len(batches))  # a process may have seen fewer
    for first in batches[1:]:
        trial = account.from_batch(at, first)
        tally = Tally.of([trial], line)
        if bool(tally.agrees(tally.own_factor())[at, 0]):
            return trial
    return account.from_batch(at, 2**62)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below.clamp_min(1e-300), 1.0)
