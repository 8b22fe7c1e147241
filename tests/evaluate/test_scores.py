"""What scores are worth: laws of LDS, detection, brittleness and rank correlation."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import rankdata, spearmanr
from sklearn.metrics import roc_auc_score
from tests.evaluate.tasks import QUERIES, SAMPLES, left_out, ridge, total

from dualform.errors import EvaluationError
from dualform.evaluate import (
    Brittleness,
    GroundTruth,
    Retraining,
    brittleness,
    completeness,
    lds,
    load_scores,
    mislabeled,
    rank_correlation,
    spearman,
)
from dualform.evaluate.ranks import Ranks
from dualform.read import Scores

mpl.use("Agg")
few_values = st.sampled_from([-1.0, 0.0, 0.5, 2.0])
columns = arrays(np.float64, (9, 3), elements=few_values)


def half_subsets(subsets: int, samples: int, seed: int = 0) -> np.ndarray:
    order = np.random.default_rng(seed).random((subsets, samples)).argsort(1)
    return order < samples // 2


@given(columns, columns)
def test_spearman_is_scipy_s(a: np.ndarray, b: np.ndarray) -> None:
    for found, x, y in zip(spearman(a, b), a.T, b.T, strict=True):
        constant = len(set(x)) == 1 or len(set(y)) == 1
        assert found == pytest.approx(0.0 if constant else spearmanr(x, y).statistic, abs=1e-12)


@given(columns, arrays(np.int64, 9, elements=st.integers(0, 3)))
def test_ranks_count_repeated_entries(values: np.ndarray, counts: np.ndarray) -> None:
    found = Ranks(values).counting(counts)
    for column, ranks in zip(values.T, found.T, strict=True):
        repeated = rankdata(np.repeat(column, counts))
        np.testing.assert_allclose(np.repeat(ranks, counts), repeated)


@settings(max_examples=25)
@given(arrays(np.float64, (12, 2), elements=st.integers(-50, 50).map(float), unique=True))
def test_additive_outputs_are_foretold_perfectly(scores: np.ndarray) -> None:
    """Outputs that are sums over members, however bent: LDS 1, and −1 for the opposite."""
    members = half_subsets(30, 12)
    truth = GroundTruth(members, np.exp(members @ scores / 50)[:, None])
    found = lds(scores, truth, resamples=20)
    assert found.per_query == pytest.approx([1.0, 1.0])
    assert found.interval == pytest.approx((1.0, 1.0))
    assert lds(-scores, truth, resamples=20).mean == pytest.approx(-1.0)


def test_exact_leave_out_effects_foretell_ridge_regression(tmp_path: Path) -> None:
    """The closed form, computed on all samples, ranks half-subsets almost as retraining does."""
    truth = Retraining(ridge, SAMPLES, tmp_path, subsets=60, seeds=1, workers=0).run()
    exact = lds(left_out(), truth)
    assert exact.mean > 0.95
    assert exact.interval[0] > 0.93
    chance = lds(np.random.default_rng(0).normal(size=(SAMPLES, QUERIES)), truth)
    assert abs(chance.mean) < 0.25
    assert chance.interval[0] < 0 < chance.interval[1]


def test_the_closed_form_is_leaving_one_out() -> None:
    everyone = np.arange(SAMPLES)
    for sample in (0, 17):
        without = ridge(np.delete(everyone, sample), 0)
        np.testing.assert_allclose(left_out()[sample], ridge(everyone, 0) - without)


def test_ceiling_is_what_a_perfect_prediction_gets() -> None:
    """Noise of known size: the true means correlate with the outputs as the ceiling says."""
    chance = np.random.default_rng(1)
    means = chance.normal(size=(100, 400))
    for seeds, noise in ((2, 0.5), (3, 1.0), (5, 2.0)):
        runs = means[:, None] + noise * chance.normal(size=(100, seeds, 400))
        truth = GroundTruth(half_subsets(100, 10), runs)
        assert truth.ceiling == pytest.approx(spearman(means, truth.outputs).mean(), abs=0.01)


def test_ceiling_of_one_seed_and_of_noise() -> None:
    chance = np.random.default_rng(0)
    members = half_subsets(40, 10)
    assert np.isnan(GroundTruth(members, chance.normal(size=(40, 1, 5))).ceiling)
    opposed = chance.normal(size=(40, 1, 5)) * np.array([1.0, -1.0])[None, :, None]
    assert GroundTruth(members, opposed).ceiling == 0.0


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.5])
def test_interval_holds_the_value_of_endless_subsets(noise: float) -> None:
    """Of 40 ground truths, the interval misses the long-run value of no more than 3."""
    chance, samples, queries = np.random.default_rng(5), 20, 30
    true = chance.normal(size=(samples, queries))
    scores = true + noise * chance.normal(size=(samples, queries))
    endless = half_subsets(4000, samples, seed=9)
    long_run = spearman(endless @ scores, endless @ true).mean()
    missed = 0
    for number in range(40):
        members = half_subsets(50, samples, seed=100 + number)
        low, high = lds(scores, GroundTruth(members, (members @ true)[:, None]), 100).interval
        missed += not low <= long_run <= high
    assert missed <= 3


def test_scores_are_put_in_order_by_their_ids() -> None:
    members = half_subsets(30, 4)
    values = np.array([[1.0], [2.0], [4.0], [8.0]])
    truth = GroundTruth(members, (members @ values)[:, None])
    shuffled = Scores([2, 0, 3, 1], values[[2, 0, 3, 1]], ["q"])
    assert lds(shuffled, truth).mean == pytest.approx(1.0)
    assert lds(values[[2, 0, 3, 1]], truth).mean < 0.9
    for ids in (["a", "b", "c", "d"], [1, 2, 3, 4], [0, 0, 1, 2]):
        with pytest.raises(EvaluationError, match="the ground truth is of positions 0 to 3; reco"):
            lds(Scores(ids, values, ["q"]), truth)


def test_scores_and_truth_must_go_together() -> None:
    truth = GroundTruth(half_subsets(5, 4), np.zeros((5, 1, 2)))
    cases = {
        "scores of 3 samples .*, but the ground truth has 4": np.ones((3, 2)),
        "scores for 1 queries, but the ground truth has 2": np.ones(4),
        r"scores of shape \(4, 0\); expected samples × queries": np.ones((4, 0)),
        "1 of 8 scores are not finite": np.array([[np.nan, 1.0], *[[1.0, 1.0]] * 3]),
    }
    for message, scores in cases.items():
        with pytest.raises(EvaluationError, match=message):
            lds(scores, truth)
    two = GroundTruth(half_subsets(2, 4), np.zeros((2, 1, 2)))
    with pytest.raises(EvaluationError, match="a ground truth of 2 subsets; a rank correlation ne"):
        lds(np.ones((4, 2)), two)


def test_scores_from_files(tmp_path: Path) -> None:
    values = np.arange(6.0).reshape(3, 2)
    np.save(tmp_path / "plain.npy", values)
    np.savez(tmp_path / "named.npz", values=values, ids=[2, 0, 1])
    np.savez(tmp_path / "other.npz", something=values)
    np.testing.assert_array_equal(load_scores(tmp_path / "plain.npy"), values)
    named = load_scores(tmp_path / "named.npz")
    assert isinstance(named, Scores)
    assert named.ids == [2, 0, 1]
    (tmp_path / "text.npy").write_text("words")
    for name in ("other.npz", "text.npy"):
        with pytest.raises(EvaluationError, match=f"{name}' has no scores"):
            load_scores(tmp_path / name)


@given(arrays(np.float64, 20, elements=few_values), st.integers(1, 2**20 - 2))
def test_auc_is_sklearn_s(suspicion: np.ndarray, bits: int) -> None:
    flipped = np.array([bool(bits >> at & 1) for at in range(20)])
    found = mislabeled(suspicion, flipped)
    assert found.auc == pytest.approx(roc_auc_score(flipped, suspicion), abs=1e-12)
    checked, share = found.curve
    assert (checked[0], share[0], checked[-1], share[-1]) == (0.0, 0.0, 1.0, 1.0)
    assert (np.diff(share) >= 0).all()


def test_what_is_found_by_looking() -> None:
    found = mislabeled([5.0, 4.0, 3.0, 2.0, 1.0], [True, False, True, False, False])
    assert [found.found(share) for share in (0.2, 0.4, 0.6)] == pytest.approx([0.5, 0.5, 1.0])
    assert "2 flipped of 5: AUC 0.8333" in repr(found)
    assert found.to_dict()["flipped"] == 2


def test_flipped_samples_by_id_or_by_mask() -> None:
    scores = Scores(["a", "b", "c"], np.array([[0.1], [0.9], [0.2]]), ["q"])
    for flipped in (["b"], {"b"}, np.array([False, True, False])):
        assert mislabeled(scores, flipped).auc == 1.0
    with pytest.raises(EvaluationError, match="flipped id 'x' is not among the 3 scores' ids, suc"):
        mislabeled(scores, ["x"])
    with pytest.raises(EvaluationError, match="flipped has 2 entries for 3 samples; give True or"):
        mislabeled(scores, [True, False])
    with pytest.raises(EvaluationError, match="flipped has 1 entries for 2 samples"):
        mislabeled([0.1, 0.2], [1])
    with pytest.raises(
        EvaluationError, match=r"a suspicion of shape \(2, 2\); expected one number"
    ):
        mislabeled(np.ones((2, 2)), [True, False])
    with pytest.raises(EvaluationError, match="2 of 2 samples are flipped; detection needs both"):
        mislabeled([0.1, 0.2], [True, True])


def test_brittleness_removes_the_highest_ranked() -> None:
    scores = np.stack([np.arange(10.0), -np.arange(10.0)], axis=1)
    found = brittleness(scores, 0, total, k=[1, 3], workers=0)
    np.testing.assert_array_equal(found.before, [45.0, 145.0, 245.0])
    np.testing.assert_array_equal(found.effect, [-9.0, -24.0])
    assert (found.random <= found.before).all()
    assert (found.control > found.effect).all()
    assert brittleness(scores, 1, total, k=2, workers=0).effect == pytest.approx([-1.0])


def test_random_removals_differ_between_seeds() -> None:
    found = brittleness(np.arange(1000.0), 0, total, k=5, seeds=4, workers=0)
    removed = found.before - found.random[0]
    assert len(set(removed)) == 4
    again = brittleness(np.arange(1000.0), 0, total, k=5, seeds=4, workers=0)
    np.testing.assert_array_equal(again.random, found.random)


def test_brittleness_that_cannot_be() -> None:
    with pytest.raises(EvaluationError, match="query=2: the scores have queries 0 to 1"):
        brittleness(np.ones((5, 2)), 2, total, k=1)
    for k in (0, 5, []):
        with pytest.raises(EvaluationError, match="remove at least 1 and at most 4 of 5 samples"):
            brittleness(np.ones((5, 2)), 0, total, k=k)
    with pytest.raises(EvaluationError, match="query=2, but the task returned 2 numbers"):
        brittleness(np.ones((5, 3)), 2, total, k=1, workers=0)


def test_rank_correlation_of_methods() -> None:
    chance = np.random.default_rng(0)
    a, b = chance.normal(size=(50, 4)), chance.normal(size=(50, 4))
    found = rank_correlation({"a": a, "b": b, "a bent": np.exp(a)})
    expected = np.mean([spearmanr(x, y).statistic for x, y in zip(a.T, b.T, strict=True)])
    assert found.matrix[0, 1] == pytest.approx(expected)
    assert found.matrix[0, 2] == pytest.approx(1.0)
    np.testing.assert_allclose(found.matrix, found.matrix.T)
    assert found.to_dict()["a"]["b"] == found.matrix[0, 1]
    assert list(found.to_pandas().index) == ["a", "b", "a bent"]
    with pytest.raises(EvaluationError, match=r"rank_correlation got 'a' \(50, 4\), 'b' \(3, 1\);"):
        rank_correlation({"a": a, "b": np.ones(3)})
    with pytest.raises(EvaluationError, match="rank_correlation got no methods"):
        rank_correlation({})


def test_completeness_of_explanations() -> None:
    found = completeness(np.array([1e-4, -5e-4, 0.02]))
    assert (found.median, found.worst) == (5e-4, 0.02)
    assert "66.7%" in repr(found)
    for errors in ([], [np.nan]):
        with pytest.raises(EvaluationError, match="give one finite relative error for each"):
            completeness(errors)


def test_results_print_and_plot() -> None:
    members = half_subsets(20, 6)
    truth = GroundTruth(members, np.random.default_rng(0).normal(size=(20, 3, 2)))
    found = lds(np.ones((6, 2)), truth)
    assert found.mean == 0.0  # all subsets have the same foretold output
    assert "LDS" in repr(found)
    assert found.plot().get_xlabel() == "LDS"
    assert "ceiling" in repr(truth)
    removed = Brittleness([2], np.ones(3), np.zeros((1, 3)), np.ones((1, 3)))
    assert "0 ± 0" in repr(removed)
    assert removed.plot().get_ylabel() == "output"
    assert removed.to_dict()["after"] == [[0.0, 0.0, 0.0]]
    assert mislabeled([1.0, 2.0], [False, True]).plot().get_ylabel() == "share of flipped found"
    mpl.pyplot.close("all")
