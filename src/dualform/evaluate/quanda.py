"""A recorded run as an explainer of quanda: `pip install quanda`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dualform.errors import EvaluationError
from dualform.evaluate.scores import ScoresLike, by_position
from dualform.read import Run

try:
    from quanda.explainers import Explainer
except ImportError as error:
    raise ImportError(
        f"dualform.evaluate.quanda needs quanda ({error}); install it with: pip install quanda"
    ) from error

Answer: TypeAlias = Callable[[Run, nn.Module, Any, Any], ScoresLike]
"""`answer(run, model, x, targets)`: scores, samples × queries."""


class RunExplainer(Explainer):
    """Answers quanda's questions from a recorded run; nothing is computed on the training set.

    ```py
    from dualform.evaluate.quanda import RunExplainer

    def answer(run, model, x, targets):
        return run.spotlight(model, x, output=targets).last.samples()

    explainer = RunExplainer(model, train_set, run, answer)
    explainer.explain(x, targets)  # (queries, training samples)
    ```

    Its `self_influence` is the answer about each training sample, for itself. To find mislabeled
    ones, `run.suspicion()` is better and faster: `MislabelingDetectionMetric` takes it as
    `precomputed_self_influence`.

    Args:
        model: as it was at the end of the run.
        train_dataset: what it was trained on; the run's ids must be the positions in it.
        run: the recorded run.
        answer: `answer(run, model, x, targets)` gives `Scores`, or an array, samples × queries.
    """

    accepted_tasks = ("image_classification", "text_classification", "causal_lm")

    def __init__(
        self,
        model: nn.Module,
        train_dataset: Any,
        run: Run,
        answer: Answer,
        task: str = "image_classification",
        **others: Any,
    ) -> None:
        super().__init__(model, train_dataset, task=task, **others)
        self._run, self._answer = run, answer

    def explain(self, test_data: Any, targets: Sequence[int] | Tensor) -> Tensor:
        """(queries, training samples)."""
        scores = self._answer(self._run, self.model, test_data, targets)
        found = torch.from_numpy(by_position(scores, len(self.train_dataset))).T
        if len(found) != len(targets):
            raise EvaluationError(
                f"the answer has scores for {len(found)} queries, quanda asked about "
                f"{len(targets)}; give one column for each."
            )
        return found.float().contiguous().to(self.device)
