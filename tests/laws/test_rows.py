"""What single rows add to the outputs of layers, against plain autograd on one sample at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.cases.case import LINEAR
from tests.cases.layers import CASES
from tests.cases.optimizers import OPTIMIZERS, trained
from tests.laws.grid import LOOP, Problem, problem
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dualform.read import Run, open_run
from dualform.testing import Loop

EXACT = 1e-12
Changes = dict[str, Tensor]

LINEAR_LAYERS = [name for name, case in CASES.items() if LINEAR in case.tags]
"""Single layers, whose output is linear in their parameters."""


@dataclass(frozen=True)
class Trained:
    """A recorded training with plain SGD, and the same by hand."""

    given: Problem
    run: Run
    steps: list[list[tuple[int, Changes]]]
    """For each step, its samples and what the gradients of their own losses changed."""

    @classmethod
    def on(cls, case: str, path: Path) -> Trained:
        given = problem(case, torch.float64)
        steps = list(own_changes(given.twin()))
        given.train("SGD", path)
        return cls(given, open_run(path), steps)

    def added(self, sample: int) -> Changes:
        """What a sample changed over all steps."""
        visits = [changes for step in self.steps for at, changes in step if at == sample]
        return {name: sum(visit[name] for visit in visits) for name in visits[0]}

    def applied(self, changes: Changes) -> Tensor:
        """(queries, outputs): changes of a linear layer's parameters, put to the first samples."""
        return as_rows(functional_call(self.given.model, changes, (self.given.x[:3],)))


def own_changes(given: Problem) -> Iterator[list[tuple[int, Changes]]]:
    """Trains with plain SGD, each sample's gradient taken on its own."""
    model = given.model
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rate = OPTIMIZERS["SGD"](trained(model)).param_groups[0]["lr"]
    for ids in LOOP.batches(len(given.x)):
        step = []
        for at in ids.tolist():
            loss = given.loss(model(given.x[[at]]), given.y[[at]])
            found = torch.autograd.grad(loss, list(parameters.values()))
            step.append((at, {n: -rate * g for n, g in zip(parameters, found, strict=True)}))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter += sum(changes[name] for _, changes in step)
        yield step


def as_rows(output: Tensor) -> Tensor:
    """(samples × positions, channels), with channels second in images and last elsewhere."""
    output = output.movedim(1, -1) if output.ndim == 4 or output.shape[1:] == (3, 5) else output
    return output.flatten(0, -2)


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative where values are large."""
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max().clamp_min(1.0))


@pytest.mark.parametrize("case", LINEAR_LAYERS)
def test_readings_are_the_samples_changes_applied(case: str, tmp_path: Path) -> None:
    found = Trained.on(case, tmp_path / "run")
    reading = found.run.spotlight(found.given.model, found.given.x[:3], output=1)["model"]
    scores = reading.samples()
    for sample, values in zip(scores.ids, scores.tensor(), strict=True):
        assert gap(values, found.applied(found.added(sample))[:, 1]) <= EXACT
    total = as_rows(found.given.model(found.given.x[:3]))[:, 1]
    assert gap(torch.from_numpy(reading.total), total) <= EXACT


@pytest.mark.parametrize("case", LINEAR_LAYERS)
def test_timelines_are_the_steps_changes_applied(case: str, tmp_path: Path) -> None:
    found = Trained.on(case, tmp_path / "run")
    timeline = found.run.timeline(found.given.model, found.given.x[:3], output=1)
    states = [found.run.at(step).state_dict() for step in range(LOOP.steps + 1)]
    for before, after, values in zip(states, states[1:], timeline.tensor(), strict=False):
        change = {name: after[name] - before[name] for name in before}
        assert gap(values, found.applied(change)[:, 1]) <= EXACT


POSITIONS = {
    "Linear": 1,
    "Linear, tokens": 3,
    "Conv1d": 5,
    "Conv2d, stride": 12,
    "Conv3d": 27,
    "ConvTranspose1d": 19,
    "Embedding": 5,
    "EmbeddingBag": 5,
    "RMSNorm": 3,
    "GroupNorm": 16,
    "GRU": 3,
    "LSTM, packed": 3,
    "TransformerEncoder": 3,
}
"""How many rows a sample leaves in each use of a layer: its tokens, patches or time steps."""


@pytest.mark.parametrize("case", POSITIONS)
def test_rows_know_sample_step_and_position(case: str, tmp_path: Path) -> None:
    found = problem(case, torch.float64)
    found.train("Adam", tmp_path / "run")
    visits = {(t, i) for t, ids in enumerate(LOOP.batches(8), start=1) for i in ids.tolist()}
    spotlight = open_run(tmp_path / "run").spotlight(found.model, found.x[:2])
    for reading in spotlight.values():
        assert len(reading.rows(5)) <= 5 * len(reading.names)
        rows = reading.rows(10_000).rows
        assert {(row.step, row.id) for row in rows} <= visits
        assert {row.position for row in rows} <= set(range(POSITIONS[case]))
        scores = reading.samples()
        summed = torch.zeros(len(scores.ids), len(reading.names), dtype=torch.float64)
        for row in rows:
            summed[scores.ids.index(row.id), reading.names.index(row.query)] += row.value
        assert gap(summed, scores.tensor()) <= 1e-10
    assert max(row.position for row in spotlight.last.rows(10_000).rows) == POSITIONS[case] - 1


def test_rows_of_a_convolution_are_patches(tmp_path: Path) -> None:
    """`- η e_p (x_p · q + 1)` for each position p, with patches unfolded by torch."""
    found = Trained.on("Conv2d", tmp_path / "run")
    given, start = found.given, found.run.at(0).state_dict()
    reading = found.run.spotlight(given.model, given.x[:1], output=2)["model"]
    query = patches(given.x[:1])[:, 7]
    first = [row for row in reading.rows(10_000).rows if row.step == 1 and row.query[:4] == "0[7]"]
    assert {(row.id, row.position) for row in first} == {
        (sample, at) for sample, _ in found.steps[0] for at in range(36)
    }
    for row in first:
        x, y = given.x[[row.id]], given.y[[row.id]]
        output = functional_call(given.model, start, (x,)).requires_grad_()
        (errors,) = torch.autograd.grad(given.loss(output, y), output)
        patch = patches(x)[:, row.position]
        expected = -0.3 * errors[0, 2].flatten()[row.position] * (patch @ query + 1)
        assert abs(row.value - float(expected)) <= EXACT * 10


def patches(x: Tensor) -> Tensor:
    """(channels × kernel, positions) of the case's convolution: 3 × 3, dilated, padded alike."""
    return F.unfold(x, 3, dilation=2, padding=2)[0]


def test_rows_of_a_recurrent_layer_are_time_steps(tmp_path: Path) -> None:
    """Each step's gates, written out; their gradients are the errors."""
    torch.manual_seed(0)
    given = problem("structures: BothWays", torch.float64)
    start = {name: p.detach().clone() for name, p in given.model.named_parameters()}
    given.train("SGD", tmp_path / "run", Loop(1, 6))
    reading = open_run(tmp_path / "run").spotlight(given.model, given.x[:1], output=7)
    ih = reading["layer.ih_l0"]
    sample = next(Loop(1, 6).batches(8))[0].item()
    rows = [row for row in ih.rows(100).rows if row.id == sample and row.query[:4] == "0[1]"]
    x = given.x[[sample]]
    gates = (x[0] @ start["layer.weight_ih_l0"].T + start["layer.bias_ih_l0"]).requires_grad_()
    loss = given.loss(_outputs(start, x, gates), given.y[[sample]])
    (errors,) = torch.autograd.grad(loss, gates)
    assert sorted(row.position for row in rows) == [0, 1, 2]
    for row in rows:
        inner = x[0, row.position] @ given.x[0, 1] + 1
        assert abs(row.value - float(-0.3 * errors[row.position, 7] * inner)) <= EXACT


def _outputs(state: Changes, x: Tensor, gates: Tensor) -> Tensor:
    """The case's outputs, the first layer's forward direction computed from its input gates."""
    h = c = torch.zeros(3, dtype=torch.float64)
    forward = []
    for part in gates:
        recurrent = state["layer.weight_hh_l0"] @ h + state["layer.bias_hh_l0"]
        i, f, g, o = (part + recurrent).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        forward.append(h)
    first = nn.LSTM(4, 3, bidirectional=True, batch_first=True).double()
    second = nn.LSTM(6, 3, bidirectional=True, batch_first=True).double()
    names = list(dict(first.named_parameters()))
    backward = functional_call(first, {n: state[f"layer.{n}"] for n in names}, (x,))[0][0, :, 3:]
    both = torch.cat([torch.stack(forward), backward], -1)[None]
    upper = {n: state["layer." + n.replace("l0", "l1")] for n in names}
    return functional_call(second, upper, (both,))[0]


def test_a_part_has_the_outputs_of_its_call(tmp_path: Path) -> None:
    given = problem("MultiheadAttention", torch.float64)
    given.train("SGD", tmp_path / "run")
    spotlight = open_run(tmp_path / "run").spotlight(given.model, given.x[:3])
    widths = {name: reading.queries.outputs.shape[1] for name, reading in spotlight.items()}
    assert widths["attention.in_proj[0:4]"] == 4
    assert widths["attention.in_proj[4:12]"] == 8
