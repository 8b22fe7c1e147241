"""The tasks of the study of hypernetwork attention, against loops and by their laws."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualform.errors import EvaluationError
from dualform.studies.hypernetwork.answers import answer_counts
from dualform.studies.hypernetwork.fuzzy_logic import FuzzyLogic
from dualform.studies.hypernetwork.problems import (
    Problems,
    Task,
    problems_of,
    random_stream,
    training_batches,
)
from dualform.studies.hypernetwork.raven import RULES, Raven

law = settings(deadline=None, max_examples=10)
seeds = st.integers(0, 2**31)
TASKS: list[Task] = [FuzzyLogic(), Raven(features=2), Raven()]
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.name} {task.shape[0]}")


def test_truth_tables_of_two_terms() -> None:
    """With inputs 0 and 1 a function is true where one of its terms names the input bit by bit."""
    task = FuzzyLogic(variables=3)
    for terms in combinations(range(8), 2):
        for bits in product((0.0, 1.0), repeat=3):
            named = sum(int(bit) << at for at, bit in enumerate(bits))
            assert float(task.truth(torch.tensor(terms), torch.tensor(bits))) == (named in terms)


@law
@given(seed=seeds)
def test_truth_by_hand(seed: int) -> None:
    """min, max and 1 − x, in loops."""
    problems = FuzzyLogic(rows=4).draw("test", 3, random_stream(seed, "test"))
    for row, y, terms in zip(problems.x, problems.y, problems.rules.tolist(), strict=True):
        told = [*row[:-1, 4].tolist(), float(y)]
        for inputs, truth in zip(row[:, :4].tolist(), told, strict=True):
            of_terms = [
                min(x if term >> at & 1 else 1 - x for at, x in enumerate(inputs)) for term in terms
            ]
            assert truth == pytest.approx(max(of_terms), abs=1e-6)


def test_the_functions_of_parts_share_what_they_should() -> None:
    for seed in range(20):
        task = FuzzyLogic(seed=seed)
        sets = {part: set(map(tuple, task.functions(part).tolist())) for part in task.parts}
        terms = {part: {t for one in functions for t in one} for part, functions in sets.items()}
        assert sets["train"] == sets["test"]
        assert not sets["train"] & sets["combinations"]
        assert terms["combinations"] <= terms["train"]  # all of which training has
        assert not terms["terms"] & terms["train"]
        assert terms["terms"] | terms["train"] == set(range(16))


def test_rules_and_orders_of_parts_share_what_they_should() -> None:
    for features in (2, 3, 4):
        task = Raven(features=features)
        rules, orders = (
            {part: {str(one) for one in of(part).tolist()} for part in task.parts}
            for of in (task.combinations, task.alignments)
        )
        assert rules["train"] == rules["test"] == rules["permutations"]
        assert orders["train"] == orders["test"] == orders["rules"]
        assert not rules["train"] & rules["rules"]
        assert not orders["train"] & orders["permutations"]
    assert len(rules["train"] | rules["rules"]) == 330
    assert len(rules["rules"]) == 82
    assert len(orders["train"] | orders["permutations"]) == 24 * 24


def follows(rule: str, rows: list[list[int]]) -> int | None:
    """What a rule tells of the last row's third value, in loops; None where it does not hold."""
    steps = {"constant": 0, "+1": 1, "+2": 2, "-1": -1, "-2": -2}
    if rule in steps:
        pairs = [(a, b) for row in rows for a, b in pairwise(row)]
        holds = all((a + steps[rule] - b) % 8 == 0 for a, b in pairs)
        return (rows[2][1] + steps[rule]) % 8 if holds else None
    if rule == "distribute three":
        three, seen = set(rows[0]), set(rows[2])
        holds = len(three) == 3 and set(rows[1]) == three and len(seen) == 2 and seen < three
        return (three - seen).pop() if holds else None
    sign = 1 if rule == "sum" else -1
    holds = all((row[0] + sign * row[1] - row[2]) % 8 == 0 for row in rows[:2])
    return (rows[2][0] + sign * rows[2][1]) % 8 if holds else None


def answers(panels: Tensor) -> set[tuple[int, ...]]:
    """All ninth panels that agree, by trying all matchings and rules."""
    features, grid = panels.shape[-1], panels.tolist()
    found = set[tuple[int, ...]]()
    for second, third in product(permutations(range(features)), repeat=2):
        told: list[set[int]] = [set() for _ in range(features)]
        for i, j, k in zip(range(features), second, third, strict=True):
            rows = [[row[0][i], row[1][j], row[2][k]] for row in grid]
            rows[2].pop()
            values = {follows(rule, rows) for rule in RULES}
            told[k] = {v for v in values if v is not None}
        found |= set(product(*told))
    return found


@pytest.mark.parametrize("features", [1, 2, 3])
def test_agreeing_answers_are_counted_as_by_trying_all(features: int) -> None:
    task = Raven(features=features, held_out=0, unambiguous=False)
    panels, _ = task.panels("train", 60, random_stream(3, "test"))
    counted = answer_counts(panels).tolist()
    for one, count in zip(panels, counted, strict=True):
        every = answers(one)
        assert tuple(one[2, 2].tolist()) in every
        assert len(every) == count
    assert features == 1 or max(counted) > 1


@pytest.mark.parametrize("features", [2, 4])
def test_features_of_a_column_may_be_shown_in_any_order(features: int) -> None:
    """As many answers agree, whichever order columns have."""
    panels, _ = Raven(features, unambiguous=False).panels("rules", 50, random_stream(0, "order"))
    shuffled = panels.clone()
    stream = random_stream(1, "order")
    for column in range(3):
        shuffled[:, :, column] = panels[:, :, column][
            ..., torch.randperm(features, generator=stream)
        ]
    assert not torch.equal(shuffled, panels)
    assert torch.equal(answer_counts(shuffled), answer_counts(panels))


def test_each_puzzle_has_its_rules_in_its_orders() -> None:
    """Undone, the orders of a part's columns leave rows that follow the rules that are named."""
    task = Raven(features=3, unambiguous=False)
    for part in task.parts:
        panels, rules = task.panels(part, 30, random_stream(5, part))
        orders = task.alignments(part).tolist()
        known = {tuple(one) for one in task.combinations(part).tolist()}
        for grid, own in zip(panels.tolist(), rules.tolist(), strict=True):
            assert tuple(sorted(own)) in known
            assert any(
                all(
                    follows(
                        list(RULES)[own[third[i]]],
                        [[row[0][i], row[1][second[i]], row[2][third[i]]] for row in grid[:2]]
                        + [[grid[2][0][i], grid[2][1][second[i]]]],
                    )
                    == grid[2][2][third[i]]
                    for i in range(3)
                )
                for second, third in orders
            )


def test_ambiguity_by_rule() -> None:
    """Where it is known which features belong together: 1.5 to 5.7 % of puzzles by rule."""
    task = Raven(features=1, held_out=0, unambiguous=False)
    panels, rules = task.panels("train", 40_000, random_stream(0, "test"))
    ambiguous = (answer_counts(panels) > 1).double()
    shares = [float(ambiguous[rules[:, 0] == rule].mean()) for rule in range(len(RULES))]
    assert min(shares) == pytest.approx(0.015, abs=0.004)
    assert max(shares) == pytest.approx(0.057, abs=0.006)


def test_test_puzzles_have_one_answer_unless_told_otherwise() -> None:
    task = Raven()
    for part in task.parts[1:]:
        panels = problems_of(task, part, 100).x.argmax(-1).view(100, 3, 3, 4)
        assert answer_counts(panels).tolist() == [1] * 100  # the last panel is not looked at
    stream = random_stream(0, "test")
    some = Raven(unambiguous=False).panels("test", 300, stream)[0]
    assert 0.15 < float((answer_counts(some) > 1).double().mean()) < 0.35


def same(one: Problems, other: Problems) -> bool:
    pairs = ((one.x, other.x), (one.y, other.y), (one.rules, other.rules))
    return all(torch.equal(a, b) for a, b in pairs)


@each_task
def test_one_seed_makes_one_set_of_problems(task: Task) -> None:
    assert same(problems_of(task, "test", 20), problems_of(task, "test", 20))
    for one, other in zip(
        training_batches(task, 1, 8, 3), training_batches(task, 1, 8, 3), strict=True
    ):
        assert same(one, other)


@each_task
def test_streams_are_independent(task: Task) -> None:
    """Test problems do not depend on training, and no training problem is among them."""
    before = problems_of(task, "test", 200)
    training = list(training_batches(task, 0, 50, 8))
    assert same(before, problems_of(task, "test", 200))
    rows = {tuple(x.flatten().tolist()) for batch in training for x in batch.x}
    assert len(rows) == 400
    assert not rows & {tuple(x.flatten().tolist()) for x in before.x}
    assert not same(before, problems_of(task, task.parts[2], 200))
    assert not same(training[0], next(training_batches(task, 1, 50, 8)))


def test_order_shuffles_the_same_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    task, name = Raven(features=2), "dualform.studies.hypernetwork.problems.random_stream"
    first = torch.cat([batch.x for batch in training_batches(task, 0, 10, 4)]).flatten(1)
    monkeypatch.setattr(
        name, lambda seed, name: random_stream(seed + (name == "order"), name), raising=True
    )
    again = torch.cat([batch.x for batch in training_batches(task, 0, 10, 4)]).flatten(1)
    assert not torch.equal(first, again)
    assert sorted(first.tolist()) == sorted(again.tolist())


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(EvaluationError, match="part='valid' is not in raven; it has 'train', "):
        Raven().draw("valid", 1, random_stream(0, "test"))
    with pytest.raises(EvaluationError, match="part='x' is not in fuzzy_logic; it has 'train', "):
        problems_of(FuzzyLogic(), "x", 1)
    with pytest.raises(EvaluationError, match=r"terms=5 of a function .* 4 held-out ones; take"):
        FuzzyLogic(terms=5)
    with pytest.raises(EvaluationError, match=r"leaves \d combinations .* hold fewer out"):
        FuzzyLogic(held_out=0.95).functions("train")
    with pytest.raises(EvaluationError, match="features=5, and a panel has 1 to 4"):
        Raven(features=5)
    with pytest.raises(EvaluationError, match=r"'permutations' of raven with features=1 .* empty"):
        Raven(features=1).draw("permutations", 1, random_stream(0, "test"))
