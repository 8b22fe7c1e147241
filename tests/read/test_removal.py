"""A prediction without some samples: an account of them, and an estimate of retraining."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dualform.errors import UnknownSampleError
from dualform.testing import tiny_run


def test_both_answers_are_what_their_reads_say() -> None:
    """The account is the target less what `explain` says they added; each sample counts once."""
    run, model, x = tiny_run()
    removal = run.without([2, 5, 2], model, x[:3], target=1)
    explanation, influence = (ask(model, x[:3], target=1) for ask in (run.explain, run.influence))
    np.testing.assert_allclose(removal.before, model(x[:3])[:, 1].detach(), rtol=1e-5)
    for found, scores in ((removal.accounted, explanation), (removal.predicted, influence)):
        lost = scores.values[[scores.ids.index(2), scores.ids.index(5)]].sum(0)
        np.testing.assert_allclose(found, removal.before - lost, rtol=1e-10)


def test_without_everybody_the_account_is_what_was_there_before() -> None:
    run, model, x = tiny_run()
    removal, explanation = run.without(run.ids, model, x[:2]), run.explain(model, x[:2])
    left = explanation.initial + explanation.booked_by_step + explanation.remainder
    np.testing.assert_allclose(removal.accounted, left, atol=1e-12)


def test_ids_may_come_as_a_tensor() -> None:
    run, model, x = tiny_run()
    listed, given = (run.without(ids, model, x[:1]) for ids in ([2, 5], torch.tensor([2, 5])))
    np.testing.assert_array_equal(given.predicted, listed.predicted)
    assert given.ids == [2, 5]
    assert run.revisit(torch.tensor([5]))["2"].queries.names == ["5"]


def test_without_nobody_nothing_changes() -> None:
    run, model, x = tiny_run()
    removal = run.without([], model, x[:2])
    np.testing.assert_array_equal(removal.accounted, removal.before)
    np.testing.assert_array_equal(removal.predicted, removal.before)


def test_it_prints_what_each_column_means_and_converts() -> None:
    run, model, x = tiny_run()
    removal = run.without([0], model, x[:2], target=[0, 2])
    shown = " ".join(str(removal).split())
    assert "accounted: an account: the model's output less what these samples added" in shown
    assert "nothing is trained again" in shown
    assert "predicted: an estimate of what training without these samples" in shown
    assert list(removal.to_pandas().index) == ["0: output 0", "1: output 2"]


def test_unknown_samples_are_refused() -> None:
    run, model, _ = tiny_run()
    with pytest.raises(UnknownSampleError, match="sample 99 is not in this run; it has 8 samples"):
        run.without([99], model, torch.zeros(1, 4))
