"""What whole architectures answer: parts, times, and what is left without some samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.architectures.problems import (
    LOOP,
    NAMES,
    OPTIMIZERS,
    TOLERANCE,
    Stepped,
    Trained,
    seeing,
)
from tests.cases.architectures import CASES, TIME, Batch
from torch import Tensor, nn
from torch.nn import functional as F


def assert_output(reading: Any, output: Tensor, tolerance: float) -> None:
    """A reading's totals against a module's own output (samples, positions, width)."""
    units = reading.directions.argmax(1).tolist()
    samples, positions, _ = output.shape
    assert len(reading.queries.names) == samples * positions
    assert len(set(reading.queries.names)) == samples * positions
    places = [name.rstrip("]").partition("[") for name in reading.queries.names]
    actual = [
        output[int(sample), int(at or 0), unit].item()
        for (sample, _, at), unit in zip(places, units, strict=True)
    ]
    evidence = reading.samples().values.sum(0)
    total = reading.initial + evidence + reading.check.steps + reading.remainder
    np.testing.assert_allclose(total, actual, rtol=tolerance, atol=tolerance)
    assert np.abs(reading.remainder).max() <= tolerance


def module_outputs(made: Trained, batch: Batch) -> dict[str, Tensor]:
    """(samples, positions, width): what modules give in evaluation mode, told by hooks."""
    axis = CASES[made.given.name].axis
    model = copy.deepcopy(made.model).eval()
    with seeing(model) as seen:
        model(**batch)
    outputs = {}
    for name, (_, out) in seen.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            out = out.flatten(2).transpose(1, 2)
        elif axis == 1:
            out = out.transpose(0, 1)
        samples = next(iter(batch.values())).shape[axis]
        if len(out) == samples:
            outputs[name] = out.reshape(samples, -1, out.shape[-1])
    return outputs


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_parts_sum_to_what_the_modules_give(
    trained: Callable[..., Trained], name: str, dtype: torch.dtype, optimizer: str
) -> None:
    """Query by query, under the name of its sample and position, and without dropout."""
    made = trained(name, optimizer, dtype)
    batch = made.queries([5, 1, 8])
    made.model.train()
    spotlight = made.run.spotlight(made.model, batch)
    assert made.model.training
    outputs = module_outputs(made, batch)
    outputs |= {
        f"{layer}.out_proj": out for layer, out in outputs.items() if layer.endswith("self_attn")
    }
    checked = [layer for layer in spotlight if layer in outputs]
    assert len(checked) >= 2
    for layer in checked:
        assert_output(spotlight[layer], outputs[layer], {torch.float32: 3e-5}.get(dtype, 1e-10))


def test_a_position_table_is_asked_once(trained: Callable[..., Trained]) -> None:
    """It is read once for all samples; each sample's tokens are the queries."""
    made = trained("GPT-2", "SGD")
    reading = made.run.spotlight(made.model, made.queries([5, 1, 8]))["transformer.wpe"]
    table = made.model.get_submodule("transformer.wpe").weight.detach()
    assert_output(reading, table.expand(3, -1, -1), 1e-10)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["LSTM", "LSTM, time first", "LSTM, packed"])
def test_parts_sum_to_the_gates(trained: Callable[..., Trained], name: str, optimizer: str) -> None:
    """`W x + b` of every time step, with states found by stepping a cell."""
    made, ids = trained(name, optimizer), [5, 1, 8]
    spotlight = made.run.spotlight(made.model, made.queries(ids))
    model: Any = copy.deepcopy(made.model).eval()
    gates: dict[str, list[Tensor]] = {}
    for sample in ids:
        batch, _ = made.given.of(torch.tensor([sample]))
        length = int(batch["lengths"]) if "lengths" in batch else TIME
        x = model.embed(batch["words"].flatten())[:length]
        for number in range(2):
            x = gate_sums(model.lstm, number, x, gates)
    for layer, sums in gates.items():
        assert_output(spotlight[f"lstm.{layer}"], torch.stack(sums), 1e-10)


def gate_sums(lstm: Any, number: int, x: Tensor, gates: dict[str, list[Tensor]]) -> Tensor:
    """Steps one layer over (time, width); adds what its matrices give, and returns its states."""
    given = {
        kind: [getattr(lstm, f"{part}_{kind}_l{number}").detach() for part in ("weight", "bias")]
        for kind in ("ih", "hh")
    }
    cell = nn.LSTMCell(x.shape[1], 5, dtype=x.dtype)
    names = [f"{part}_{kind}" for kind in given for part in ("weight", "bias")]
    cell.load_state_dict(dict(zip(names, [*given["ih"], *given["hh"]], strict=True)))
    h = c = x.new_zeros(5)
    states = []
    for at in range(len(x)):
        states.append(h)
        h, c = cell(x[at], (h, c))
    for kind, keys in (("ih", x), ("hh", torch.stack(states))):
        weight, bias = given[kind]
        padded = F.pad(keys.detach(), (0, 0, 0, TIME - len(x)))
        gates.setdefault(f"{kind}_l{number}", []).append(F.linear(padded, weight, bias))
    return torch.stack([*states[1:], h])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_timelines_add_up(trained: Callable[..., Trained], name: str, optimizer: str) -> None:
    made = trained(name, optimizer)
    batch = made.queries([5, 1])
    layers = list(made.run.spotlight(made.model, batch))
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        timeline = made.run.timeline(made.model, batch, layer=layer)
        assert timeline.at.tolist() == list(range(1, LOOP.steps + 1))
        shares = np.abs(timeline.values).max(1)
        assert shares[1:].all()
        assert shares[0] or "lora_A" in layer, "an adapter's first step moves one side only"
        np.testing.assert_allclose(timeline.cumulative[-1], timeline.check.evidence, atol=1e-12)
        by_epoch = made.run.timeline(made.model, batch, layer=layer, by="epoch")
        np.testing.assert_allclose(by_epoch.values[0], timeline.values[:3].sum(0), atol=1e-12)
        assert len(by_epoch) == 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_subtracting_takes_away_what_the_spotlight_shows(
    trained: Callable[..., Trained], name: str, optimizer: str
) -> None:
    made, gone = trained(name, optimizer), [3, 8, 10]
    reading = made.run.spotlight(made.model, made.queries([5, 1])).last
    left, now = made.run.subtract(gone), made.run.state_dict()
    scores = reading.samples()
    shown = scores.values[[scores.ids.index(sample) for sample in gone]].sum(0)
    prefix = f"{reading.layer}."
    weight = now[f"{prefix}weight"] - left[f"{prefix}weight"]
    taken = reading.queries.inputs.double() @ weight.T
    if f"{prefix}bias" in now:
        taken = taken + now[f"{prefix}bias"] - left[f"{prefix}bias"]
    units = reading.directions.argmax(1)
    np.testing.assert_allclose(shown, taken[torch.arange(len(units)), units], atol=1e-12)
    assert np.abs(shown).max() > 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_revisited_as_they_were_seen(
    stepped: Callable[[str], Stepped], name: str
) -> None:
    """After one step: each layer's inputs of that step, through the weights of now."""
    made = stepped(name)
    spotlight = made.run.revisit([4, 9])
    twin = copy.deepcopy(made.given.model).eval()
    batch, _ = made.given.of(torch.tensor([4, 9]))
    with seeing(twin) as seen:
        twin(**batch)
    linear = [n for n in spotlight if n in seen and isinstance(twin.get_submodule(n), nn.Linear)]
    assert linear or name == "GPT-2"
    for layer in linear:
        keys = seen[layer][0]
        keys = keys.transpose(0, 1) if CASES[name].axis == 1 else keys
        reading = spotlight[layer]
        inputs = keys.reshape(-1, keys.shape[-1])
        torch.testing.assert_close(reading.queries.inputs, inputs, rtol=1e-9, atol=1e-12)
        given = made.model.get_submodule(layer)(inputs).detach()
        units = reading.directions.argmax(1)
        np.testing.assert_allclose(reading.total, given[torch.arange(len(units)), units])
        names = [f"{i}[{t}]" for i in (4, 9) for t in range(keys[0].numel() // keys.shape[-1])]
        assert reading.queries.names == (names if len(names) > 2 else ["4", "9"])
