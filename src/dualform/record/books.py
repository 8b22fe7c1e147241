"""The parameters under the optimizer: what each step is about to do to them, and what it did."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.record.optimizers import BY_ROW, OBSERVED, UNTOUCHED, Rule
from dualform.record.plan import Account, Plan
from dualform.record.probe import settle_factors
from dualform.record.settle import Pages, Settler, Span, Step

PROBED_OUTPUTS = 128
"""Wider layers are probed at so many neighboring outputs, others after each parcel."""
PROBE_NUMBERS = 32
"""A probe of fewer numbers could agree by accident: narrow layers get several vectors."""


class Books:
    """Looks at gradients before a step, and at the parameters kept by step after it."""

    def __init__(self, plan: Plan, rule: Rule, optimizer: Optimizer) -> None:
        self._plan, self._rule, self._optimizer = plan, rule, optimizer
        self._parameters = list(plan.parameters.values())
        self._before: dict[str, Tensor] = {}
        self._by_row = set(range(len(plan.accounts)))
        self.unverified = set(self._by_row)
        """Accounts whose rows have not been held against a gradient yet."""
        generator = torch.Generator().manual_seed(0)  # its own: the user's stays untouched
        self.vectors = [self._vector(account, generator) for account in plan.accounts]
        self._span_start: dict[str, Tensor] = {}
        self.span()
        self._turn = 0
        self.look_elsewhere()
        self._regroup()

    def look_elsewhere(self) -> None:
        """Moves the probes of wide layers to other outputs."""
        self._turn += 1
        self._outputs = []
        for account in self._plan.accounts:
            width = self._plan.sources[account.sources[0]].stream.values
            first = min(self._turn * PROBED_OUTPUTS % width, max(0, width - PROBED_OUTPUTS))
            self._outputs.append(slice(first, first + PROBED_OUTPUTS))

    def by_step(self, accounts: set[int]) -> list[int]:
        """Keeps these accounts by step from now on; returns the sources nobody needs any more."""
        accounts = accounts & self._by_row
        self._by_row -= accounts
        self.unverified -= accounts
        self._arrange()
        return [source for index in accounts for source in self._plan.accounts[index].sources]

    def span(self) -> Span:
        """The parameters kept by row, as they were at the last call and as they are now."""
        before = self._span_start
        by_row = {name for at in self._by_row for name in self._plan.accounts[at].books}
        now = {n: self._plan.parameters[n].detach().clone() for n in by_row.union(before)}
        self._span_start = {name: now[name] for name in by_row}
        return before, now

    def hold(self) -> None:
        """Keeps the parameters that are booked by step as they are before the step."""
        if len(self._optimizer.param_groups) != self._group_count:
            self._regroup()
        self._before = {
            name: self._plan.parameters[name].detach().clone()
            for name, column in self._observed.items()
            if self._states[column]
        }

    def observe(self, number: int) -> Step:
        """What the optimizer is about to do, before it does it."""
        hyper = [self._rule.hyper(group) for group in self._optimizer.param_groups]
        states, probes = self._states_and_probes()
        return Step(number, probes, self._outputs, hyper, self._groups, states)

    def changes(self, states: Sequence[int]) -> dict[str, Tensor]:
        """What the step did to the parameters that are kept by step."""
        now = self._plan.parameters
        return {
            name: now[name].detach() - before
            for name, before in self._before.items()
            if states[self._observed[name]]
        }

    def verify(self, settler: Settler, step: Step, pages: Pages) -> set[int]:
        """Holds accounts that are new against their gradient; returns those that fail."""
        probes = [probe is not None and bool(probe.isfinite().all()) for probe in step.probes]
        seen = {index for index in self.unverified if probes[index]}
        if not seen:
            return set()
        _, _, agreed = settle_factors(settler.evidence([step], pages))
        self.unverified -= seen
        return {index for index in seen if not agreed[0, index]}

    def _vector(self, account: Account, generator: torch.Generator) -> Tensor:
        """(inputs, vectors): what the gradients of an account are multiplied with."""
        stream = self._plan.sources[account.sources[0]].stream
        parameter = self._plan.parameters[account.books[0]]
        count = min(stream.keys + 1, -(-PROBE_NUMBERS // stream.values))
        vectors = torch.randn(stream.keys, count, generator=generator)
        return vectors.to(parameter.device, parameter.dtype)

    def _arrange(self) -> None:
        """Sorts the books by how they are kept now."""
        accounts = self._plan.accounts
        by_row = {book for index in self._by_row for book in accounts[index].books}
        names = [book.name for book in self._plan.books]
        self._states = [
            UNTOUCHED if group < 0 else BY_ROW if name in by_row else OBSERVED
            for name, group in zip(names, self._groups, strict=True)
        ]
        self._observed = {name: at for at, name in enumerate(names) if name not in by_row}
        self._probed = [
            self._weights_and_biases(account) if index in self._by_row else ([], [])
            for index, account in enumerate(accounts)
        ]

    def _weights_and_biases(self, account: Account) -> tuple[list[int], list[int]]:
        """The columns of the account's weights, and of its biases."""
        sources = [self._plan.sources[index] for index in account.sources]
        forms = {name: form for source in sources for name, form in source.parameters.items()}
        columns = {book.name: at for at, book in enumerate(self._plan.books)}
        weights = [columns[name] for name, form in forms.items() if form == "outer"]
        return weights, [columns[name] for name, form in forms.items() if form == "sum"]

    def _regroup(self) -> None:
        """Finds each parameter's group; -1 where the optimizer does not have it."""
        groups = self._optimizer.param_groups
        index = {id(p): at for at, group in enumerate(groups) for p in group["params"]}
        self._groups = [index.get(id(parameter), -1) for parameter in self._parameters]
        self._group_count = len(groups)
        self._arrange()

    def _states_and_probes(self) -> tuple[list[int], list[Tensor | None]]:
        """How the step will touch each book, and the probes of the gradients it will use."""
        skipped = getattr(self._optimizer, "found_inf", None)  # a scaler's word to fused optimizers
        if skipped is not None and bool(skipped):
            return [UNTOUCHED] * len(self._states), [None] * len(self._probed)
        states = self._states
        gradients = [p.grad if s else None for p, s in zip(self._parameters, states, strict=True)]
        for at, gradient in enumerate(gradients):
            if gradient is None and states[at] != UNTOUCHED and self._rule.fields:
                states = [
                    UNTOUCHED if g is None else s for g, s in zip(gradients, states, strict=True)
                ]
                break
        probes = [
            _probe(gradients, weights, biases, vector, outputs)
            for (weights, biases), vector, outputs in zip(
                self._probed, self.vectors, self._outputs, strict=True
            )
        ]
        scale = getattr(self._optimizer, "grad_scale", None)  # fused optimizers unscale themselves
        if scale is not None:
            probes = [None if p is None else p / scale.to(p.device) for p in probes]
        return states, probes


def _probe(
    gradients: list[Tensor | None],
    weights: list[int],
    biases: list[int],
    vectors: Tensor,
    outputs: slice,
) -> Tensor | None:
    """`u = Σ G r + Σ g` over the weights and biases of an account, at some of the outputs."""
    if len(weights) == len(biases) == 1:  # the usual case in one operation
        weight, bias = gradients[weights[0]], gradients[biases[0]]
        if weight is not None and bias is not None:
            if len(bias) > PROBED_OUTPUTS:
                weight, bias = weight[outputs], bias[outputs]
            return torch.addmm(bias.unsqueeze(1), weight, vectors)
    parts = [g[outputs] @ vectors for at in weights if (g := gradients[at]) is not None]
    found = [g[outputs, None] for at in biases if (g := gradients[at]) is not None]
    parts += [bias.repeat(1, vectors.shape[1]) for bias in found]
    return torch.stack(parts).sum(0) if parts else None
