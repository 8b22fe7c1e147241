"""Layers that take time first, in models that take samples first, and the other way round."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.read.gradients import Gradients
from dualform.read.query_axis import query_axis
from dualform.read.targets import Asked

SAMPLES, STEPS = 6, 5
WIDTH = 4


class Inside(nn.Module):
    """A model whose order of samples and time may differ from that of the layer inside."""

    def __init__(self, kind: str, outside_first: bool, inside_first: bool, every: bool) -> None:
        super().__init__()
        self.kind, self.outside_first, self.inside_first = kind, outside_first, inside_first
        self.every, options = every, {"batch_first": inside_first}
        made = {
            "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, **options),
            "MultiheadAttention": lambda: nn.MultiheadAttention(WIDTH, 2, **options),
            "TransformerEncoder": lambda: nn.TransformerEncoderLayer(
                WIDTH, 2, 8, dropout=0.0, **options
            ),
        }
        self.lift, self.layer = nn.Linear(WIDTH, WIDTH), made[kind]()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        turned = self.outside_first != self.inside_first
        x = x.transpose(0, 1) if turned else x
        given = (x, x, x) if self.kind == "MultiheadAttention" else (x,)
        out = self.layer(*given)
        out = out[0] if isinstance(out, tuple) else out
        out = self.head(out.transpose(0, 1) if turned else out)
        return out if self.every else out.select(1 if self.outside_first else 0, -1)


def case(
    kind: str, outside_first: bool, inside_first: bool, every: bool, steps: int
) -> tuple[nn.Module, Tensor, int]:
    """A model in double precision, queries, and the dimension that counts them."""
    torch.manual_seed(0)
    model = Inside(kind, outside_first, inside_first, every).double().eval()
    shape = (SAMPLES, steps) if outside_first else (steps, SAMPLES)
    return model, torch.randn(*shape, WIDTH).double(), 0 if outside_first else 1


ORDERS = pytest.mark.parametrize("outside_first", [True, False])
LAYERS = pytest.mark.parametrize("inside_first", [True, False])
KINDS = pytest.mark.parametrize("kind", ["LSTM", "MultiheadAttention", "TransformerEncoder"])
LENGTHS = pytest.mark.parametrize("steps", [STEPS, SAMPLES, 1])
"""Among them as many steps as samples, where shapes tell nothing."""


@ORDERS
@LAYERS
@KINDS
@pytest.mark.parametrize(
    ("every", "steps"), [(True, STEPS), (True, SAMPLES), *((False, n) for n in (STEPS, SAMPLES, 1))]
)  # one step of every sample can be asked piece by piece either way
def test_queries_are_counted_where_they_are(
    kind: str, outside_first: bool, inside_first: bool, every: bool, steps: int
) -> None:
    model, x, axis = case(kind, outside_first, inside_first, every, steps)
    assert query_axis(model, x) == axis


@ORDERS
@LAYERS
@KINDS
@LENGTHS
def test_every_query_has_its_own_gradient(
    kind: str, outside_first: bool, inside_first: bool, steps: int
) -> None:
    """Against autograd, one query at a time."""
    model, x, axis = case(kind, outside_first, inside_first, False, steps)
    names = [name for name, _ in model.named_parameters()]
    here = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = Gradients(Asked(model, x, 1), names).integral([(1.0, here)], range(SAMPLES))
    for query in range(SAMPLES):
        alone = copy.deepcopy(model)
        alone(x.narrow(axis, query, 1))[0, 1].backward()
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name][query], parameter.grad, rtol=1e-9, atol=1e-11)


@KINDS
@pytest.mark.parametrize("steps", [STEPS, SAMPLES])
def test_a_model_with_time_first_inside_is_explained(kind: str, steps: int, tmp_path: Path) -> None:
    """Queries asked together get what they get alone; layers name them by the same number."""
    model, x, _ = case(kind, True, False, False, steps)
    made = torch.optim.SGD(model.parameters(), lr=0.05)
    with dualform.record(model.train(), made, tmp_path / "run") as recorder:
        for _ in range(4):
            recorder.samples(range(SAMPLES))
            model(x).square().sum().backward()
            made.step()
            made.zero_grad()
    run = dualform.open(tmp_path / "run")
    together = run.explain(model.eval(), x, target=1)
    alone = [run.explain(model, x[query : query + 1], target=1) for query in range(SAMPLES)]
    np.testing.assert_allclose(together.total, model(x)[:, 1].detach(), rtol=1e-9)
    joined = np.concatenate([one.values for one in alone], axis=1)
    assert np.abs(together.values - joined).max() <= 1e-6 * np.abs(joined).max()
    names = run.spotlight(model, x)["lift"].queries.names
    assert names == [f"{sample}[{at}]" for sample in range(SAMPLES) for at in range(steps)]
