"""Our scores in the hands of dattri and quanda: their packages, their metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dattri.metric import lds as dattri_lds
from dattri.metric import mislabel_detection_auc
from tests.evaluate.tasks import SAMPLES, left_out, ridge
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dualform.errors import EvaluationError
from dualform.evaluate import GroundTruth, Retraining, lds, mislabeled
from dualform.evaluate.dattri import dattri_scores, dattri_truth
from dualform.read import Run, Scores
from dualform.testing import tiny_run


def test_dattri_s_lds_is_ours(tmp_path: Path) -> None:
    truth = Retraining(ridge, SAMPLES, tmp_path, subsets=20, seeds=2, workers=0).run()
    scores = left_out()
    order = np.random.default_rng(0).permutation(SAMPLES)
    shuffled = Scores(order.tolist(), scores[order], [str(q) for q in range(scores.shape[1])])
    theirs, _ = dattri_lds(dattri_scores(shuffled, SAMPLES), dattri_truth(truth))
    np.testing.assert_allclose(theirs.numpy(), lds(shuffled, truth).per_query)


def test_dattri_s_auc_is_ours() -> None:
    chance = np.random.default_rng(0)
    suspicion, flipped = chance.normal(size=50), chance.random(50) < 0.3
    theirs, _ = mislabel_detection_auc(torch.from_numpy(suspicion), torch.from_numpy(flipped))
    assert float(theirs) == pytest.approx(mislabeled(suspicion, flipped).auc, abs=1e-6)


def test_dattri_takes_subsets_of_one_size() -> None:
    members = np.array([[True, False, False], [True, True, False]])
    with pytest.raises(
        EvaluationError, match="dattri takes subsets of one size, these have 1 to 2"
    ):
        dattri_truth(GroundTruth(members, np.zeros((2, 1, 1))))


def last_layer(run: Run, model: nn.Module, x: Tensor, targets: Tensor) -> Scores:
    return run.spotlight(model, x, targets).last.samples()


def test_a_run_explains_for_quanda() -> None:
    pytest.importorskip("quanda", reason="needs numpy below 2 for its captum")
    from quanda.metrics.downstream_eval import ClassDetectionMetric, MislabelingDetectionMetric

    from dualform.evaluate.quanda import RunExplainer

    run, model, x = tiny_run()
    labels = model(x).argmax(1)
    data = TensorDataset(x, labels)
    explainer = RunExplainer(model, data, run, last_layer)
    found = explainer.explain(x[:3], labels[:3])
    expected = last_layer(run, model, x[:3], labels[:3]).tensor().T
    torch.testing.assert_close(found, expected.float())
    own = last_layer(run, model, x, labels).tensor().diagonal().float()
    torch.testing.assert_close(explainer.self_influence(batch_size=3), own)

    classes = ClassDetectionMetric(model, data, s=2)
    classes.update(explanations=found, test_targets=labels[:3])
    alike = labels[found.topk(2).indices] == labels[:3, None]
    assert classes.compute()["score"] == pytest.approx(float(alike.float().mean()))

    given = {"explainer_cls": RunExplainer, "expl_kwargs": {"run": run, "answer": last_layer}}
    for values, how in ((own, given), (run.suspicion().tensor()[:, 0], {})):
        ours = mislabeled(values.numpy(), np.arange(8) < 3)
        how = how or {"precomputed_self_influence": values}
        theirs = MislabelingDetectionMetric(model, data, [0, 1, 2], **how).compute()["curve"]
        np.testing.assert_allclose(theirs.numpy(), ours.curve[1][1:], rtol=1e-6)

    wrong = RunExplainer(model, data, run, lambda *_: np.ones((8, 2)))
    with pytest.raises(EvaluationError, match="scores for 2 queries, quanda asked about 3; give"):
        wrong.explain(x[:3], labels[:3])
