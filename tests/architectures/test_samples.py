"""Where samples are hard to tell: packed sequences, time first, tokens chosen by a mask."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.architectures.models import WORDS, LanguageModel, Packed
from tests.architectures.problems import (
    SAMPLES,
    Batch,
    problem,
    recording,
    train,
)
from torch import Tensor, nn

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


def test_time_first_where_there_are_as_many_steps_as_samples(tmp_path: Path) -> None:
    """The shape does not say which dimension is time; the recurrent layer does."""
    torch.manual_seed(0)
    model = LanguageModel(batch_first=False, dropout=0.0).double()
    twin, drawn = copy.deepcopy(model), torch.randint(0, WORDS, (4, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with recording(model, sgd, tmp_path / "run") as name_samples:
        name_samples(torch.arange(4))
        model(drawn).square().sum().backward()
        sgd.step()
    twin(drawn[:, 1:2]).square().sum().backward()
    run = dualform.open(tmp_path / "run")
    for key, parameter in twin.named_parameters():
        share = run.subtract([1])[key] - run.state_dict()[key]
        torch.testing.assert_close(share, parameter.grad, rtol=1e-9, atol=1e-12, msg=key)


class Chosen(nn.Module):
    """A head on the tokens that a mask chooses, as masked language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.head(tokens[mask])


@pytest.mark.parametrize("lengths", [[1, 3], [1, 4], [2, 2]], ids=str)
def test_chosen_tokens_are_not_given_to_another_sample(tmp_path: Path, lengths: list[int]) -> None:
    """Where rows cannot be told apart by sample they are kept by step, never guessed."""
    torch.manual_seed(0)
    model, tokens = Chosen().double(), torch.randn(2, 5, 3, dtype=torch.float64)
    twin = copy.deepcopy(model)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with recording(model, sgd, tmp_path / "run") as name_samples:
        name_samples(torch.tensor([0, 1]))
        model(tokens, mask).square().sum().backward()
        sgd.step()
    run = dualform.open(tmp_path / "run")
    assert run.audit().remainder <= 1e-12
    if run.audit().coverage == 1.0:
        twin(tokens[:1], mask[:1]).square().sum().backward()
        share = run.subtract([0])["head.weight"] - run.state_dict()["head.weight"]
        torch.testing.assert_close(share, twin.head.weight.grad)
