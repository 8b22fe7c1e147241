"""A whole network's output as an account of the training samples: parts and sums."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases.optimizers import OPTIMIZERS
from tests.in_turn import in_turn
from tests.read.conftest import Recorded
from tests.told import told
from torch import Tensor, nn

import dualform
from dualform.memory.blocks import from_matrix, matrix_shape
from dualform.read import explain, path, targets
from dualform.read.contributions import row_sums
from dualform.read.explain import Explanation
from dualform.read.gradients import Gradients
from dualform.read.grouping import ByPosition, BySample, ByStep, Grouping
from dualform.read.samples_matrix.matrix import SamplesMatrix, times
from dualform.read.targets import Asked
from dualform.read.weights import reconstruct, row_parts

MANY = [
    name
    for name in ("SGD, Nesterov", "AdamW, amsgrad", "Adafactor", "Lion", "Muon", "Shampoo", "SOAP")
    if name in OPTIMIZERS
]
STATEFUL = [name for name in ("AdamW, amsgrad", "Shampoo", "SOAP") if name in OPTIMIZERS]
STREAMS = (
    "Linear, tied",
    "Functional",
    "Embedding, tied head",
    "MultiheadAttention",
    "Conv2d, groups",
    "ConvTranspose2d, groups",
    "Einsum",
    "Experts",
    "Spectral norm",
    "Weight norm",
    "Weight norm, Conv2d",
)
"""Books with several streams, parts of a parameter, other views of it, groups, shared matrices."""
ROUNDING = 1e-6
"""Columns are held in float32."""

Make = Callable[..., Any]


def total(output: Tensor) -> Tensor:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output)
    return (output * weights).sum()


def close(one: Any, other: Any, tolerance: float = ROUNDING) -> bool:
    """Equal, relative to the largest of them."""
    one, other = np.asarray(one), np.asarray(other)
    return bool(np.abs(one - other).max() <= tolerance * np.abs(other).max())


def assert_sum(made: Any, explanation: Explanation, tolerance: float) -> None:
    """The parts add up; the remainder is what integration, books and rounding left, no more."""
    check, (questions,) = explanation.check, explanation.questions
    assert check is not None
    parts = explanation.initial + explanation.values.sum(0) + check.steps + explanation.remainder
    np.testing.assert_allclose(parts, explanation.total, rtol=0, atol=1e-12)
    before = {n: w for n, w in made.run.at(0).state_dict().items() if n in questions.directions}
    assert (explanation.completeness <= tolerance).all()
    books = reconstruct(made.run._accounting)
    left = {n: made.run.state_dict()[n].double() - book for n, book in books.items()}
    gone = made.along(questions.directions, left).numpy()
    changed = {n: made.run.state_dict()[n] - w for n, w in before.items()}
    explained = made.along(questions.directions, changed).numpy()
    gross = np.abs(explanation.values).sum(0)
    bound = explanation.completeness * np.abs(explained) * 1.01 + np.abs(gone) + ROUNDING * gross
    assert (np.abs(explanation.remainder) <= bound + 1e-12).all()


@pytest.mark.parametrize("optimizer", MANY)
def test_a_score_is_what_is_missing_once_the_sample_is_subtracted(
    optimizer: str, recorded: Make
) -> None:
    made = recorded(optimizer)
    found = made.run.explain(made.model, made.x[:3], target=1)
    assert close(found.values, made.account(found))
    assert_sum(made, found, 1e-3)
    np.testing.assert_allclose(found.total, made.model(made.x[:3])[:, 1].detach(), rtol=1e-12)


@pytest.mark.parametrize("case", STREAMS)
@pytest.mark.parametrize("optimizer", ["SGD, Nesterov", "AdamW, amsgrad"])
def test_accounts_of_parameters_used_in_several_ways(
    case: str, optimizer: str, recorded_case: Make
) -> None:
    made = recorded_case(case, optimizer)
    found = made.run.explain(made.model, made.x[:2], total)
    assert close(found.values, made.account(found))
    assert_sum(made, found, 1e-3)


@pytest.mark.parametrize(("activation", "tolerance"), [(nn.Tanh, 1e-8), (nn.ReLU, 1e-3)])
def test_completeness(activation: type[nn.Module], tolerance: float, recorded: Make) -> None:
    """Smooth networks to nearly all digits; kinks within what is asked."""
    made = recorded("SGD, Nesterov", activation)
    found = made.run.explain(made.model, made.x, target=2, tolerance=tolerance)
    assert_sum(made, found, tolerance)


def test_only_what_misses_a_change_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kink costs two panels a halving; a change that is lost in rounding costs nothing."""
    sizes: list[int] = []
    looked = Gradients.integral

    def counted(self: Gradients, nodes: Any, queries: Any) -> dict[str, Tensor]:
        sizes.append(len(queries))
        return looked(self, nodes, queries)

    monkeypatch.setattr(Gradients, "integral", counted)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU()).double()
    ends = ({"0.weight": torch.tensor([[w]]).double()} for w in (-1 / 3, 1.0))
    x = torch.tensor([[1.0], [-1.0], [0.0]]).double()
    found = path.along_line(Asked(model, x, 0), *ends, range(3), tolerance=1e-4)
    torch.testing.assert_close(found.final - found.initial, torch.tensor([1.0, -1 / 3, 0]).double())
    assert (found.completeness <= 1e-4).all()
    assert sizes[0] == 3
    assert sum(sizes) < 2 * 2 * path.HALVINGS
    sizes.clear()
    wide = nn.Linear(50, 1)
    close_by = ({n: p.detach() * w for n, p in wide.named_parameters()} for w in (1, 1 + 2e-7))
    path.along_line(Asked(wide, torch.ones(4, 50), 0), *close_by, range(4), tolerance=1e-3)
    assert sizes == [4]
    sizes.clear()
    broken = {n: torch.full_like(p, torch.nan) for n, p in wide.named_parameters()}
    last = {n: p.detach() for n, p in wide.named_parameters()}
    path.along_line(Asked(wide, torch.ones(4, 50), 0), broken, last, range(4), tolerance=1e-3)
    assert sizes == [4]  # halves of what is no number are none either


def test_the_trapezoidal_rule_comes_near_with_its_panels() -> None:
    """Both rules average the same gradients: of 64 panels the error is a 1/4,096 of that of one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    last = {name: p.detach() for name, p in model.named_parameters()}
    first = {name: 0.2 * p for name, p in last.items()}
    asked = Asked(model, torch.randn(2, 3).double(), 1)
    exact = path.along_line(asked, first, last, range(2), tolerance=1e-9).directions
    for panels, near in ((1, 0.5), (64, 2e-4)):
        found = path.trapezoid(asked, first, last, range(2), panels)
        assert all((found[n] - exact[n]).norm() <= near * exact[n].norm() for n in exact)


def test_every_grouping_has_the_same_sum(recorded_case: Make) -> None:
    made = recorded_case("TransformerEncoder", "AdamW, amsgrad")
    found = made.run.explain(made.model, made.x[:3], total)
    evidence = found.values.sum(0)
    assert sorted(found.by_layer.ids) == sorted(made.run.layers)
    assert close(found.by_layer.values.sum(0), evidence)
    for by in (found.by_step, found.timeline("epoch")):
        assert close(by.values.sum(0), evidence)
    layers = {layer: found.layer(layer).values for layer in found.by_layer.ids}
    assert close(sum(layers.values()), found.values)
    for layer, share in zip(found.by_layer.ids, found.by_layer.values, strict=True):
        positions = found.positions(layer)
        by_sample = positions.values.reshape(*found.values.shape[:1], -1, 3).sum(1)
        assert close(by_sample, layers[layer]), layer
        assert close(layers[layer].sum(0), share, 10 * ROUNDING), layer
        assert positions.ids[-1].startswith(f"{found.ids[-1]}["), layer


def test_queries_do_not_depend_on_each_other(
    recorded: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked one at a time, in batches of the model, or in several scans: the same."""
    made = recorded("AdamW, amsgrad")
    whole = made.run.explain(made.model, made.x[:5])
    single = [made.run.explain(made.model, made.x[at : at + 1]) for at in range(5)]
    monkeypatch.setattr(targets, "TOGETHER", 2)
    calls = made.run.explain(made.model, made.x[:5])
    each = sum(4 * book.size for book in made.run.info.books)
    monkeypatch.setattr(explain, "QUERY_BYTES", 2 * each)
    scans = made.run.explain(made.model, made.x[:5])
    assert [len(q.directions["0.weight"]) for q in scans.questions] == [2, 2, 1]
    one_by_one = np.concatenate([one.values for one in single], axis=1)
    for other in (calls.values, scans.values, one_by_one):
        assert close(other, whole.values)
    assert scans.queries == calls.queries == whole.queries
    for part in ("initial", "remainder", "total", "completeness"):
        np.testing.assert_allclose(getattr(scans, part), getattr(whole, part), atol=1e-6)
    assert close(scans.by_layer.values, whole.by_layer.values)
    assert close(scans.by_step.values, whole.by_step.values)
    assert len(whole.by_step.values) == made.run.steps > len(whole.timeline("epoch").values) > 1
    assert close(scans.layer("2").values, whole.layer("2").values)


@pytest.mark.parametrize("optimizer", MANY)
@pytest.mark.parametrize("by", ["sample", "step", "position"])
def test_columns_in_small_memory(optimizer: str, by: str, recorded: Make) -> None:
    made = recorded(optimizer)
    groupings = {
        "sample": BySample(made.run.source.numbers),
        "step": ByStep(made.run.steps),
        "position": ByPosition(made.run.source.numbers, 1),
    }
    assert_columns(made, groupings[by])


@pytest.mark.parametrize(("case", "optimizer"), in_turn(STREAMS, ["SGD, Nesterov", *STATEFUL]))
def test_columns_of_books_with_several_streams(
    case: str, optimizer: str, recorded_case: Make
) -> None:
    made = recorded_case(case, optimizer)
    assert_columns(made, BySample(made.run.source.numbers))


@pytest.mark.parametrize("optimizer", MANY)
def test_row_by_row_is_the_product_with_the_matrix(optimizer: str, recorded: Make) -> None:
    assert_row_by_row(recorded(optimizer))


@pytest.mark.parametrize(("case", "optimizer"), in_turn(STREAMS, ["SGD, Nesterov", *STATEFUL]))
def test_row_by_row_for_books_with_several_streams(
    case: str, optimizer: str, recorded_case: Make
) -> None:
    assert_row_by_row(recorded_case(case, optimizer))


def assert_row_by_row(made: Any) -> None:
    """`⟨D, H (a ⊗ b)⟩` summed over a sample's rows is `⟨D, C⟩`, for any direction D."""
    source, grouping = made.run.source, BySample(made.run.source.numbers)
    generator = torch.Generator().manual_seed(3)
    directions = {
        book.name: torch.randn(2, *book.shape, generator=generator) for book in made.run.info.books
    }
    rows = row_sums(source.accounting, directions, grouping)
    matrix = times(SamplesMatrix(source.accounting, grouping), directions)
    assert rows.keys() == matrix.keys()
    for name, found in rows.items():
        assert close(found, matrix[name].numpy(), 1e-5), name


def assert_columns(made: Any, grouping: Grouping) -> None:
    """Line by line of the matrix or in one piece; together, what `subtract` takes away."""
    accounting = made.run._accounting
    whole, parts = (
        columns_of(SamplesMatrix(accounting, grouping, memory=memory)) for memory in (1 << 30, 1)
    )
    every = row_parts(accounting, made.run.info.books, made.run.source.numbers)
    for name, (columns, pieces) in whole.items():
        gross = np.abs(columns).sum(0).max()
        assert np.abs(columns - parts[name][0]).max() <= ROUNDING * gross, name
        assert np.abs(columns.sum(0) - every[name].flatten().numpy()).max() <= ROUNDING * gross
        assert parts[name][1] > 1 == pieces, name


def columns_of(matrix: SamplesMatrix) -> dict[str, tuple[np.ndarray, int]]:
    """(groups, *parameter flattened) of each book, and in how many pieces it came."""
    dense: dict[str, Tensor] = {}
    pieces: dict[str, int] = {}
    terms = {}
    for columns in matrix.columns():
        name, term = columns.book.name, columns.term
        shape = matrix_shape(columns.book.shape, term.view, term.groups)
        into = dense.setdefault(name, torch.zeros(matrix.groups, *shape))
        columns.region.of(into)[:] = columns.dense()
        pieces[name] = pieces.get(name, 0) + 1
        terms[name] = (columns.book.shape, term.view, term.groups)
    found = {n: torch.stack([from_matrix(m, *terms[n]) for m in d]) for n, d in dense.items()}
    return {n: (d.flatten(1).double().numpy(), pieces[n]) for n, d in found.items()}


def test_what_was_booked_by_step_is_not_lost(recorded: Make) -> None:
    """All of it under an optimizer without a rule."""
    made = recorded("unknown")
    found = made.run.explain(made.model, made.x[:2], target=0)
    assert found.values.shape == (0, 2)
    assert found.by_layer.values.shape == (0, 2)
    assert not found.by_step.values.any()
    assert_sum(made, found, 1e-3)
    assert close(found.check.steps, found.total - found.initial, 1e-3)


class Waves(nn.Module):
    """A layer, and a parameter that an operation without rows makes something of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.phase = nn.Linear(4, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.sin(self.phase)


def test_a_part_that_was_booked_by_step_is_not_lost(tmp_path: Path) -> None:
    model, x, path = Waves().double(), torch.randn(8, 4).double(), tmp_path / "run"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with told(path), dualform.record(model, optimizer, path) as recorder:
        for _ in range(4):
            recorder.samples(range(8))
            (model(x) - 3).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    made = Recorded(model.eval(), x, dualform.open(path))
    found = made.run.explain(model, x[:2], total)
    assert found.by_layer.ids == made.run.layers == ["layer"]
    assert (np.abs(found.check.steps) > 0.1).all()
    assert_sum(made, found, 1e-3)


@pytest.mark.parametrize("optimizer", ["SGD, Nesterov", "AdamW, amsgrad"])
def test_as_of_an_earlier_step(optimizer: str, recorded: Make) -> None:
    made = recorded(optimizer)
    for step in (0, 1, 5):
        run = made.run.at(step)
        model = copy.deepcopy(made.model)
        model.load_state_dict(run.state_dict())
        then = replace(made, model=model, run=run)
        found = run.explain(model, made.x[:2], target=1)
        assert_sum(then, found, 1e-3)
        np.testing.assert_allclose(found.total, model(made.x[:2])[:, 1].detach(), rtol=1e-12)
        assert len(found.by_step.values) == step
        assert found.values.any() == (step > 0)


def test_a_model_is_left_as_it_was(recorded_case: Make) -> None:
    made = recorded_case("LoRA", "SGD")
    model = copy.deepcopy(made.model)
    model.register_forward_hook(lambda module, args, out: None)
    model.up.weight.grad = torch.ones_like(model.up.weight)
    model.train()
    before, x = state_of(model), made.x[:2].clone().requires_grad_()
    made.run.explain(model, x, total).by_step  # noqa: B018
    for method in ("ridge", "fisher", "tracin", "accounting"):
        made.run.influence(model, x, total, method=method)
    after = state_of(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert x.grad is None


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, gradients, flags and the number of hooks."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found[f"{name} flags"] = torch.tensor([p.requires_grad, p.grad is not None])
        if p.grad is not None:
            found[f"{name} gradient"] = p.grad.clone()
    for name, module in model.named_modules():
        hooks = [len(h) for n, h in vars(module).items() if n.endswith("_hooks")]
        found[f"{name} hooks"] = torch.tensor([module.training, *hooks])
    return found
