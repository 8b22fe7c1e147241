"""The parameters under the optimizer: what each step is about to do to them, and what it did."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.record.optimizers import BY_ROW, OBSERVED, UNTOUCHED, Rule
from dualform.record.plan import Account, Plan
from dualform.record.probe import settle_factors
from dualform.record.settle import Settler, Step
from dualform.record.watch import Capture


class Books:
    """Looks at gradients before a step, and at the parameters kept by step after it."""

    def __init__(self, plan: Plan, rule: Rule, optimizer: Optimizer) -> None:
        self._plan, self._rule, self._optimizer = plan, rule, optimizer
        self._parameters = list(plan.parameters.values())
        self._groups: list[int] = []
        self._group_count = -1
        self._before: dict[str, Tensor] = {}
        self._by_row = set(range(len(plan.accounts)))
        self.unverified = set(self._by_row)
        """Accounts whose rows have not been held against a gradient yet."""
        generator = torch.Generator().manual_seed(0)  # its own: the user's stays untouched
        self.vectors = [self._vector(account, generator) for account in plan.accounts]
        self._arrange()

    def by_step(self, accounts: set[int]) -> list[int]:
        """Keeps these accounts by step from now on; returns the sources nobody needs any more."""
        self._by_row -= accounts
        self.unverified -= accounts
        self._arrange()
        return [source for index in accounts for source in self._plan.accounts[index].sources]

    def observe(self, number: int, captures: list[Capture]) -> Step:
        """What the optimizer is about to do, before it does it."""
        groups = self._optimizer.param_groups
        if len(groups) != self._group_count:
            self._regroup()
        hyper = [self._rule.hyper(group) for group in groups]
        states = self._touched()
        self._before = {
            name: self._plan.parameters[name].detach().clone()
            for name, column in self._observed.items()
            if states[column]
        }
        return Step(number, captures, self._probes(states), hyper, self._groups, states)

    def changes(self) -> dict[str, Tensor]:
        """What the step did to the parameters that are kept by step."""
        before, self._before = self._before, {}
        now = self._plan.parameters
        return {name: now[name].detach() - old for name, old in before.items()}

    def verify(self, settler: Settler, step: Step) -> set[int]:
        """Holds accounts that are new against their gradient; returns those that fail."""
        probes = [probe is not None and bool(probe.isfinite().all()) for probe in step.probes]
        seen = {index for index in self.unverified if probes[index]}
        if not seen:
            return set()
        _, _, agreed = settle_factors(settler.evidence([step]))
        self.unverified -= seen
        return {index for index in seen if not agreed[0, index]}

    def _vector(self, account: Account, generator: torch.Generator) -> Tensor:
        source = self._plan.sources[account.sources[0]]
        parameter = self._plan.parameters[account.books[0]]
        vector = torch.randn(source.stream.keys, generator=generator)
        return vector.to(parameter.device, parameter.dtype)

    def _arrange(self) -> None:
        """Sorts the books by how they are kept now."""
        accounts = self._plan.accounts
        by_row = {book for index in self._by_row for book in accounts[index].books}
        names = [book.name for book in self._plan.books]
        self._states = [BY_ROW if name in by_row else OBSERVED for name in names]
        self._observed = {name: at for at, name in enumerate(names) if name not in by_row}
        self._probed = [
            self._weights_and_biases(account) if index in self._by_row else ([], [])
            for index, account in enumerate(accounts)
        ]

    def _weights_and_biases(self, account: Account) -> tuple[list[Tensor], list[Tensor]]:
        sources = [self._plan.sources[index] for index in account.sources]
        forms = {name: form for source in sources for name, form in source.parameters.items()}
        found: dict[str, list[Tensor]] = {"outer": [], "sum": []}
        for name, form in forms.items():
            found[form].append(self._plan.parameters[name])
        return found["outer"], found["sum"]

    def _regroup(self) -> None:
        """Finds each parameter's group; -1 where the optimizer does not have it."""
        groups = self._optimizer.param_groups
        index = {id(p): at for at, group in enumerate(groups) for p in group["params"]}
        self._groups = [index.get(id(parameter), -1) for parameter in self._parameters]
        self._group_count = len(groups)

    def _touched(self) -> list[int]:
        skipped = getattr(self._optimizer, "found_inf", None)  # a scaler's word to fused optimizers
        if skipped is not None and bool(skipped):
            return [UNTOUCHED] * len(self._states)
        return [
            UNTOUCHED if parameter.grad is None or group < 0 else state
            for parameter, group, state in zip(
                self._parameters, self._groups, self._states, strict=True
            )
        ]

    def _probes(self, states: list[int]) -> list[Tensor | None]:
        if not any(states):
            return [None] * len(self._probed)
        probes = [
            _probe(weights, biases, vector)
            for (weights, biases), vector in zip(self._probed, self.vectors, strict=True)
        ]
        scale = getattr(self._optimizer, "grad_scale", None)  # fused optimizers unscale themselves
        if scale is None:
            return probes
        return [None if probe is None else probe / scale.to(probe.device) for probe in probes]


def _probe(weights: list[Tensor], biases: list[Tensor], vector: Tensor) -> Tensor | None:
    """`u = Σ G r + Σ g` over the weights and biases of an account that have gradients."""
    probe: Tensor | None = None
    rest = [gradient for bias in biases if (gradient := bias.grad) is not None]
    for weight in weights:
        if weight.grad is not None and rest:
            probe = torch.addmv(rest.pop(), weight.grad, vector)
        elif weight.grad is not None:
            probe = torch.mv(weight.grad, vector)
    for gradient in rest:
        probe = gradient.clone() if probe is None else probe + gradient
    return probe
