"""What a run answers, against training that was stopped, left out or run without gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.cases import CASES
from tests.cases.case import REFUSED
from tests.cases.optimizers import OPTIMIZERS, trained
from tests.laws.conftest import Fit
from tests.laws.training import DECAYING, STEPS, fit, new_model, pairs
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

EXACT = 1e-12
PAIRS = pairs("layers", "uses", "structures", "architectures")
OTHERS = [name for name in (*DECAYING, "Shampoo", "SOAP") if name in OPTIMIZERS]
SOME = [
    f"layers: {name}"
    for name in (
        "Linear, tied",
        "Conv2d, groups",
        "Embedding, tied head",
        "BatchNorm2d",
        "Functional",
        "LSTM, packed",
        "TransformerEncoder",
        "LoRA",
        "Weight norm",
    )
]


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative where values are large."""
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max().clamp_min(1.0))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    PAIRS + [(name, other) for name in SOME for other in OTHERS if (name, other) not in PAIRS],
)
def test_a_run_at_a_step_is_the_training_stopped_there(
    fitted: Fit, name: str, optimizer: str
) -> None:
    run = fitted(name, optimizer, torch.float64).run

    def compare(step: int, model: nn.Module) -> None:
        read = run.at(step).state_dict()
        for book, weight in model.named_parameters():
            assert gap(read[book], weight) <= EXACT, (step, book)

    fit(name, optimizer, torch.float64, before_step=compare)


@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_a_run_has_the_whole_state(fitted: Fit, name: str, optimizer: str) -> None:
    """Shared weights under all their names, and buffers as well: another model can load it."""
    made = fitted(name, optimizer, torch.float64)
    other = made.case.make().double()
    other.load_state_dict(made.run.state_dict())
    for key, value in made.model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key


@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_without_all_samples_there_were_no_gradients(
    fitted: Fit, name: str, optimizer: str
) -> None:
    """What is left is the start, decayed by the optimizer. What is kept by step stays."""
    made = fitted(name, optimizer, torch.float64)
    model = new_model(made.case, torch.float64)
    stepped = OPTIMIZERS[optimizer](trained(model))
    for _ in range(STEPS):
        for parameter in trained(model):
            parameter.grad = torch.zeros_like(parameter)
        stepped.step()
    left = made.run.subtract(made.run.ids) if made.by_row else made.run.state_dict()
    after = dict(made.model.named_parameters())
    for book, weight in model.named_parameters():
        expected = weight if book in made.by_row else after[book]
        assert gap(left[book], expected) <= EXACT, book


@pytest.mark.parametrize(
    ("name", "optimizer"), [pair for pair in PAIRS if REFUSED not in CASES[pair[0]].tags]
)
def test_every_layer_can_be_asked(fitted: Fit, name: str, optimizer: str) -> None:
    """Little is left over of a layer's output, and what steps add is what samples add."""
    made = fitted(name, optimizer, torch.float64)
    asked = made.case.queries(made.case.batch(0, torch.float64))
    spotlight = made.run.spotlight(made.model, asked)
    for layer, reading in spotlight.items():
        size = reading.queries.outputs.abs().max().item() + np.abs(reading.initial).max()
        assert np.abs(reading.remainder).max() <= 1e-11 * (size + 1e-6), layer
    layers = list(spotlight)
    for layer in dict.fromkeys([*layers[:1], *layers[len(layers) // 2 :][:1], *layers[-1:]]):
        timeline = made.run.timeline(made.model, asked, layer=layer)
        evidence = spotlight[layer].samples().values.sum(0)
        np.testing.assert_allclose(timeline.cumulative[-1], evidence, atol=1e-12)
