"""Exact books with lossy entries: initial + entries + residual = weights, whatever the codec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform
from dualform.ledger import Ledger
from dualform.ledger.codecs import CODECS
from dualform.read.engine.reader import RowReader
from dualform.read.step_gradients import step_gradients
from dualform.recording.recorder import Recorder

STEPS, BATCH = 12, 6


@dataclass(frozen=True)
class Layer:
    """A model around one kind of layer, and its inputs."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


LAYERS = {
    "linear": Layer(
        lambda: nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)),
        lambda: torch.randn(BATCH, 7),
    ),
    "conv": Layer(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 4)),
        lambda: torch.randn(BATCH, 2, 6, 6),
    ),
    "embedding": Layer(
        lambda: nn.Sequential(nn.Embedding(9, 5), nn.LayerNorm(5), nn.Linear(5, 3)),
        lambda: torch.randint(9, (BATCH, 4)),
    ),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-12}
"""How far books of exact rows may miss a weight, relative to its change."""


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.double().clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def recorded(
    path: Path, layer: str, optimizer: str, codec: str, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Tensor, list[dict[str, Tensor]]]:
    """Trains with clipping, so that factors are not 1; the gradients of each step before it."""
    torch.manual_seed(0)
    case = LAYERS[layer]
    model = case.make().to(dtype)
    stepper, seen = OPTIMIZERS[optimizer](model.parameters()), []
    with Recorder(model, stepper, path, keep=CODECS[codec].policy, strict=True) as recorder:
        for step in range(STEPS):
            x = case.inputs()
            x = x.to(dtype) if x.is_floating_point() else x
            recorder.samples([(5 * step + at) % 8 for at in range(BATCH)])
            (model(x).flatten(1) - 1).square().mean().backward()
            seen.append(gradients(model))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            stepper.step()
            stepper.zero_grad()
            if step == 6:
                recorder.checkpoint()
    return model, x, seen


@pytest.fixture(params=[(layer, opt) for layer in LAYERS for opt in OPTIMIZERS], ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    layer, optimizer = request.param
    return layer, optimizer


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_initial_entries_and_residual_are_the_weights(
    codec: str, dtype: torch.dtype, case: tuple[str, str], tmp_path: Path
) -> None:
    model, x, _ = recorded(tmp_path / "run", *case, codec, dtype)
    run = dualform.open(tmp_path / "run")
    audit = run.audit()
    assert audit.coverage == 1.0, audit
    assert audit.remainder <= TOLERANCE[dtype], audit
    for book in audit.books:
        if codec == "exact":
            assert book.residual == 0
        else:
            assert 0 < book.residual < 0.05, audit
    for reading in run.spotlight(model, x[:3]).values():
        parts = reading.check
        size = np.abs(parts.total).max() + np.abs(parts.evidence).max()
        assert np.abs(parts.remainder).max() <= 10 * TOLERANCE[dtype] * size
        assert parts.steps.any() == (codec != "exact")
    between = run.at(9).state_dict()  # not kept: added up
    for name, weight in recorded_at(9, case, dtype).items():
        gap = (between[name].double() - weight).norm() / weight.norm()
        assert gap <= TOLERANCE[dtype]


def recorded_at(step: int, case: tuple[str, str], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights after a step of the same training, without a recorder."""
    torch.manual_seed(0)
    layer = LAYERS[case[0]]
    model = layer.make().to(dtype)
    stepper = OPTIMIZERS[case[1]](model.parameters())
    for _ in range(step):
        x = layer.inputs()
        x = x.to(dtype) if x.is_floating_point() else x
        (model(x).flatten(1) - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        stepper.step()
        stepper.zero_grad()
    return {name: weight.double() for name, weight in model.state_dict().items()}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_step_s_gradient_is_its_rows_and_its_residual(layer: str, tmp_path: Path) -> None:
    """And neither the decoded rows nor the residual alone."""
    _, _, seen = recorded(tmp_path / "run", layer, "momentum", "bfloat16")
    ledger = Ledger(tmp_path / "run")
    for book in ledger.info.books:
        found = step_gradients(RowReader(ledger), book, 1, STEPS)
        everybody = torch.arange(8)
        decoded = step_gradients(RowReader(ledger), book, 1, STEPS, samples=everybody)
        residuals = dict(ledger.residuals(book, 1, STEPS))
        assert sorted(residuals) == list(range(1, STEPS + 1))
        for step, gradient in enumerate((own[book.name] for own in seen), 1):
            size = gradient.norm() + 1e-9
            assert (found[step] - gradient).norm() / size < 1e-5
            assert (decoded[step] + residuals[step] - found[step]).norm() / size < 1e-6
            assert residuals[step].norm() > 0


def test_entries_take_half_or_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    sizes = {}
    for codec in CODECS:
        recorded(tmp_path / codec, "linear", "momentum", codec)
        ledger = Ledger(tmp_path / codec)
        sizes[codec] = sum(ledger.array_bytes(f"0/{side}") for side in ("keys", "values"))
    assert sizes["exact"] == sizes["bfloat16"] * 2 == sizes["int8"] * 4


def test_reads_agree_with_those_of_exact_rows(tmp_path: Path) -> None:
    """To the digits that entries have: by sample in one layer, and through the whole network."""
    found = {}
    for codec in CODECS:
        model, x, _ = recorded(tmp_path / codec, "linear", "adamw", codec)
        run = dualform.open(tmp_path / codec)
        explanation = run.explain(model, x[:2], target=0)
        assert explanation.check is not None
        parts = explanation.check
        summed = parts.initial + parts.evidence + parts.steps + parts.remainder
        assert np.allclose(summed, parts.total)
        assert explanation.completeness.max() < 1e-3
        assert np.abs(parts.remainder).max() < 1e-3 * np.abs(parts.total - parts.initial).max()
        found[codec] = (explanation.values, run.spotlight(model, x[:2])["2"].samples().values)
    for codec in ("bfloat16", "int8"):
        for exact, lossy in zip(found["exact"], found[codec], strict=True):
            gap = np.abs(exact - lossy).max() / np.abs(exact).max()
            assert 0 < gap < 0.03, codec


def test_rows_of_autocast_are_exact(tmp_path: Path) -> None:
    """What the kernel saw has 16 bits: the declaration says so, and nothing is left."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, stepper, tmp_path / "run", keep="half", strict=True):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(5, 6)).float().square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            stepper.step()
            stepper.zero_grad()
    ledger = Ledger(tmp_path / "run")
    (shard,) = ledger.shards
    assert (shard.codec("model").keys, shard.codec("model").values) == ("bfloat16", "bfloat16")
    assert not any(ledger.has_residual(book) for book in ledger.info.books)


def test_autocast_switched_on_the_way_is_declared_anew(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, stepper, tmp_path / "run", strict=True) as recorder:
        for narrow in (False, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                loss = model(torch.randn(5, 6)).float().square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            stepper.step()
            stepper.zero_grad()
            recorder.checkpoint()
    shards = Ledger(tmp_path / "run").shards
    names = [shard.codec("model").values for shard in shards]
    assert names == ["float32", "bfloat16", "float32"]
    assert dualform.open(tmp_path / "run").audit().remainder < 5e-3  # kernels round gradients


def test_the_audit_names_the_residual(tmp_path: Path) -> None:
    recorded(tmp_path / "run", "linear", "adamw", "bfloat16")
    audit = dualform.open(tmp_path / "run").audit()
    assert "residual" in str(audit)
    line = audit.to_dict()["books"][0]
    assert line["residual"] == audit.books[0].residual
    assert audit.books[0].attributed == 1 - audit.books[0].residual
    recorded(tmp_path / "exact", "linear", "adamw", "exact")
    assert "residual" not in str(dualform.open(tmp_path / "exact").audit())
