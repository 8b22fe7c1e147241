"""Every row belongs to its sample and position; against errors that hooks and loops tell."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.architectures.problems import (
    Stepped,
)
from tests.cases.architectures import CASES, SAMPLES, TIME
from torch import Tensor
from torch.nn import functional as F


def contributions(made: Stepped, layer: str) -> tuple[Any, dict[tuple[int, int, int], float]]:
    """A layer's reading for two samples, and each row's amount by query, sample and position."""
    reading = made.run.spotlight(made.model, made.given.of(torch.tensor([0, 9]))[0])[layer]
    query = {name: at for at, name in enumerate(reading.names)}
    rows = reading.rows(10_000).rows
    found = {(query[row.query], row.id, row.position): row.value for row in rows}
    assert len(found) == len(rows), "no row twice"
    assert {row.step for row in rows} <= {1}
    return reading, found


def assert_rows(made: Stepped, layer: str, keys: Tensor, errors: Tensor, offset: float) -> None:
    """Every row (sample, position) gives `-rate (key·query + offset) error`."""
    reading, found = contributions(made, layer)
    inputs, units = reading.queries.inputs.double(), reading.directions.argmax(1)
    similarity = torch.einsum("spk,qk->qsp", keys, inputs) + offset
    amounts = -made.rate * similarity * errors[:, :, units].permute(2, 0, 1)
    expected = {
        (query, made.ids[sample], at): amounts[query, sample, at].item()
        for query, sample, at in torch.nonzero(amounts).tolist()
    }
    assert expected
    assert expected.keys() == found.keys()
    for row, amount in expected.items():
        assert math.isclose(found[row], amount, rel_tol=1e-9, abs_tol=1e-15), (layer, row)
    sums = np.zeros((len(reading.names), SAMPLES))
    for (query, sample, _), amount in expected.items():
        sums[query, sample] += amount
    samples = reading.samples()
    np.testing.assert_allclose(samples.values.T, sums[:, samples.ids], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "layer", "offset"),
    [
        ("LSTM", "head", 1.0),
        ("LSTM, packed", "head", 1.0),
        ("LSTM, time first", "head", 1.0),
        ("ViT", "encoder.layers.1.linear1", 1.0),
        ("ViT", "head", 1.0),
        ("ResNet", "head", 1.0),
        ("GPT-2", "transformer.h.0.attn.c_attn", 1.0),
        ("GPT-2", "transformer.h.1.attn.c_proj", 1.0),
        ("GPT-2", "transformer.h.1.mlp.c_fc", 1.0),
        ("LoRA on GPT-2", "base_model.model.transformer.h.1.attn.c_attn.lora_B.default", 0.0),
        ("LoRA on Linear", "base_model.model.encoder.lora_B.default", 0.0),
        ("LoRA on Linear", "base_model.model.head.modules_to_save.default", 1.0),
    ],
)
def test_rows_of_linear_maps_know_their_token(
    stepped: Callable[[str], Stepped], name: str, layer: str, offset: float
) -> None:
    made = stepped(name)
    keys, errors = made.seen[layer]
    if CASES[name].axis == 1:
        keys, errors = keys.transpose(0, 1), errors.transpose(0, 1)
    samples = len(made.ids)
    keys = keys.reshape(samples, -1, keys.shape[-1])
    assert_rows(made, layer, keys, errors.reshape(samples, -1, errors.shape[-1]), offset)


@pytest.mark.parametrize(
    ("name", "layer", "offset"),
    [
        ("ViT", "patches", 1.0),
        ("ResNet", "stem", 1.0),
        ("ResNet", "blocks.1.conv1", 0.0),
        ("ResNet", "blocks.1.around.0", 0.0),
    ],
)
def test_rows_of_convolutions_know_their_patch(
    stepped: Callable[[str], Stepped], name: str, layer: str, offset: float
) -> None:
    made = stepped(name)
    image, errors = made.seen[layer]
    conv: Any = made.model.get_submodule(layer)
    keys = F.unfold(image, conv.kernel_size, conv.dilation, conv.padding, conv.stride)
    assert_rows(made, layer, keys.transpose(1, 2), errors.flatten(2).transpose(1, 2), offset)


@pytest.mark.parametrize("name", ["LSTM", "LSTM, time first", "LSTM, packed"])
def test_rows_of_recurrent_layers_know_their_time_step(
    stepped: Callable[[str], Stepped], name: str
) -> None:
    """Against cells that are stepped by hand, each sample by itself."""
    made = stepped(name)
    twin: Any = copy.deepcopy(made.given.model).eval()
    parts = [unrolled(made, twin, sample) for sample in made.ids]
    for layer in ("ih_l0", "hh_l0", "ih_l1", "hh_l1"):
        keys, errors = (torch.stack([p[layer][side] for p in parts]) for side in (0, 1))
        assert_rows(made, f"lstm.{layer}", keys, errors, 1.0)


def unrolled(made: Stepped, twin: Any, sample: int) -> dict[str, tuple[Tensor, Tensor]]:
    """(time, …) keys and errors of each matrix for one sample."""
    batch, targets = made.given.of(torch.tensor([sample]))
    targets = targets.flatten()
    length = int(batch["lengths"]) if "lengths" in batch else TIME
    x = twin.embed(batch["words"].flatten())[:length]
    keys: dict[str, list[Tensor]] = {}
    gates: dict[str, list[Tensor]] = {}

    def linear(name: str, key: Tensor) -> Tensor:
        weight, bias = (getattr(twin.lstm, f"{kind}_{name}") for kind in ("weight", "bias"))
        gate = F.linear(key, weight, bias)
        gate.retain_grad()
        keys.setdefault(name, []).append(key.detach())
        gates.setdefault(name, []).append(gate)
        return gate

    for number in range(2):
        h = c = x.new_zeros(5)
        steps = []
        for at in range(length):
            sums = linear(f"ih_l{number}", x[at]) + linear(f"hh_l{number}", h)
            i, f, g, o = sums.chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            steps.append(h)
        x = torch.stack(steps)
    F.cross_entropy(twin.head(x), targets[:length], reduction="sum").div(16).backward()
    return {
        name: (_filled(keys[name]), _filled([gate.grad for gate in gates[name]])) for name in keys
    }


def _filled(steps: list[Any]) -> Tensor:
    found = torch.stack(steps)
    return F.pad(found, (0, 0, 0, TIME - len(found)))


def test_rows_of_attention_know_their_token(stepped: Callable[[str], Stepped]) -> None:
    """Against attention written out: its projections are no calls of modules."""
    made = stepped("ViT")
    for number in range(2):
        layer = f"encoder.layers.{number}.self_attn"
        attention: Any = made.given.model.get_submodule(layer)
        x, errors = made.seen[layer]
        projected = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        projected.retain_grad()
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in projected.chunk(3, 2))
        mixed = ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
        attention.out_proj(mixed).backward(errors)
        assert_rows(made, f"{layer}.out_proj", mixed.detach(), errors, 1.0)
        assert_rows(made, f"{layer}.in_proj", x, projected.grad, 1.0)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("LSTM", "embed"),
        ("LSTM, time first", "embed"),
        ("LSTM, packed", "embed"),
        ("GPT-2", "transformer.wpe"),
    ],
)
def test_rows_of_tables_know_their_token(
    stepped: Callable[[str], Stepped], name: str, layer: str
) -> None:
    made = stepped(name)
    places, errors = made.seen[layer]
    if layer == "transformer.wpe":  # read once, and added to what every sample's words give
        places, errors = places.expand(len(made.ids), -1), made.seen["transformer.wte"][1]
    if CASES[name].axis == 1:
        places, errors = places.T, errors.transpose(0, 1)
    reading, found = contributions(made, layer)
    units = reading.directions.argmax(1)
    expected = {
        (query, made.ids[sample], at): -made.rate * errors[sample, at, units[query]].item()
        for query, place in enumerate(reading.queries.inputs[:, 0].tolist())
        for sample, at in torch.nonzero(places == place).tolist()
    }
    expected = {row: amount for row, amount in expected.items() if amount}
    assert expected == pytest.approx(found, rel=1e-9, abs=1e-15)
