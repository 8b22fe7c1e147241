"""The books balance: in every layer with every optimizer, and in every other case.

The grid is layers × optimizers × precisions. In each cell recording changes nothing, the remainder
is small, and little is left over of what layers give. A subset in which every layer and every
optimizer meets both precisions runs always. All of it runs in the long suite, and in
`write_table.py` for docs/grid.md.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import CASES, KINDS
from tests.cases.optimizers import OPTIMIZERS, trained
from tests.laws.conftest import Fit
from tests.laws.grid import (
    LOOP,
    Cell,
    problem,
    run_cell,
    same,
    tolerance,
    unexpected,
    whole_grid,
)
from tests.laws.training import pairs
from torch import nn

import dualform
from dualform.read import open_run

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

LAYERS = KINDS["layers"]
DTYPES = (torch.float32, torch.float64)
READING = 10.0
"""How much larger the remainder of a reading may be: it is relative to an output, not to a sum."""

Place = tuple[str, str, torch.dtype]


def covering() -> list[Place]:
    """Every case in both precisions, with optimizers in turn; Muon where it can be."""
    others = [name for name in OPTIMIZERS if name != "Muon"]
    matrices = [case for case, optimizer in whole_grid() if optimizer == "Muon"]
    in_turn = [
        (case, others[(at + shift) % len(others)], dtype)
        for at, case in enumerate(LAYERS)
        for shift, dtype in zip((0, 7), DTYPES, strict=True)
    ]
    return in_turn + [(case, "Muon", dtype) for case in matrices[::3] for dtype in DTYPES]


def places(chosen: list[Place], *marks: pytest.MarkDecorator) -> list[Any]:
    """Cells as parameters of a test."""
    return [
        pytest.param(*place, id=f"{place[0]}-{place[1]}-{str(place[2])[-2:]}", marks=marks)
        for place in chosen
    ]


def check(cell: Cell, case: str, optimizer: str, dtype: torch.dtype) -> None:
    limit = tolerance(optimizer, dtype)
    assert cell.identical
    assert not unexpected(LAYERS[case], cell.reasons)
    assert cell.remainder <= limit
    assert cell.reading <= READING * limit


def test_the_subset_covers_every_pair() -> None:
    found = covering()
    assert {(case, dtype) for case, _, dtype in found} == {(c, d) for c in LAYERS for d in DTYPES}
    assert {(o, dtype) for _, o, dtype in found} == {(o, d) for o in OPTIMIZERS for d in DTYPES}
    assert len({(case, optimizer) for case, optimizer, _ in found}) >= 2 * len(LAYERS)
    assert len(LAYERS) >= 20
    assert len(OPTIMIZERS) >= 12


def test_the_document_has_every_case_and_optimizer() -> None:
    text = (Path(__file__).parents[2] / "docs" / "grid.md").read_text(encoding="utf-8")
    assert all(f"\n| {case} |" in text for case in LAYERS)
    assert all(f" | {optimizer} |" in text for optimizer in OPTIMIZERS)


@pytest.mark.parametrize(("case", "optimizer", "dtype"), places(covering()))
def test_covering_subset(case: str, optimizer: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check(run_cell(case, optimizer, dtype, tmp_path / "run"), case, optimizer, dtype)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "optimizer", "dtype"),
    places([(case, optimizer, dtype) for case, optimizer in whole_grid() for dtype in DTYPES]),
)
def test_whole_grid(case: str, optimizer: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check(run_cell(case, optimizer, dtype, tmp_path / "run"), case, optimizer, dtype)


OTHERS = pairs("uses", "structures", "architectures")
IN_SINGLE = [(*pair, torch.float32) for pair in OTHERS]


@pytest.mark.parametrize(
    ("case", "optimizer", "dtype"),
    [
        *places([(*pair, torch.float64) for pair in OTHERS]),
        *places(IN_SINGLE[::2]),
        *places(IN_SINGLE[1::2], pytest.mark.long),
    ],
)
def test_other_cases(fitted: Fit, case: str, optimizer: str, dtype: torch.dtype) -> None:
    """The remainder is at most the tolerance, or what the rounding of stored weights can be.

    In float32 it may be larger: no targets are far away, so errors may cancel.
    """
    audit = fitted(case, optimizer, dtype).audit
    reasons = {book.name: book.reason for book in audit.books if book.reason}
    assert not unexpected(CASES[case], reasons)
    limit = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert all(book.remainder <= max(limit, book.rounding) for book in audit.books), audit


@pytest.mark.parametrize("optimizer", ["SGD, Nesterov", "AdamW, fused"])
@pytest.mark.parametrize("case", ["Linear, tokens", "Conv2d", "TransformerEncoder", "LoRA"])
def test_bfloat16_autocast(case: str, optimizer: str, tmp_path: Path) -> None:
    """Rows are what the kernels saw; what they rounded on the way is left, and reported."""
    plain = run_cell(case, optimizer, torch.float32, tmp_path / "plain")
    cell = run_cell(case, optimizer, torch.float32, tmp_path / "cast", torch.bfloat16)
    assert cell.identical
    assert cell.coverage == plain.coverage
    assert not unexpected(LAYERS[case], cell.reasons)
    assert 1e-5 < cell.remainder <= 1e-2
    assert cell.reading <= 1e-2


@pytest.mark.long
@pytest.mark.parametrize(("case", "optimizer"), whole_grid())
def test_bfloat16_autocast_everywhere(case: str, optimizer: str, tmp_path: Path) -> None:
    cell = run_cell(case, optimizer, torch.float32, tmp_path / "run", torch.bfloat16)
    assert cell.identical
    assert cell.remainder <= max(1e-2, tolerance(optimizer, torch.float32))


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        ("Linear, tied", "Lion"),
        ("ConvTranspose1d", "Rprop"),
        ("LayerNorm", "Rprop"),
        ("GroupNorm", "Lion"),
        ("Functional", "Rprop"),
        ("TransformerEncoder", "Rprop"),
    ],
)
def test_signs_under_autocast(case: str, optimizer: str, tmp_path: Path) -> None:
    """Where the sum of rows has another sign than what bfloat16 made of it."""
    if optimizer not in OPTIMIZERS:
        pytest.skip(f"{optimizer} is not installed")
    cell = run_cell(case, optimizer, torch.float32, tmp_path / "run", torch.bfloat16)
    assert cell.identical
    assert not unexpected(LAYERS[case], cell.reasons)
    assert cell.remainder <= 1e-6


@pytest.mark.parametrize("case", ["RNN", "GRU", "LSTM, packed", "Cells"])
def test_recurrent_layers_under_autocast(case: str, tmp_path: Path) -> None:
    """Their kernels round inside, where nobody sees it: kept by step, and exact."""
    cell = run_cell(case, "Adam", torch.float32, tmp_path / "run", torch.bfloat16)
    assert cell.identical
    assert cell.coverage == 0.0
    assert set(cell.reasons.values()) == {"its gradient is not the sum of the rows that were seen"}
    assert cell.remainder <= 1e-6


@pytest.mark.parametrize("case", ["Weight norm", "Weight norm, Conv2d", "Orthogonal"])
def test_computed_weights_under_autocast(case: str, tmp_path: Path) -> None:
    """The gradient of such a weight is rounded before it goes on: kept by step, and exact."""
    cell = run_cell(case, "Rprop", torch.float32, tmp_path / "run", torch.bfloat16)
    assert cell.identical
    assert {book for book in cell.reasons if "parametrizations" in book} == set(cell.reasons)
    assert set(cell.reasons.values()) == {
        "a weight is computed from it in a way that leaves no rows, or under autocast"
    }
    assert cell.remainder <= 1e-6


def scaled(
    case: str, optimizer: str, scale: float, path: Path | None, half: bool = True
) -> tuple[nn.Module, int]:
    """Trains under a loss scale; the third step overflows. Also how many steps were skipped."""
    given = problem(case, torch.float32)
    made = OPTIMIZERS[optimizer](trained(given.model))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    skipped = 0
    with nullcontext() if path is None else dualform.record(given.model, made, path) as recorder:
        for number, ids in enumerate(LOOP.batches(len(given.x))):
            if recorder is not None:
                recorder.samples(ids)
            with torch.autocast("cpu", torch.float16, enabled=half):
                output = given.model(given.x[ids])
            loss = given.loss(output.float(), given.y[ids])
            scaler.scale(loss * (torch.inf if number == 2 else 1.0)).backward()
            before = scaler.get_scale()
            scaler.step(made)
            scaler.update()
            skipped += scaler.get_scale() < before
            made.zero_grad()
    return given.model, skipped


@pytest.mark.parametrize(
    "optimizer",
    [
        "SGD, Nesterov",
        "SGD, fused",
        "Adam",
        "AdamW, fused",
    ],
)
def test_half_precision_under_a_loss_scale(optimizer: str, tmp_path: Path) -> None:
    model, skipped = scaled("Conv2d", optimizer, 2.0**10, tmp_path / "run")
    assert skipped == 1
    twin, _ = scaled("Conv2d", optimizer, 2.0**10, None)
    assert same(model.state_dict(), twin.state_dict())
    audit = open_run(tmp_path / "run").audit()
    assert audit.remainder <= 1e-2
    assert audit.coverage == 1.0, audit


def test_the_usual_loss_scale_leaves_every_book_by_row(tmp_path: Path) -> None:
    scaled("Linear", "Adam", 2.0**16, tmp_path / "run", half=False)
    audit = open_run(tmp_path / "run").audit()
    assert audit.remainder <= 1e-6
    assert audit.coverage == 1.0, audit
