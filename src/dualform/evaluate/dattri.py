"""Scores and ground truth in the shapes of dattri, for the metrics of `dattri.metric`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualform.errors import EvaluationError
from dualform.evaluate.scores import ScoresLike, by_position
from dualform.evaluate.truth import GroundTruth


def dattri_scores(scores: ScoresLike, samples: int) -> Tensor:
    """(training samples, test samples), by position: what a `dattri` attributor returns.

    >>> import numpy as np
    >>> dattri_scores(np.ones((5, 2)), samples=5).shape
    torch.Size([5, 2])
    """
    return torch.from_numpy(by_position(scores, samples))


def dattri_truth(truth: GroundTruth) -> tuple[Tensor, Tensor]:
    """Outputs (subsets, queries) and indices (subsets, size): what `dattri.metric.lds` takes.

    >>> import numpy as np
    >>> truth = GroundTruth(np.array([[True, False, True]]), np.zeros((1, 2, 4)))
    >>> outputs, indices = dattri_truth(truth)
    >>> outputs.shape, indices
    (torch.Size([1, 4]), tensor([[0, 2]]))
    """
    sizes = np.unique(truth.members.sum(1))
    if len(sizes) != 1:
        raise EvaluationError(
            f"dattri takes subsets of one size, these have {sizes.min():,} to {sizes.max():,}."
        )
    indices = np.nonzero(truth.members)[1].reshape(len(truth.members), -1)
    return torch.from_numpy(truth.outputs), torch.from_numpy(indices)
