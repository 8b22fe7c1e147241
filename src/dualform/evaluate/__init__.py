"""Are scores right? LDS, mislabel detection, brittleness, completeness, rank correlation.

The ground truth is retraining without some of the samples: nothing in a run can replace it.

>>> import numpy as np
>>> from dualform.evaluate import GroundTruth, lds
>>> members = np.random.default_rng(0).random((40, 10)) < 0.5    # who was trained on
>>> outputs = members @ np.arange(10.0)                          # and what came out
>>> truth = GroundTruth(members, outputs[:, None, None])
>>> lds(np.arange(10.0), truth).mean
1.0
"""

from dualform.evaluate.datamodeling import LDS, lds
from dualform.evaluate.detection import Detection, mislabeled
from dualform.evaluate.explanations import Completeness, completeness
from dualform.evaluate.ranks import RankCorrelation, rank_correlation, spearman
from dualform.evaluate.removal import Brittleness, brittleness
from dualform.evaluate.retraining import Retraining
from dualform.evaluate.scores import load_scores
from dualform.evaluate.truth import GroundTruth

__all__ = [
    "LDS",
    "Brittleness",
    "Completeness",
    "Detection",
    "GroundTruth",
    "RankCorrelation",
    "Retraining",
    "brittleness",
    "completeness",
    "lds",
    "load_scores",
    "mislabeled",
    "rank_correlation",
    "spearman",
]
