"""captum's TracInCP: Σ over checkpoints of η ∇loss(sample) · ∇output(query)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from captum.influence import TracInCP
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.attribution.tasks import TASKS, loss
from benchmarks.attribution.trained import Trained

SETTINGS: list[dict[str, Any]] = [{"every": 1}, {"every": 3}, {"every": 15}]
BEST: dict[str, dict[str, Any]] = {task: {"every": 5} for task in TASKS}
BATCH = 250
FAST = (nn.Linear, nn.Conv2d)


@dataclass(frozen=True)
class Reduced:
    """A loss in the form that captum asks for."""

    each: Callable[[Tensor, Tensor], Tensor]
    reduction: str

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        values = self.each(out, y)
        return values.sum() if self.reduction == "sum" else values


def scores(trained: Trained, work: Path, every: int) -> NDArray[np.float64]:
    """From the weights after every so many epochs, the last among them."""
    task, model = trained.task, trained.model()
    rate = task.optimizer(model.parameters()).param_groups[0]["lr"]
    fast = all(isinstance(m, FAST) for m in model.modules() if list(m.parameters(recurse=False)))
    reduction = "sum" if fast else "none"

    def load(model: nn.Module, state: dict[str, Tensor]) -> float:
        model.load_state_dict(state)
        return float(rate)

    method = TracInCP(
        model,
        DataLoader(TensorDataset(*task.samples()), batch_size=BATCH),
        trained.epochs()[::-1][::every],
        load,
        loss_fn=Reduced(loss, reduction),
        test_loss_fn=Reduced(lambda out, y: -task.output(out, y), reduction),
        sample_wise_grads_per_batch=fast,
    )
    influence: Tensor = method.influence(task.queries())
    return influence.double().numpy().T
