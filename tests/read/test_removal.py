"""A prediction without some samples: forgotten, and as if they had never been there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.func import functional_call

from dualform.errors import UnknownSampleError
from dualform.testing import tiny_run


def test_both_answers_are_what_their_reads_say() -> None:
    run, model, x = tiny_run()
    removal = run.without([2, 5], model, x[:3], target=1)
    forgotten = functional_call(model, run.forget([2, 5]), (x[:3],))[:, 1]
    influence = run.influence(model, x[:3], target=1)
    lost = influence.values[[influence.ids.index(2), influence.ids.index(5)]].sum(0)
    np.testing.assert_allclose(removal.before, model(x[:3])[:, 1].detach(), rtol=1e-5)
    np.testing.assert_allclose(removal.forgotten, forgotten.detach(), rtol=1e-5)
    np.testing.assert_allclose(removal.predicted, removal.before - lost, rtol=1e-10)


def test_ids_may_come_as_a_tensor() -> None:
    run, model, x = tiny_run()
    listed, given = (run.without(ids, model, x[:1]) for ids in ([2, 5], torch.tensor([2, 5])))
    np.testing.assert_array_equal(given.predicted, listed.predicted)
    assert given.ids == [2, 5]
    assert run.revisit(torch.tensor([5]))["2"].queries.names == ["5"]


def test_without_nobody_nothing_changes() -> None:
    run, model, x = tiny_run()
    removal = run.without([], model, x[:2])
    np.testing.assert_allclose(removal.forgotten, removal.before, rtol=1e-5)
    np.testing.assert_array_equal(removal.predicted, removal.before)


def test_it_prints_what_each_column_means_and_converts() -> None:
    run, model, x = tiny_run()
    removal = run.without([0], model, x[:2], target=[0, 2])
    assert "nothing is trained again" in str(removal)
    assert "an estimate of what training without them" in str(removal)
    assert list(removal.to_pandas().index) == ["0: output 0", "1: output 2"]


def test_unknown_samples_are_refused() -> None:
    run, model, _ = tiny_run()
    with pytest.raises(UnknownSampleError, match="sample 99 is not in this run; it has 8 samples"):
        run.without([99], model, torch.zeros(1, 4))
