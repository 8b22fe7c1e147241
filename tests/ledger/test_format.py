"""FORMAT.md says what the library does: marks, codecs, every rule's fields, and its equations."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.ledger import format_rules
from tests.ledger.make_format_4 import FORMAT_4, make

import dualform
from dualform.errors import LedgerError
from dualform.ledger import Ledger, LedgerWriter, Records, RunInfo
from dualform.ledger.codecs import CODECS, BFloat16, Int8
from dualform.ledger.codecs.codec import FLOATS, PLACES
from dualform.ledger.format import FORMAT, MARKS
from dualform.optimizers import RULES, StateRule, rule_named
from dualform.optimizers.rule import ScalarRule
from dualform.optimizers.steps import Transition
from dualform.recording.recorder import Recorder

TEXT = (Path(__file__).parents[2] / "FORMAT.md").read_text(encoding="utf-8")


def table(first: str) -> list[list[str]]:
    """The rows of the table whose first column has this head."""
    (found,) = re.findall(rf"^\| `{first}` \|.*\n\|[-|]+\|\n((?:\|.*\|\n)+)", TEXT, re.M)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in found.splitlines()]


def names(cell: str) -> tuple[str, ...]:
    return tuple(" ".join(re.findall(r"`([^`]*)`", cell)).split())


def test_the_number_is_the_one_that_is_written() -> None:
    assert TEXT.startswith(f"# The run folder, format {FORMAT}\n")


def test_every_mark_is_described(tmp_path: Path) -> None:
    assert {row[0].strip('`"') for row in table("mark")} == set(MARKS)
    writer = LedgerWriter.create(tmp_path / "run", RunInfo(), {})
    with pytest.raises(LedgerError, match="the mark 'whim' is not one of checkpoint, final"):
        writer.weights(0, {}, "whim")
    writer.abandon()


def test_every_rule_is_described_with_its_fields_and_memory() -> None:
    described = {
        names(rule)[0]: (names(fields), "".join(names(buffer)), names(state))
        for rule, fields, buffer, state, _ in table("rule")
    }
    assert described == {rule.name: (rule.fields, rule.buffer, rule.state) for rule in RULES}


def test_every_codec_is_described_with_its_parameters_and_arrays() -> None:
    described = {names(r[0])[0]: (names(r[1]), names(r[2])) for r in table("codec")}
    assert described == {
        codec.name: (
            tuple(field.name for field in dataclasses.fields(codec)),
            tuple(codec(*["float32"] * len(dataclasses.fields(codec))).arrays(1, 1)),
        )
        for codec in CODECS.values()
    }
    for dtype in [*FLOATS, *PLACES]:
        assert f'`"{dtype}"`' in TEXT


def test_bfloat16_rounds_as_described() -> None:
    """To the nearest, ties to even; also numbers that are halfway."""
    numbers = torch.cat([torch.randn(1000), 1 + torch.arange(64) * 2.0**-8]).reshape(-1, 1)
    stored = BFloat16().encode(Records(numbers, numbers))["keys"]
    expected = format_rules.bfloat16(numbers.numpy())
    np.testing.assert_array_equal(stored.float().numpy(), expected)


def test_int8_rounds_as_described() -> None:
    """To the nearest multiple of a row's scale, ties to even."""
    numbers = torch.cat([torch.randn(50, 9), torch.tensor([[127, 0.5, 1.5, -2.5, *[0] * 5]])])
    encoded = Int8().encode(Records(numbers, numbers))
    whole, scales = format_rules.int8(numbers.numpy())
    np.testing.assert_array_equal(encoded["keys"].numpy(), whole)
    np.testing.assert_array_equal(encoded["key_scales"].numpy(), scales)


def test_a_residual_is_what_decoded_rows_miss(tmp_path: Path) -> None:
    """The same training, once with exact entries: their sums less those of the lossy ones."""
    ledgers = {}
    for codec in ("exact", "bfloat16"):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(model, optimizer, tmp_path / codec, keep=CODECS[codec].policy):
            for _ in range(4):
                model(torch.randn(6, 5)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        ledgers[codec] = Ledger(tmp_path / codec)
    x, e = (ledgers["exact"].column(f"model/{side}").numpy() for side in ("keys", "values"))
    for step in range(4):
        own = slice(6 * step, 6 * step + 6)
        expected = format_rules.residual(x[own], e[own])
        for name, residual in zip(("weight", "bias"), expected, strict=True):
            found = ledgers["bfloat16"].column(f"{name}/residuals")[step].numpy()
            np.testing.assert_allclose(found, residual, rtol=1e-6, atol=1e-12)
    assert ledgers["bfloat16"].column("weight/residual_steps").tolist() == [1, 2, 3, 4]
    assert ledgers["bfloat16"].column("weight/residuals").dtype == torch.float32


def test_keys_are_found_where_they_were_stored_once(tmp_path: Path) -> None:
    """Two layers on one input, which comes again in another order: by the words, every record."""
    torch.manual_seed(0)
    one, other, x = torch.nn.Linear(10, 3), torch.nn.Linear(10, 2), torch.randn(6, 2, 10)
    model = torch.nn.ModuleDict({"one": one, "other": other})
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    with Recorder(model, optimizer, tmp_path / "run", keep="rows") as recorder:
        for step in range(6):
            seen.append(x[torch.randperm(6)[:4]])
            recorder.samples(range(4))
            (one(seen[-1]).sum() + other(seen[-1]).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                recorder.checkpoint()
    (log,) = (tmp_path / "run").glob("writer-*/commits.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [line for line in lines if line["kind"] == "rows"]
    shards = [(line, load_file(log.parent / line["file"])) for line in rows]
    assert all(line["same_keys"] == {"other": "one"} for line in rows)
    assert "one/places" in shards[-1][1]
    for at in range(3):
        expected = torch.cat(seen[2 * at : 2 * at + 2]).reshape(-1, 10)
        for stream in model:
            found = format_rules.keys(shards, at, stream)
            np.testing.assert_array_equal(found, expected.numpy())


def test_a_run_of_format_4_is_read() -> None:
    """Recorded in two sessions by the version that wrote it, the second with lossy entries."""
    run = dualform.open(FORMAT_4)
    assert (run.steps, run.kept_steps, run.ids, run.layers) == (
        4,
        [0, 2, 4],
        ["ant", "bee"],
        ["0", "1"],
    )
    assert run.check() == []
    assert run.audit().remainder < 1e-6
    assert run.audit().coverage == 1.0
    assert 0 < max(book.residual for book in run.audit().books) < 0.01
    assert abs(run.revisit(["ant"])["1"].check.remainder).max() < 1e-6


def test_the_script_still_makes_it(tmp_path: Path) -> None:
    model = make(tmp_path / "run")
    weights = dualform.open(FORMAT_4).state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights[name], weight)


FIELDS = {
    "lr": 0.1,
    "beta1": 0.8,
    "beta2": 0.7,
    "eps": 0.01,
    "weight_decay": 0.3,
    "momentum": 0.6,
    "momentum_decay": 0.2,
    "alpha": 0.7,
    "lr_decay": 0.4,
    "rho": 0.6,
    "beta2_decay": -0.8,
    "eps1": 1e-3,
    "eps2": 1e-2,
    "d": 0.5,
    "lambd": 0.2,
    "shrink": 0.5,
    "grow": 1.2,
    "shortest": 0.09,
    "longest": 0.13,
    "ns_steps": 3.0,
    "ns_1": 3.4445,
    "ns_3": -4.775,
    "ns_5": 2.0315,
    "matrix_eps": 0.1,
    "max_precondition_dim": 3.0,
    "double": 1.0,
}
"""Values at which every term of every equation matters; switches are off unless varied."""
SWITCHES: dict[str, list[dict[str, float]]] = {
    "adam": [{"amsgrad": 1.0}, {"decoupled_weight_decay": 1.0}],
    "adamw": [{"decoupled_weight_decay": 1.0, "amsgrad": 1.0}],
    "nadam": [{"decoupled_weight_decay": 1.0}],
    "radam": [{"decoupled_weight_decay": 1.0, "beta2": 0.99}],
    "rmsprop": [{"centered": 1.0}, {"momentum": 0.0}],
    "muon": [{"nesterov": 1.0, "adjustment": 1.0}, {"adjustment": 2.0}],
    "shampoo": [{"fixed_decay": 1.0}],
    "soap": [{"correct_bias": 1.0}, {"normalize_gradient": 1.0, "max_precondition_dim": 9.0}],
}
SHAPES = {"muon": [(3, 4), (4, 2)], "soap": [(3, 4), (4, 2)]}
"""Those of other rules are also vectors."""
CASES = [
    pytest.param(rule, {**varied, **uphill}, shape, id=f"{rule}-{number}-{len(uphill)}-{shape}")
    for rule in format_rules.RULES
    for number, varied in enumerate([{}, *SWITCHES.get(rule, [])])
    for uphill in ({}, {"maximize": 1.0})
    for shape in SHAPES.get(rule, [(3, 4), (4, 2), (5,)])
]


def first_state(rule: str, shape: tuple[int, ...], uphill: float) -> dict[str, Any]:
    """What an optimizer of this rule has before a parameter's first step."""
    if rule == "adagrad":
        return {"step": 0.0, "sum": np.full(shape, 0.2)}
    if rule == "shampoo":
        return {"every": 2.0, "maximize": uphill}
    if rule == "soap":
        bases = [np.linalg.qr(np.random.default_rng(n).normal(size=(n, n)))[0] for n in shape]
        return {"Q": bases, "exp_avg_sq": np.full(shape, 0.3), "maximize": uphill}
    return {}


def as_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in state.items()}


@pytest.mark.parametrize(("name", "varied", "shape"), CASES)
def test_the_equations_are_those_of_the_rule(
    name: str, varied: dict[str, float], shape: tuple[int, ...]
) -> None:
    """Six steps by FORMAT.md's words and by the rule: parameter, buffer and memory are the same."""
    rule, draws = rule_named(name), np.random.default_rng(0)
    assert isinstance(rule, StateRule)
    given = {**FIELDS, **varied}
    W, b = draws.normal(size=shape), np.zeros(shape)
    theirs = first_state(name, shape, given.get("maximize", 0.0))
    if "Q" in theirs:
        fits = [Q for Q in theirs["Q"] if len(Q) <= given["max_precondition_dim"]]
        theirs["Q"] = format_rules.packed(fits)
    ours = as_tensors(theirs)
    for made in range(6):
        fields = {field: given.get(field, 0.0) for field in rule.fields}
        fields |= {"step": float(made)} if "step" in rule.fields else {}
        g = draws.normal(size=shape)
        step, ours = rule.transition(fields, ours, *map(torch.tensor, (W, b, g)))
        moved = step.forward(*map(torch.tensor, (W, b, g)))
        form = format_rules.RULES[name](fields, theirs, W, b, g)
        (W, b), theirs = form.step(W, b, g), form.state
        for found, expected in zip(moved, (W, b), strict=True):
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)
        for state in rule.state:
            if state in theirs:
                np.testing.assert_allclose(ours[state].numpy(), theirs[state], rtol=1e-9)


@pytest.mark.parametrize("name", ["adam", "rmsprop", "adadelta", "asgd"])
def test_the_matrices_are_those_of_the_form(name: str) -> None:
    """`M` and `n` as FORMAT.md has them, of `c, l, p, q, A, D`."""
    rule, draws = rule_named(name), np.random.default_rng(0)
    assert isinstance(rule, StateRule)
    fields = {field: FIELDS.get(field, 0.0) for field in rule.fields} | {"maximize": 1.0}
    W, b, g = draws.normal(size=(3, 2, 2))
    written: Any = rule.transition(fields, {}, *map(torch.tensor, (W, b, g)))[0]
    f = format_rules.RULES[name](fields, {}, W, b, g)
    M = ((f.c - f.l * (f.A * f.q + f.D), -f.A * f.p), (f.l * f.q, f.p))
    n = (-f.sigma * (f.A * f.q + f.D), f.sigma * f.q)
    found = written.written_out
    for ours, theirs in zip((*found.M[0], *found.M[1], *found.n), (*M[0], *M[1], *n), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-12)


def test_lion_s_matrices() -> None:
    rule, draws = rule_named("lion"), np.random.default_rng(0)
    assert isinstance(rule, StateRule)
    W, b, g = draws.normal(size=(3, 2, 2))
    fields = {field: FIELDS[field] for field in rule.fields}
    state = as_tensors({"first_lr": 0.5})
    step, _ = rule.transition(fields, state, *map(torch.tensor, (W, b, g)))
    assert isinstance(step, Transition)
    beta1, beta2 = fields["beta1"], fields["beta2"]
    P = fields["lr"] / np.abs(beta1 * b + (1 - beta1) * g)
    shrink = 1 - fields["lr"] * fields["weight_decay"] / 0.5
    expected = (shrink, -beta1 * P, 0.0, beta2, -(1 - beta1) * P, 1 - beta2)
    for ours, theirs in zip((*step.M[0], *step.M[1], *step.n), expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-12)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("nesterov", [0.0, 1.0])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_sgd_s_equations(momentum: float, nesterov: float, buffered: bool) -> None:
    rule = rule_named("sgd")
    assert isinstance(rule, ScalarRule)
    eta, lam, dampening, sigma = 0.1, 0.3, 0.2, -1.0
    values = (eta, momentum, dampening, lam, nesterov, 1.0)
    fields = dict(zip(rule.fields, values, strict=True))
    W, b, g = np.random.default_rng(0).normal(size=(3, 2))
    found = rule.transition(fields, buffered).forward(*map(torch.tensor, (W, b, g)))
    d = sigma * g + lam * W
    after = momentum * b + (1 - dampening) * d if buffered else d
    if momentum == 0:
        expected = (W - eta * d, b)
    else:
        expected = (W - eta * (d + momentum * after if nesterov else after), after)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-12)
