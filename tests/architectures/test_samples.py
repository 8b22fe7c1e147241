"""Sequences of unequal lengths, packed and filled up."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from tests.architectures.problems import (
    problem,
    train,
)
from tests.cases.architectures import SAMPLES, Batch, Packed

import dualform


def test_packed_sequences_are_the_padded_ones(tmp_path: Path) -> None:
    """Packing sorts the samples by length; their rows come back to them."""
    given = problem("LSTM, packed", torch.float64)
    padded, packed = Packed(pack=False).double(), copy.deepcopy(given.model)
    padded.load_state_dict(given.model.state_dict())
    for model, path in ((padded, tmp_path / "padded"), (packed, tmp_path / "packed")):
        train(given, model, "SGD", path=path)
    one, other = (dualform.open(tmp_path / name) for name in ("padded", "packed"))
    for sample in range(SAMPLES):
        for key, weight in one.subtract([sample]).items():
            torch.testing.assert_close(other.subtract([sample])[key], weight, rtol=1e-9, atol=1e-12)
    batch, _ = given.of(torch.tensor([2, 5, 0]))
    first, second = one.spotlight(padded, batch), other.spotlight(packed, batch)
    assert list(first) == list(second)
    for layer in first:
        asked, answered = first[layer].queries.names, second[layer].queries.names
        inside = [query for query in asked if _inside(query, batch)]
        a, b = first[layer].samples().values, second[layer].samples().values
        a, b = a[:, [*map(asked.index, inside)]], b[:, [*map(answered.index, inside)]]
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12)


def _inside(query: str, batch: Batch) -> bool:
    """Whether a query's time step is before the end of its sequence."""
    sample, _, at = query.rstrip("]").partition("[")
    return int(at) < int(batch["lengths"][int(sample)])
