"""`keep="summaries"`: one small matrix a sample and layer, in bases; the books stay exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer

import dualform
from dualform.errors import CoverageWarning, ReadingError, RecordingError, UnknownStepError
from dualform.ledger import Ledger
from dualform.read import Run
from dualform.read.engine import ShardRange
from dualform.read.scan import chunks
from dualform.recording.bases import BookBases
from dualform.recording.bookkeeping import NOISY
from dualform.recording.directions import basis_by_factors, leading_directions
from dualform.recording.entries import ACCOUNTED
from dualform.recording.keep import Keep, summaries

BATCH, SAMPLES, STEPS = 16, 40, 14


class Tied(nn.Module):
    """A table that is read and multiplied by, a normalization, and a projection in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mix = nn.Embedding(30, 12), nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, words: Tensor) -> Tensor:
        return self.mix(self.norm(self.embed(words))) @ self.embed.weight.T


class Recurrent(nn.Module):
    """An LSTM over short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(10, 9, batch_first=True), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class Attending(nn.Module):
    """Multi-head attention and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(12, 2, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attend(x, x, x, need_weights=False)[0])


def shaped(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(SAMPLES, *shape) * torch.linspace(2, 0.1, shape[-1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 3)),
        shaped(20),
    ),
    "tokens": (
        lambda: nn.Sequential(nn.Linear(20, 15), nn.LayerNorm(15), nn.Linear(15, 3)),
        shaped(7, 20),
    ),
    "normed": (  # its rows share a matrix, but for those of the direction
        lambda: nn.Sequential(nn.Linear(20, 15), nn.Tanh(), weight_norm(nn.Linear(15, 9))),
        shaped(7, 20),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4)
        ),
        shaped(3, 8, 8),
    ),
    "tied": (Tied, lambda: torch.randint(30, (SAMPLES, 9))),
    "lstm": (Recurrent, shaped(6, 10)),
    "attention": (Attending, shaped(8, 12)),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adam with decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def train(
    path: Path | None, model: str, optimizer: str, keep: Keep, *, resume: bool = False
) -> tuple[nn.Module, Tensor]:
    """A few steps with clipping; without a path, the same without a recorder."""
    torch.manual_seed(0)
    make, inputs = MODELS[model]
    net, data = make(), inputs()
    if resume:
        assert path is not None
        net.load_state_dict(dualform.open(path).state_dict())
    stepper = OPTIMIZERS[optimizer](net.parameters())
    order = torch.Generator().manual_seed(int(resume))

    def step(recorder: dualform.Recorder | None) -> None:
        ids = torch.randperm(SAMPLES, generator=order)[:BATCH]
        if recorder is not None:
            recorder.samples(ids)
        (net(data[ids]).flatten(1) - 0.5).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        stepper.step()
        stepper.zero_grad()

    if path is None:
        for _ in range(STEPS):
            step(None)
        return net, data
    with dualform.record(net, stepper, path, keep=keep, resume=resume, strict=True) as recorder:
        for _ in range(STEPS):
            step(recorder)
    return net, data


def opened(path: Path) -> Run:
    return dualform.open(path)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_summaries_are_the_gradient_in_their_bases(
    model: str, optimizer: str, tmp_path: Path
) -> None:
    """The remainder of an audit; and the weights are initial + entries + residual + steps."""
    train(tmp_path / "run", model, optimizer, summaries(3, 6, "rows"))
    run = opened(tmp_path / "run")
    audit, ledger = run.audit(), Ledger(tmp_path / "run")
    by_step = [line for line in audit.books if line.granularity != "row"]
    assert all(line.reason == NOISY for line in by_step), audit
    lossy = [book for book in ledger.info.books if ledger.is_summarized(book)]
    assert lossy
    for line in audit.books:
        if line.name in {book.name for book in lossy}:
            assert np.isnan(line.remainder) or line.remainder < 2e-5, audit
            assert line.residual > 0 or line.granularity == "step"
        else:
            assert line.remainder < 2e-4, audit
            assert line.residual == 0


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_sums_of_offsets_are_exact_where_they_are_asked_for(optimizer: str, tmp_path: Path) -> None:
    train(tmp_path / "run", "tokens", optimizer, summaries(3, 6, "rows", "sums"))
    ledger, audit = Ledger(tmp_path / "run"), opened(tmp_path / "run").audit()
    lines = {line.name: line for line in audit.books}
    for name in ("0.bias", "1.weight", "1.bias"):
        assert lines[name].remainder < 2e-4
        assert lines[name].residual == 0
    assert not any(ledger.is_summarized(book) for book in ledger.info.books if len(book.shape) < 2)


def test_offsets_in_bases_are_their_sums_along_them(tmp_path: Path) -> None:
    """A bias along the errors of its weight, a normalization along its own; against exact sums."""
    sums: dict[str, dict[str, Tensor]] = {}
    bases: dict[str, Tensor | None] = {}
    for offsets in ("summaries", "sums"):
        train(tmp_path / offsets, "tokens", "momentum", summaries(3, 6, "rows", offsets))
        ledger, last = Ledger(tmp_path / offsets), STEPS
        (shard,) = ShardRange.of(ledger, last, last)
        sums[offsets] = {}
        for book in ledger.info.books:
            if len(book.shape) < 2:
                streams = [ledger.info.stream(name) for name in book.terms]
                held = [s for s in streams if shard.holds(s.name)]
                (stream,) = [s for s in held if bool(list(chunks(shard, s)))]
                (chunk,) = chunks(shard, stream)
                order = chunk.samples.argsort()
                found = chunk.values[order].flatten(1).double()
                if offsets == "sums" and (own := bases.get(book.name)) is not None:
                    found = found @ own.double()
                if offsets == "summaries":
                    kept = shard.bases(stream)
                    bases[book.name] = None if kept is None else kept.outputs
                sums[offsets][book.name] = found
    assert {name for name, U in bases.items() if U is not None} == {"0.bias", "1.weight", "1.bias"}
    for name, found in sums["summaries"].items():
        assert torch.allclose(found, sums["sums"][name], atol=1e-6 * float(found.abs().max())), name


@pytest.mark.parametrize("model", MODELS)
def test_training_is_bit_identical(model: str, tmp_path: Path) -> None:
    recorded, _ = train(tmp_path / "run", model, "adamw", "summaries")
    plain, _ = train(None, model, "adamw", "rows")
    for name, weight in plain.state_dict().items():
        assert torch.equal(recorded.state_dict()[name], weight), name


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("model", MODELS)
def test_bases_that_hold_everything_lose_nothing(
    model: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summaries as large as the layers give the reads of all rows. Users are told not to."""
    with pytest.raises(RecordingError, match="summaries"):
        train(tmp_path / "whole", model, optimizer, summaries(99, 999, "rows"))
    monkeypatch.setattr("dualform.recording.plan.refuse_needless", lambda keep, shapes: None)
    net, data = train(tmp_path / "whole", model, optimizer, summaries(99, 999, "rows"))
    train(tmp_path / "rows", model, optimizer, "rows")
    whole, rows = opened(tmp_path / "whole"), opened(tmp_path / "rows")
    assert not any(line.residual for line in whole.audit().books)
    seen = [
        run.explain(net.eval(), data[:2], lambda out: out.flatten(1).square().sum(1)).values
        for run in (whole, rows)
    ]
    assert np.abs(seen[0] - seen[1]).max() < 1e-4 * np.abs(seen[1]).max()


def test_a_summary_is_what_a_sample_adds_in_the_bases(tmp_path: Path) -> None:
    """Against each sample's own gradient, alone, in float64."""
    torch.manual_seed(0)
    data = torch.randn(BATCH, 7, 20)
    net = nn.Linear(20, 15)
    stepper = torch.optim.SGD(net.parameters(), lr=0.1)
    first = {name: p.detach().double().clone() for name, p in net.named_parameters()}
    with dualform.record(
        net, stepper, tmp_path / "run", keep=summaries(2, 3, "rows"), strict=True
    ) as recorder:
        recorder.samples(range(BATCH))
        net(data).square().mean().backward()
        stepper.step()
    ledger = Ledger(tmp_path / "run")
    (shard,) = ShardRange.of(ledger, 1, 1)
    stream = next(s for s in ledger.info.streams if any(s.bases))
    bases, (chunk,) = shard.bases(stream), list(chunks(shard, stream))
    assert bases is not None
    for sample, summary in zip(chunk.samples.tolist(), chunk.values, strict=True):
        W = first["weight"].clone().requires_grad_()
        out = data[sample].double() @ W.T + first["bias"]
        (out.square().sum() / (BATCH * 7 * 15)).backward()
        assert W.grad is not None
        expected = bases.project(W.grad)
        assert (summary.reshape(2, 3) - expected).norm() < 1e-5 * expected.norm()


def test_leading_directions_are_those_of_the_second_moment() -> None:
    torch.manual_seed(0)
    rows = torch.randn(400, 30) * torch.tensor([3.0] * 5 + [0.3] * 25)
    found = leading_directions(rows, 5)
    assert found is not None
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    inside = (vectors[:, -5:].T @ found).square().sum() / 5
    assert inside > 0.97
    assert torch.allclose(found.T @ found, torch.eye(5), atol=2e-2)


@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-4, 1e-6, 1e-8, 1e-20, 0.0])
def test_a_basis_by_factors_is_orthonormal_or_none(apart: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shared, own = torch.randn(2, 300, 40, generator=generator)
    directions = shared[:, :1] + apart * own
    directions[:, -1] = directions[:, 0] if apart < 1 else directions[:, -1]
    found = basis_by_factors(directions / directions.norm(dim=0))
    assert (found is None) == (apart < 1)
    if found is not None:
        torch.testing.assert_close(found.T @ found, torch.eye(40), atol=1e-5, rtol=0)
        inside = found @ (found.T @ directions)
        torch.testing.assert_close(inside, directions, atol=1e-4, rtol=1e-4)


def test_a_basis_by_factors_of_what_is_no_number_is_none() -> None:
    directions = torch.eye(5)
    directions[2, 1] = float("nan")
    assert basis_by_factors(directions) is None


@pytest.mark.parametrize(
    ("optimizer", "model"), [("momentum", "tokens"), ("adamw", "tokens"), ("adamw", "normed")]
)
def test_reads_add_up_and_name_the_attributed_share(
    optimizer: str, model: str, tmp_path: Path
) -> None:
    net, data = train(tmp_path / "run", model, optimizer, summaries(3, 8))
    run = opened(tmp_path / "run")
    for reading in run.spotlight(net, data[:2]).values():
        parts = reading.check
        summed = parts.initial + parts.evidence + parts.steps + parts.remainder
        assert np.allclose(summed, parts.total)
        assert np.abs(parts.remainder).max() < 1e-4 * np.abs(parts.total).max()
    explained = run.explain(net, data[:2], lambda out: out.flatten(1).sum(1))
    assert explained.check is not None
    assert explained.completeness.max() < 1e-2
    assert run.influence(net, data[:2], lambda out: out.flatten(1).sum(1)).values.shape == (40, 2)
    assert run.subtract([0, 1]) is not None
    assert run.audit().books[0].attributed < 1


@pytest.mark.parametrize(("model", "height"), [("mlp", 15), ("tokens", 15), ("conv", 8)])
def test_layers_that_are_whole_on_their_outputs_are_held_against_gradients(
    model: str, height: int, tmp_path: Path
) -> None:
    """With a basis of inputs only, the gradient in it is `G V`."""
    train(tmp_path / "run", model, "adamw", summaries(height, 4, "rows"))
    ledger = Ledger(tmp_path / "run")
    sides = {s.bases for s in ledger.info.streams if s.bases and s.bases[1]}
    assert sides
    assert all(not outputs for outputs, _ in sides)
    for line in opened(tmp_path / "run").audit().books:
        assert line.remainder < 2e-5, line


def test_few_rows_a_sample_are_kept_along_the_bases(tmp_path: Path) -> None:
    """A sample of one row takes k_o + k_i numbers, not k_o × k_i."""
    train(tmp_path / "run", "mlp", "momentum", summaries(4, 8))
    streams = {s.name: s for s in Ledger(tmp_path / "run").info.streams}
    assert (streams["0~weight"].keys, streams["0~weight"].values) == ((8,), (4,))
    assert streams["0~weight"].bases == (4, 8)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("model", "name", "size"), [("conv", "3.weight", (8, 26)), ("tokens", "2.weight", (5, 10))]
)
def test_whole_weights_are_rounded_where_that_pays(
    model: str, name: str, size: tuple[int, int], optimizer: str, tmp_path: Path
) -> None:
    """16 samples save more than a residual takes; the books are as exact as those of rows."""
    train(tmp_path / "run", model, optimizer, summaries(*size))
    ledger = Ledger(tmp_path / "run")
    line = next(b for b in opened(tmp_path / "run").audit().books if b.name == name)
    book = next(b for b in ledger.info.books if b.name == name)
    assert not ledger.is_summarized(book)
    assert "int8" in {shard.codec(s).name for shard in ledger.shards for s in book.terms}
    assert line.remainder < 2e-4
    assert 0 < line.residual < 0.2


@pytest.mark.parametrize(("batch", "codec"), [(2, "exact"), (24, "int8")])
def test_rows_that_wait_for_bases_are_rounded_where_that_pays(
    batch: int, codec: str, tmp_path: Path
) -> None:
    net = nn.Linear(24, 16)
    stepper = torch.optim.SGD(net.parameters(), lr=0.1)
    with dualform.record(net, stepper, tmp_path / "run", keep=summaries(4, 12)) as recorder:
        for _ in range(3):
            recorder.samples(range(batch))
            net(torch.randn(batch, 24)).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    ledger = Ledger(tmp_path / "run")
    first = next(s for s in ledger.info.streams if s.keys == (24,))
    assert ledger.shards[0].codec(first.name).name == codec
    assert ledger.has_residual(ledger.info.books[0]) == (codec == "int8")


def test_a_run_goes_on_with_bases_of_its_own(tmp_path: Path) -> None:
    train(tmp_path / "run", "tokens", "momentum", summaries(3, 8, "rows"))
    train(tmp_path / "run", "tokens", "momentum", summaries(3, 8, "rows"), resume=True)
    run = opened(tmp_path / "run")
    names = [s.name for s in run.info.streams if any(s.bases)]
    assert "0~weight" in names
    assert "0~weight@2" in names
    assert run.audit().remainder < 1e-4


def test_each_layer_has_a_shape_that_suits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide on the longer side of the weight, since lines run along it; the books stay exact."""
    monkeypatch.setattr("dualform.recording.shapes.NUMBERS", 64)
    monkeypatch.setattr("dualform.recording.keep.NUMBERS", 64)
    monkeypatch.setattr("dualform.recording.bases.DIRECTIONS", (4, 16))
    train(tmp_path / "run", "mlp", "momentum", summaries(numbers="rows"))
    train(tmp_path / "run2", "tokens", "adamw", summaries(numbers="rows"))
    for path in (tmp_path / "run", tmp_path / "run2"):
        streams = {s.name: s for s in Ledger(path).info.streams}
        outputs, inputs = streams["0~weight"].bases
        assert (outputs or 15) * (inputs or 20) <= 2 * 64
        assert (outputs or 15) < (inputs or 20)
        audit = opened(path).audit()
        assert audit.coverage == 1.0
        assert audit.remainder < 2e-5


def test_a_table_that_is_multiplied_by_as_well_has_a_wide_basis_of_inputs() -> None:
    """A head alone would have all words and few inputs; what is read is an error along V."""
    bases = BookBases(tables={"words"})
    errors, inputs = torch.randn(1024, 700), torch.randn(1024, 4) @ torch.randn(4, 600)
    for book, wanted in (("words", (16, 128)), ("head", (256, 8))):
        found = bases.of(book, summaries(), errors, inputs)
        assert found is not None
        assert found.size((700, 600)) == wanted


def test_offsets_may_be_kept_by_step(tmp_path: Path) -> None:
    train(tmp_path / "run", "tokens", "adamw", summaries(3, 8, offsets="steps"))
    kept = {line.name: line.granularity for line in opened(tmp_path / "run").audit().books}
    assert kept["0.weight"] == "row"
    assert kept["0.bias"] == kept["1.weight"] == "step"


def test_accounts_are_kept_of_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 16 steps, and one more for each handover that begins in between."""
    monkeypatch.setitem(globals(), "STEPS", 100)
    train(tmp_path / "run", "tokens", "momentum", summaries(3, 5))
    kept = Ledger(tmp_path / "run").column("0.weight/account_steps")
    assert 3 < len(kept) <= 100 // ACCOUNTED + 5


def test_layers_without_rows_are_revisited_without_queries(tmp_path: Path) -> None:
    train(tmp_path / "run", "tied", "momentum", summaries(3, 5))
    seen = opened(tmp_path / "run").revisit([1, 2])
    assert len(seen["embed"].total) == 0


def test_what_summaries_cannot_answer_is_refused_in_words(tmp_path: Path) -> None:
    net, data = train(tmp_path / "run", "tokens", "momentum", summaries(3, 8))
    run = opened(tmp_path / "run")
    with pytest.raises(UnknownStepError, match=r"kept as summaries.*recorder.checkpoint\(\)"):
        run.at(5).state_dict()
    with pytest.raises(ReadingError, match="'0' was kept as summaries; record it with keep='rows'"):
        run.spotlight(net, data[:1])["0"].memory()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"outputs": 0, "inputs": 8}, r"summaries\(outputs=0\) is no number of directions from 1"),
        ({"numbers": "zip"}, r"summaries\(numbers='zip'\) is unknown; there are \['rows', 'half'"),
        ({"inputs": 8}, "one side of a size, and outputs is missing; give outputs and inputs, or"),
        (
            {"offsets": "rows"},
            r"summaries\(offsets='rows'\) is unknown; there are 'summaries', 'sums', 'steps'",
        ),
    ],
)
def test_bad_sizes_are_refused(given: dict[str, object], problem: str) -> None:
    with pytest.raises(RecordingError, match=problem):
        summaries(**given)  # type: ignore[arg-type]


def test_bases_are_renewed_where_later_rows_vary_otherwise(tmp_path: Path) -> None:
    """What the layer sees moves to other directions; a second stream has bases of its own."""
    torch.manual_seed(0)
    net = nn.Linear(20, 15)
    stepper = torch.optim.SGD(net.parameters(), lr=0.01)
    spread = torch.linspace(3, 0.01, 20)
    with dualform.record(
        net, stepper, tmp_path / "run", keep=summaries(3, 5, "rows"), strict=True
    ) as recorder:
        for step in range(90):
            recorder.samples(range(BATCH))
            data = torch.randn(BATCH, 9, 20) * (spread if step < 40 else spread.flip(0))
            (net(data) - 1).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    run = opened(tmp_path / "run")
    shards = Ledger(tmp_path / "run").shards
    assert any("model~weight@2/segments" in shard.file for shard in shards)
    audit = run.audit()
    assert audit.coverage == 1.0
    assert audit.remainder < 1e-4


def test_passes_that_are_thrown_away_are_noticed_by_every_book(tmp_path: Path) -> None:
    """Also in steps in which most summarized books would not be probed."""
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 9)), torch.randn(90, 20)
    stepper = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    with dualform.record(
        net, stepper, tmp_path / "run", keep=summaries(4, 8, "rows"), strict=True
    ) as recorder:
        for step in range(24):
            for scale in (7.0, 1.0) if step % 5 == 4 else (1.0,):
                stepper.zero_grad()
                ids = torch.randperm(len(data))[:BATCH]
                recorder.samples(ids)
                (scale * net(data[ids]).square().mean()).backward()
            stepper.step()
    audit = opened(tmp_path / "run").audit()
    assert audit.coverage == 1.0, audit
    assert audit.remainder < 1e-5


@pytest.mark.parametrize("policy", [summaries(), summaries(4, 8)])
def test_a_scaler_that_skips_the_first_steps(policy: Keep, tmp_path: Path) -> None:
    """Errors that are not finite make no bases."""
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(70, 60), nn.Tanh(), nn.Linear(60, 9)), torch.randn(90, 70)
    stepper = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    skipped = 0
    with dualform.record(net, stepper, tmp_path / "run", keep=policy, strict=True) as recorder:
        for _ in range(60):
            ids = torch.randperm(len(data))[:BATCH]
            recorder.samples(ids)
            with torch.autocast("cpu", torch.float16):
                loss = net(data[ids]).float().square().mean()
            stepper.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(stepper)
            before = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < before
    assert 2 < skipped < 40
    audit = opened(tmp_path / "run").audit()
    assert audit.coverage == 1.0, audit
    assert audit.remainder < 0.05


def test_an_offset_has_a_basis_of_its_own_again_where_its_weight_needs_none() -> None:
    """A weight that is renewed to be whole on its outputs has no U that its bias could share."""
    torch.manual_seed(0)
    bases = BookBases()
    narrow, wide = torch.randn(2000, 4) @ torch.randn(4, 100), torch.randn(2000, 100)
    few, many = torch.randn(2000, 2) @ torch.randn(2, 200), torch.randn(2000, 200)
    first = bases.of("w", summaries(), narrow, many, offsets=["b"])
    assert first is not None
    assert first.outputs is not None
    assert torch.equal(bases.found["b"].outputs, first.outputs)
    for _ in range(4):
        bases.begin_step()
    assert bases.stale == {"w"}
    bases.of("w", summaries(), wide, few, offsets=["b"])
    bases.begin_step()
    assert bases.found["w"].outputs is None
    while not bases.stale:
        bases.begin_step()
    assert "b" in bases.stale


def test_a_gradient_that_summaries_do_not_explain_is_kept_by_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = summaries(4, 8)
    warned = pytest.warns(CoverageWarning, match="not the sum of the rows")
    with warned, dualform.record(model, optimizer, tmp_path / "run", keep=policy) as recorder:
        for _ in range(3):
            model(torch.randn(600, 40)).square().sum().backward()
            model.weight.grad = torch.randn_like(model.weight)
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.failure is None
    weight = opened(tmp_path / "run").audit().books[0]
    assert (weight.name, weight.granularity) == ("weight", "step")
    assert "not the sum of the rows" in weight.reason
