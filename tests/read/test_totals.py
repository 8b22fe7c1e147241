"""What a reading calls the layer's output is what the layer gives, and its parts add up to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases.layers import CASES
from tests.laws.grid import Problem, problem
from tests.told import told
from torch import Tensor, nn

import dualform
from dualform.read import Run
from dualform.read.scores import BY_STEP
from dualform.testing import Loop, train

CHANNELS_SECOND = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.GroupNorm,
    nn.InstanceNorm2d,
)
LAYERS = (nn.Linear, *CHANNELS_SECOND, nn.LayerNorm, nn.RMSNorm, nn.Embedding)
REFUSED = {"Embedding, max_norm"}
EXACT = 1e-9


def seen_outputs(model: nn.Module, x: Any) -> dict[str, Tensor]:
    """What every layer gives, one row for each position of each sample; of its last call."""
    found: dict[str, Tensor] = {}

    def note(name: str, module: nn.Module, output: Tensor) -> None:
        if isinstance(module, CHANNELS_SECOND):
            output = output.movedim(1, -1)
        dims = len(module.normalized_shape) if hasattr(module, "normalized_shape") else 1
        found[name] = output.detach().clone().flatten(output.ndim - dims)

    hooks = [
        module.register_forward_hook(lambda m, _, out, name=name: note(name, m, out))
        for name, module in model.named_modules()
        if isinstance(module, LAYERS)
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return {name: out.reshape(-1, out.shape[-1]) for name, out in found.items()}


def assert_totals(run: Run, model: nn.Module, x: Any) -> int:
    """Every layer's reading against what the layer gives; how many could be compared."""
    model.eval()
    expected, compared = seen_outputs(model, x), 0
    spotlight = run.spotlight(model, x, output=0)
    for name, reading in spotlight.items():
        check = reading.check
        parts = check.initial + check.evidence + check.steps + check.remainder
        np.testing.assert_allclose(parts, check.total, atol=1e-12)
        size = np.abs(check.total).max() + np.abs(check.initial).max()
        assert np.abs(reading.remainder).max() <= 1e-6 * size, name
        real = expected.get(name, torch.zeros(0))
        if len(real) == len(reading.names):
            np.testing.assert_allclose(reading.total, real[:, 0], rtol=EXACT, atol=EXACT)
            np.testing.assert_allclose(reading.queries.outputs, real, rtol=EXACT, atol=EXACT)
            compared += 1
    return compared


FREEZE = {
    "nothing": lambda p: False,
    "matrices": lambda p: p.ndim > 1,
    "vectors": lambda p: p.ndim < 2,
}


def frozen_problem(case: str, frozen: str) -> tuple[Problem, list[nn.Parameter]]:
    """A case of the grid with some parameters frozen, and those that are not."""
    given = problem(case, torch.float64)
    for parameter in given.model.parameters():
        parameter.requires_grad_(parameter.requires_grad and not FREEZE[frozen](parameter))
    return given, [p for p in given.model.parameters() if p.requires_grad]


TRAINED = [
    (case, frozen)
    for case in CASES
    if case not in REFUSED
    for frozen in FREEZE
    if frozen_problem(case, frozen)[1]
]
"""Where anything is left to be trained."""


@pytest.mark.parametrize(("case", "frozen"), TRAINED)
def test_the_total_is_the_layers_own_output(case: str, frozen: str, tmp_path: Path) -> None:
    given, trained = frozen_problem(case, frozen)
    made, loop = torch.optim.SGD(trained, lr=0.01), Loop(steps=3, batch=6)
    with told(tmp_path / "run"):
        train(given.model, made, given.x, given.y, loop, tmp_path / "run", given.loss)
    run = dualform.open(tmp_path / "run")
    compared = assert_totals(run, given.model, given.x[:3])
    hooked = seen_outputs(given.model, given.x[:3])
    assert compared or not hooked.keys() & set(run.layers) or case == "Linear, tied"


class Computed(nn.Module):
    """A layer whose weight, or bias, is made of other parameters."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
        self.gain = nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * self.gain[:, None] if self.which == "weight" else self.weight
        bias = self.bias * self.gain if self.which == "bias" else self.bias
        return nn.functional.linear(x, weight, bias).relu_()


@pytest.mark.parametrize("which", ["weight", "bias"])
@pytest.mark.parametrize("trained", [True, False])
def test_computed_weights_are_part_of_the_output(which: str, trained: bool, tmp_path: Path) -> None:
    """As their share of what was there before, unless training changed what they are made of."""
    torch.manual_seed(0)
    model, x = Computed(which).double(), torch.randn(8, 4).double()
    other = model.bias if which == "weight" else model.weight
    for parameter in model.parameters():
        parameter.requires_grad_(trained or parameter is other)
    made = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with told(tmp_path / "run"):
        train(model, made, x, torch.randn(8, 3).double(), Loop(steps=4, batch=4), tmp_path / "run")
    run = dualform.open(tmp_path / "run")
    reading = run.spotlight(model.eval(), x[:3], output=1)[run.layers[-1]]
    weight = model.weight * model.gain[:, None] if which == "weight" else model.weight
    bias = model.bias * model.gain if which == "bias" else model.bias
    expected = nn.functional.linear(x[:3], weight, bias)[:, 1].detach()
    np.testing.assert_allclose(reading.total, expected, rtol=EXACT)
    assert (np.abs(reading.check.steps) > 0).all() == trained
    assert (BY_STEP in str(reading)) == trained


def test_images_of_another_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)
    )
    model[0].weight.requires_grad_(False)
    model, x = model.double(), torch.randn(8, 2, 6, 6).double()
    made = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with told(tmp_path / "run"):
        train(model, made, x, torch.randn(8, 2).double(), Loop(steps=4, batch=4), tmp_path / "run")
    run = dualform.open(tmp_path / "run")
    assert assert_totals(run, model, torch.randn(2, 2, 9, 7).double()) == 2


def test_of_a_training_sample_only_the_recorded_offset_is_known(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(8, 4)
    model[2].weight.requires_grad_(False)
    made = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with told(tmp_path / "run"):
        train(model, made, x, torch.randn(8, 2), Loop(steps=4, batch=4), tmp_path / "run")
    found = dualform.open(tmp_path / "run").revisit([0], output=1)
    assert "layer 2: what its recorded offset adds" in str(found["2"])
    assert "layer 0: its output" in str(found["0"])
    assert found["2"].total == pytest.approx(model[2].bias[1].item())
