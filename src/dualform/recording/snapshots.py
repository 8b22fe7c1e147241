"""What is kept beside the rows: weights, and what the optimizer remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.ledger.format import BUFFER, STATE
from dualform.optimizers import BY_ROW, Rule
from dualform.recording.plan import Plan, state_tensors
from dualform.recording.shards import Kept, Piece, is_sharded, local, part_of
from dualform.recording.transfer import host_copy


class Snapshots:
    """Copies the weights, with what the optimizer remembers where its rule needs that."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, plan: Plan, rule: Rule) -> None:
        self._model, self._optimizer, self._plan, self._rule = model, optimizer, plan, rule
        self._joined: set[int] = set()
        """The books that have made a step by row."""

    def is_due(self, states: Sequence[int]) -> bool:
        """Whether the rule needs what the optimizer remembers after this step."""
        joined = {at for at, state in enumerate(states) if state == BY_ROW} - self._joined
        self._joined |= joined
        return self._rule.keeps(self._optimizer, bool(joined))

    def weights(self) -> dict[str, Kept]:
        """Copies of them as they are now."""
        weights = snapshot(self._model)
        if not self._rule.by_numbers:
            weights |= memories(self._optimizer, self._plan, self._rule)
        return weights

    @property
    def nbytes(self) -> int:
        """What they take when they are kept."""
        kept = 1 if self._rule.by_numbers else 2 + len(self._rule.state)
        return kept * sum(parameter.nbytes for parameter in self._model.parameters())


def snapshot(model: nn.Module) -> dict[str, Kept]:
    """Copies of all parameters and persistent buffers, each once even where it is shared.

    They are in main memory: on a GPU they would be missed. Of what is sharded over processes, it is
    the part of this one.
    """
    seen: set[int] = set()
    copies: dict[str, Kept] = {}
    for name, tensor in state_tensors(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            copies[name] = _copy(tensor)
    return copies


def memories(optimizer: Optimizer, plan: Plan, rule: Rule) -> dict[str, Kept]:
    """What the optimizer remembers now: each parameter's buffer, and what else the rule needs."""
    found: dict[str, Kept] = {}
    for name, parameter in plan.parameters.items():
        for part, memory in rule.memory(optimizer, parameter).items():
            key = BUFFER if part == rule.buffer else f"{STATE}{part}:"
            found[key + name] = _copy(memory if is_sharded(memory) else memory.to_dense())
    return found


def _copy(tensor: Tensor) -> Kept:
    part, own = part_of(tensor), host_copy(local(tensor.detach()))
    return own if part is None else Piece(own, part)


def buffered(memory: Mapping[str, Kept]) -> list[str]:
    """The parameters that have a buffer."""
    return sorted(name.removeprefix(BUFFER) for name in memory if name.startswith(BUFFER))
