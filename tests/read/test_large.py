"""Runs with more samples than fit into memory: the same answers, from as many scans as with few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.cases.optimizers import OPTIMIZERS
from tests.read.engine_runs import InPieces
from tests.read.known_run import Known
from torch import Tensor

import dualform
from dualform.read import explain
from dualform.read.grouping import BySample, ByStep
from dualform.read.samples_matrix import folds, grams, matrix
from dualform.read.samples_matrix import optimizer_metric as natural
from dualform.read.samples_matrix.block_sums import LineGrams, Products
from dualform.read.samples_matrix.cost import Cost, Work, work_of
from dualform.read.samples_matrix.matrix import SamplesMatrix, times
from dualform.read.samples_matrix.visits import Visits

ROUNDING = 1e-5
"""Columns are held in float32."""
FAMILIES = [
    name
    for name in ("SGD, Nesterov", "AdamW, amsgrad", "Adafactor", "Lion", "Muon", "Shampoo", "SOAP")
    if name in OPTIMIZERS
]
CASES = (
    "Linear, tied",
    "Functional",
    "Embedding, tied head",
    "ConvTranspose2d, groups",
    "Weight norm",
)
"""Books of several streams, parts of a parameter, tables, other views of one, shared matrices."""
METHODS = ("ridge", "fisher", "tracin", "accounting")

Make = Callable[..., Any]


def assert_close(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.abs(found - expected).max() <= ROUNDING * np.abs(expected).max()


def with_little_memory(monkeypatch: pytest.MonkeyPatch, columns: int = 300, lines: int = 2) -> None:
    """Contributions of a few samples at a time, and Gram matrices of a few lines."""
    monkeypatch.setattr(matrix, "COLUMN_BYTES", columns)
    monkeypatch.setattr(folds, "GATHERED_BYTES", columns)
    monkeypatch.setattr(grams, "GRAM_BYTES", 4 * 6**2 * lines)


def total(output: Tensor) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("optimizer", ["SGD, groups", "AdamW, amsgrad"])
def test_influence_in_pieces_that_are_sent(
    optimizer: str,
    by_rows: bool,
    known: Callable[[str], Known],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each makes the blocks of some samples."""
    made, engine = known(optimizer), InPieces()
    monkeypatch.setattr(Work, "row_by_row", lambda *_, **__: by_rows)
    for method in METHODS:
        expected = made.influence(method)
        with monkeypatch.context() as patched:
            with_little_memory(patched)
            run = dualform.open(made.run.path, engine=engine)
            assert_close(run.influence(made.model, made.x[:3], 1, method=method).values, expected)
    assert {pieces for _, pieces in engine.cut} == {3}
    assert {kind for kind, _ in engine.cut} == {LineGrams, Products}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", ["SGD, groups", "AdamW, amsgrad", "Adafactor"])
def test_influence_of_some_samples_at_a_time(
    method: str, optimizer: str, known: Callable[[str], Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = known(optimizer)
    expected = made.influence(method)
    with_little_memory(monkeypatch)
    run = dualform.open(made.run.path)
    first, again = (run.influence(made.model, made.x[:3], 1, method=method) for _ in range(2))
    assert_close(first.values, expected)
    assert_close(again.values, expected)


@pytest.mark.parametrize("optimizer", FAMILIES)
def test_influence_whatever_the_optimizer(
    optimizer: str, recorded: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recorded(optimizer)
    expected = made.run.influence(made.model, made.x[:2], 1)
    with_little_memory(monkeypatch)
    found = dualform.open(made.run.path).influence(made.model, made.x[:2], 1)
    assert_close(found.values, expected.values)
    assert found.kept == pytest.approx(expected.kept)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_influence_through_every_kind_of_book(
    case: str, by_rows: bool, recorded_case: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recorded_case(case, "SGD, Nesterov")
    expected = made.run.influence(made.model, made.x[:2], total)
    with_little_memory(monkeypatch)
    monkeypatch.setattr(Work, "row_by_row", lambda *_, **__: by_rows)
    found = dualform.open(made.run.path).influence(made.model, made.x[:2], total)
    assert_close(found.values, expected.values)


@pytest.mark.parametrize("by", ["sample", "step"])
@pytest.mark.parametrize("case", CASES)
def test_products_of_some_groups_at_a_time(by: str, case: str, recorded_case: Make) -> None:
    made = recorded_case(case, "SGD, Nesterov")
    source, generator = made.run.source, torch.Generator().manual_seed(3)
    groupings = {"sample": BySample(source.numbers), "step": ByStep(9)}
    directions = {
        book.name: torch.randn(2, *book.shape, generator=generator) for book in made.run.info.books
    }
    whole, parts = (
        times(SamplesMatrix(source.accounting, groupings[by], memory=memory), directions)
        for memory in (1 << 30, 1)
    )
    for name, found in parts.items():
        assert_close(found, whole[name])


@pytest.mark.parametrize("method", METHODS)
def test_no_visit_is_read_once_a_line(
    method: str, known: Callable[[str], Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many lines there are: once to invert them, and once for what is asked."""
    made, read, in_time = known("SGD, groups"), Counter[tuple[str, int]](), Visits.in_time

    def counted(self: Visits) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
        for seen, *records in in_time(self):
            read.update((self.stream.name, visit) for visit in range(seen.start, seen.stop))
            yield (seen, *records)

    monkeypatch.setattr(Visits, "in_time", counted)
    with_little_memory(monkeypatch, lines=100)
    dualform.open(made.run.path).influence(made.model, made.x[:3], 1, method=method)
    assert {stream for stream, _ in read} == {"0", "2"}
    assert max(read.values()) <= 2


def test_a_second_question_does_not_invert_again(
    known: Callable[[str], Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, scans, scan = known("SGD, groups"), [], grams.line_grams
    monkeypatch.setattr("dualform.read.ridge.line_grams", lambda *a: scans.append(a) or scan(*a))
    with_little_memory(monkeypatch, lines=100)
    run = dualform.open(made.run.path)
    for target in (1, 2):
        run.influence(made.model, made.x[:3], target)
    assert len(scans) == 1


# Row by row, or by the matrix


@pytest.mark.parametrize("cheaper", ["rows", "matrix"])
def test_what_costs_less_is_done(
    cheaper: str, known: Callable[[str], Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = known("SGD, groups")
    expected = made.run.explain(made.model, made.x[:2], 1).values
    monkeypatch.setattr(Work, "row_by_row", lambda *_, **__: cheaper == "rows")
    other = {"rows": "times", "matrix": "row_sums"}[cheaper]
    monkeypatch.setattr(explain, other, lambda *a: pytest.fail("costs more"))
    assert_close(made.run.explain(made.model, made.x[:2], 1).values, expected)


def large(queries: int, visits: int, steps: int = 0, scans: float = 1.0) -> bool:
    """Whether rows are asked one by one: 60,000 samples, a layer of 784 × 128."""
    rows, size = 60_000.0 * visits, 784 * 128
    work = Work(4 * rows * 912, rows * size, size, 60_000, steps, scans)
    return work.row_by_row(queries)


def test_few_queries_are_asked_row_by_row() -> None:
    assert all(large(queries, visits=20) for queries in (1, 2, 4))
    assert large(queries=10_000, visits=1)  # each row is a sample: nothing to put together
    assert all(large(queries, visits=20, steps=2400, scans=90.0) for queries in (1, 2, 16))


def test_many_queries_share_the_matrix() -> None:
    assert not any(large(queries, visits=20) for queries in (64, 1000))


@given(
    st.floats(1, 1e12), st.floats(1, 1e9), st.floats(1, 1e4), st.integers(1, 1000), st.booleans()
)
def test_the_matrix_pays_off_with_more_queries(
    row_bytes: float, size: float, visits: float, groups: int, replayed: bool
) -> None:
    """Where it costs less for some queries, it does for more of them."""
    work = Work(row_bytes, groups * visits * size, int(size), groups, 50 * replayed)
    chosen = [work.row_by_row(queries) for queries in (1, 10, 100, 1000)]
    assert chosen == sorted(chosen, reverse=True)
    assert Cost(1.0, 0.0).total < work.by_rows(2).total > work.by_rows(1).total


def test_the_work_of_a_run(recorded: Make) -> None:
    """12 rows a layer and 9 steps of them, of a 4-6-3 network."""
    made = recorded("SGD, Nesterov")
    source = made.run.source
    books = [book for book in made.run.info.books if book.terms]
    work = work_of(source.accounting, BySample(source.numbers), books)
    rows = made.run._ledger.shards
    count = sum(shard.file.rows("0/values") for shard in rows)
    assert work.products == count * (24 + 6 + 18 + 3)
    assert work.row_bytes == 4 * count * (4 + 6 + 6 + 3)
    assert (work.parameters, work.groups, work.steps, work.scans) == (51, 10, 0, 1.0)
    adaptive = recorded("AdamW, amsgrad").run.source.accounting
    assert work_of(adaptive, BySample(source.numbers), books).steps == adaptive.until


def test_natural_contributions_choose_too(
    known: Callable[[str], Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = known("AdamW, amsgrad")
    expected = made.influence()
    with_little_memory(monkeypatch)
    for by_rows, other in ((True, "by_blocks"), (False, "row_sums")):
        with monkeypatch.context() as patch:
            patch.setattr(Work, "row_by_row", lambda *_, by_rows=by_rows, **__: by_rows)
            patch.setattr(natural, other, lambda *a: pytest.fail("costs more"))
            found = dualform.open(made.run.path).influence(made.model, made.x[:3], 1)
        assert_close(found.values, expected)
