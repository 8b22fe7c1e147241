"""Compiled models: the same training, and the same records as of the model as it was written."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import CoverageWarning, RecordingEndedWarning, RecordingError, RecordingWarning
from dualform.ledger import Ledger
from dualform.recording.taps import TAPS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]  # what torch does by itself when it compiles
EXACT = dualform.summaries(4, 8, "rows")
SAMPLES, TOKENS, WORDS = 6, 12, 20


class Block(nn.Module):
    """A block of a transformer, without the attention's own mixing of positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.mix = nn.Parameter(torch.randn(width, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Also a product with a bare matrix."""
        return x + self.down(F.gelu(self.up(self.norm(x)))) + (x.cumsum(1) @ self.mix).tanh()


class Text(nn.Module):
    """Words, positions that are read once for all samples, and a head that is tied."""

    def __init__(self, checkpointed: bool = False, blocks: int = 1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 12), nn.Embedding(TOKENS, 12)
        self.blocks = nn.ModuleList(Block(12) for _ in range(blocks))
        self.head, self.checkpointed = nn.Linear(12, WORDS, bias=False), checkpointed
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        scores = self.head(x)[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


class Images(nn.Module):
    """Convolutions in one group and in several, batch norm, positions, a scale, a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2, groups=4, bias=False)
        self.scale, self.place = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(1, 9, 8))
        self.token, self.head = nn.Parameter(torch.zeros(1, 1, 8)), nn.Linear(8, 5)
        self.groups = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        x = F.relu(self.norm(self.first(x)))
        x = self.groups(self.second(x)).flatten(2).mT
        x = x * self.scale + self.place
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(x.mean(1)).square().mean()


class Attention(nn.Module):
    """`nn.MultiheadAttention`."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.MultiheadAttention(12, 2, batch_first=True), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.head(self.mix(x, x, x, need_weights=False)[0]).square().mean()


def texts(seed: int, samples: int = SAMPLES, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (samples, tokens), generator=generator)


def noise(*shape: int) -> Callable[[int], Tensor]:
    return lambda seed: torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))


Make = Callable[[], nn.Module]


def graphs() -> int:
    """How many graphs torch has compiled."""
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))


class Training:
    """A few steps of a model, compiled or not, recorded or not."""

    def __init__(
        self,
        make: Make,
        batches: Callable[[int], Tensor] = texts,
        compiled: str = "whole",
        backend: str = "aot_eager",
        steps: int = 4,
        passes: int = 1,
        rule: type[torch.optim.Optimizer] = torch.optim.SGD,
        autocast: bool = False,
        scaled: bool = False,
    ) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        self.model = self.called = make()
        if compiled == "whole":
            self.called = torch.compile(self.model, backend=backend, fullgraph=True)  # type: ignore[assignment]
        elif compiled:
            self.model.compile(backend=backend, fullgraph=True)
        self.optimizer = rule(self.model.parameters(), lr=0.05)  # type: ignore[call-arg]
        self._batches, self._steps, self._passes = batches, steps, passes
        self._autocast, self._scaled = autocast, scaled
        self.graphs: list[int] = []

    def run(self, recorder: Any = None, after_step: Callable[[int], None] | None = None) -> None:
        """Trains."""
        scaler = torch.amp.GradScaler("cpu", enabled=self._scaled, init_scale=256.0)
        for step in range(self._steps):
            for at in range(self._passes):
                batch = self._batches(step * self._passes + at)
                if recorder is not None:
                    first = 100 * step + 10 * at
                    recorder.samples(list(range(first, first + len(batch))))
                with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                    loss = self.called(batch) / self._passes
                scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()
            self.graphs.append(graphs())
            if after_step is not None:
                after_step(step)

    def record(self, path: Path, keep: Any = EXACT, **options: Any) -> Training:
        """Trains and records; strictly, so that a failure raises."""
        with dualform.record(self.called, self.optimizer, path, keep=keep, strict=True) as recorder:
            self.run(recorder, **options)
        return self


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def records(path: Path) -> dict[tuple[int, str], Tensor]:
    """All that the shards of a run hold."""
    found = {}
    for shard in Ledger(path).shards:
        for name in shard.file.arrays:
            found[shard.first, name] = shard.file.read(name)
    return found


def close(path: Path, other: Path, error: float = 2e-5) -> None:
    """Holds two runs to hold the same."""
    left, right = records(path), records(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        size = right[name].double().norm() + 1e-12
        assert (tensor.double() - right[name].double()).norm() <= error * size, name


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model keeps the bases of its first steps; so does what it is compared with.

    On a busy machine a short run lasts longer than a flush waits: files would end where it ends.
    """
    monkeypatch.setattr("dualform.recording.bases.RENEWED", ())
    monkeypatch.setattr("dualform.recording.schedule.FLUSH_SECONDS", float("inf"))


def balanced(path: Path, coverage: float = 1.0, error: float = 1e-5) -> None:
    audit = dualform.open(path).audit()
    assert audit.coverage == coverage, [b for b in audit.books if b.reason]
    assert audit.remainder < error


@contextmanager
def waiting() -> Iterator[None]:
    """Ignores that a model runs uncompiled at first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model runs without", RecordingWarning)
        yield


CASES: dict[str, tuple[Make, Callable[[int], Tensor], int]] = {
    "text": (lambda: Text(blocks=2), texts, 4),
    "checkpoints": (lambda: Text(checkpointed=True), texts, 4),
    "images": (Images, noise(3, 8, 8), 14),
    "attention": (Attention, noise(14, 12), 4),
    "rows": (
        lambda: nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 2), Mean()),
        noise(9),
        16,
    ),
}


class Mean(nn.Module):
    """The loss of numbers that should be zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Their mean square."""
        return x.square().mean()


@pytest.mark.parametrize("case", CASES)
def test_training_and_records_are_the_same(case: str, tmp_path: Path) -> None:
    make, batches, steps = CASES[case]
    plain = Training(make, batches, steps=steps)
    plain.run()
    with waiting():
        compiled = Training(make, batches, steps=steps).record(tmp_path / "run")
        Training(make, batches, "", steps=steps).record(tmp_path / "eager")
    for before, after in zip(weights(plain.model), weights(compiled.model), strict=True):
        assert torch.equal(before, after)
    assert compiled.graphs[0] == 0  # as it was written
    assert compiled.graphs[-1] == 1
    close(tmp_path / "run", tmp_path / "eager")
    balanced(tmp_path / "run", error=3e-5)


@pytest.mark.parametrize(
    "how",
    [
        {"rule": torch.optim.AdamW},
        {"passes": 3},
        {"autocast": True},
        {"scaled": True},
        {"compiled": "in place"},
    ],
    ids=str,
)
def test_ways_to_train(how: dict[str, Any], tmp_path: Path) -> None:
    plain = Training(Text, **how)
    plain.run()
    compiled = Training(Text, **how).record(tmp_path / "run")
    Training(Text, **{**how, "compiled": ""}).record(tmp_path / "eager")
    assert all(map(torch.equal, weights(plain.model), weights(compiled.model)))
    assert compiled.graphs[1:] == [1] * 3
    loose = "autocast" in how
    close(tmp_path / "run", tmp_path / "eager", 2e-2 if loose else 2e-5)
    balanced(tmp_path / "run", error=2e-2 if loose else 1e-5)


def sizes(step: int) -> Tensor:
    """Batches of several sizes, and in the end longer samples."""
    samples, tokens = [(6, 11), (6, 11), (4, 11), (1, 11), (8, 11), (6, 12), (6, 7)][step]
    return texts(step, samples, tokens)


class Words(nn.Module):
    """The least with a use of each form: a table, positions, a scale, a bias and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 12), nn.Embedding(TOKENS, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        scores = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.filterwarnings("ignore:the batch of step:dualform.errors.RecordingWarning")
@pytest.mark.parametrize("make", [Words, pytest.param(Text, marks=pytest.mark.long)])
def test_batches_of_several_sizes(make: Make, tmp_path: Path) -> None:
    plain = Training(make, sizes, steps=7)
    plain.run()
    compiled = Training(make, sizes, steps=7).record(tmp_path / "run")
    assert all(map(torch.equal, weights(plain.model), weights(compiled.model)))
    assert compiled.graphs[-1] <= plain.graphs[-1] + 2  # larger probes
    Training(make, sizes, "", steps=7).record(tmp_path / "eager")
    balanced(tmp_path / "run")
    queries = texts(0, 2, 7)
    one, other = (
        dualform.open(tmp_path / name).explain(compiled.model, queries, lambda loss: loss)
        for name in ("run", "eager")
    )
    torch.testing.assert_close(one.values, other.values, rtol=1e-3, atol=1e-6)


class Twice(nn.Module):
    """A layer that is called twice, on one vector a sample: its rows are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(9, 9), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.head(self.layer(self.layer(x).tanh())).square().mean()


def test_a_layer_that_is_called_twice(tmp_path: Path) -> None:
    for name, compiled in (("run", "whole"), ("eager", "")):
        with waiting():
            training = Training(Twice, noise(9), compiled, steps=16).record(tmp_path / name)
        assert training.graphs[-1] == bool(compiled)
    balanced(tmp_path / "run")
    audits = [dualform.open(tmp_path / name).audit() for name in ("run", "eager")]
    for one, other in zip(*(audit.books for audit in audits), strict=True):
        assert one.attributed == pytest.approx(other.attributed, abs=1e-4), one.name


def test_an_optimizer_whose_step_is_compiled(tmp_path: Path) -> None:
    """It runs as it was written, so that hooks on it do."""
    plain = Training(Text)
    plain.run()
    training = Training(Text)
    step = torch.compile(lambda: training.optimizer.step(), backend="aot_eager")  # type: ignore[call-arg]
    with dualform.record(
        training.called, training.optimizer, tmp_path / "run", keep=EXACT, strict=True
    ):
        for at in range(4):
            training.called(texts(at)).backward()
            step()
            training.optimizer.zero_grad()
    assert all(map(torch.equal, weights(plain.model), weights(training.model)))
    assert graphs() == 1
    balanced(tmp_path / "run")


def test_a_graph_that_is_gone_through_twice(tmp_path: Path) -> None:
    def train(name: str, compiled: str) -> None:
        training = Training(Text, compiled=compiled)
        with dualform.record(
            training.called, training.optimizer, tmp_path / name, keep=EXACT, strict=True
        ):
            for step in range(4):
                loss = training.called(texts(step))
                loss.backward(retain_graph=step != 2)
                if step in (1, 3):
                    loss.backward()
                if step != 2:
                    training.optimizer.step()
                    training.optimizer.zero_grad()

    train("run", "whole")
    train("eager", "")
    balanced(tmp_path / "run")
    audits = [dualform.open(tmp_path / name).audit() for name in ("run", "eager")]
    for one, other in zip(*(audit.books for audit in audits), strict=True):
        assert one.attributed == pytest.approx(other.attributed, abs=1e-4), one.name


def test_passes_that_leave_nothing(tmp_path: Path) -> None:
    """Evaluation, with gradients and without, and the gradient of an input."""
    for compiled in ("whole", ""):
        training = Training(Text, compiled=compiled)

        def look(step: int, training: Training = training) -> None:
            with torch.no_grad():
                training.called(texts(50 + step))
            training.called(texts(60 + step))

        training.record(tmp_path / (compiled or "eager"), after_step=look)
        assert training.graphs[-1] == (2 if compiled else 0)  # one more for evaluation
    close(tmp_path / "whole", tmp_path / "eager")


def test_nothing_stays_on_the_model(tmp_path: Path) -> None:
    training = Training(Text)
    call = training.called.forward
    file = io.BytesIO()

    def save(step: int) -> None:
        if step == 2:
            assert any(hasattr(p, TAPS) for p in training.model.parameters())
            assert copy.deepcopy(training.model).state_dict().keys()
            torch.save(training.model, file)

    training.record(tmp_path / "run", after_step=save)
    assert b"dualform.recording" not in file.getvalue()
    assert not any(hasattr(p, TAPS) for p in training.model.parameters())
    assert training.called.forward is call


class Parts(nn.Module):
    """A matrix of which a part is used, and a table that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.matrix = nn.Embedding(9, 10), nn.Parameter(torch.randn(9, 10))
        self.head = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        x = self.table(ids % 9) * self.table((ids + 1) % 9)
        return self.head(F.linear(x, self.matrix[:8])).square().mean()


def test_what_cannot_be_tapped_is_kept_by_step(tmp_path: Path) -> None:
    training = Training(Parts, steps=4)
    with pytest.warns(CoverageWarning, match="from step 2 on: a compiled model") as caught:
        training.record(tmp_path / "run")
    plain = Training(Parts, steps=4)
    plain.run()
    assert all(map(torch.equal, weights(plain.model), weights(training.model)))
    kept = {book.name: book.granularity for book in dualform.open(tmp_path / "run").audit().books}
    assert kept == {
        "table.weight": "row, then step",
        "matrix": "row, then step",
        "head.weight": "row",
        "head.bias": "row",
    }
    text = str(caught[0].message)
    assert "reads it more than once" in text
    assert "uses a part of it" in text


def test_a_model_that_stays_as_it_was_written(tmp_path: Path) -> None:
    training = Training(lambda: Text(checkpointed=True), compiled="in place")
    with pytest.warns(RecordingWarning, match=r"needs torch\.compile\(model, fullgraph=True\)"):
        training.record(tmp_path / "run")
    assert training.graphs[-1] == 0
    balanced(tmp_path / "run")


def test_a_failure_of_the_compiler_ends_the_recording_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        torch._dynamo.graph_break("not with us")

    monkeypatch.setattr("dualform.recording.taps._records", fails)
    training = Training(Text)
    record = dualform.record(training.called, training.optimizer, tmp_path / "run", keep=EXACT)
    with pytest.warns(RecordingEndedWarning, match="torch cannot compile the model"), record:
        training.run()
    plain = Training(Text)
    plain.run()
    assert all(map(torch.equal, weights(plain.model), weights(training.model)))
    assert dualform.open(tmp_path / "run").steps == 1


@pytest.mark.parametrize("keep", ["rows", "half", "int8", {"blocks": "rows", "*": "summaries"}])
def test_rows_of_a_compiled_model_are_refused(keep: Any, tmp_path: Path) -> None:
    training = Training(Text)
    with pytest.raises(RecordingError, match=r"no rows to keep.*Use keep='summaries'"):
        training.record(tmp_path / "run", keep)


def test_what_else_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters())
    called = torch.compile(model, mode="reduce-overhead")
    with (
        pytest.raises(RecordingError, match=r"CUDA graphs.*max-autotune-no-cudagraphs"),
        dualform.record(called, optimizer, tmp_path / "run", keep="summaries"),  # type: ignore[arg-type]
    ):
        pass
    model[0] = torch.compile(model[0])
    with (
        pytest.raises(RecordingError, match=r"'0' is compiled.*Compile the whole model"),
        dualform.record(model, optimizer, tmp_path / "run", keep="summaries"),
    ):
        pass


def test_going_on_with_a_run(tmp_path: Path) -> None:
    first = Training(Text).record(tmp_path / "run")
    second = Training(Text, lambda step: texts(step + 10))
    second.model.load_state_dict(first.model.state_dict())
    given = (second.called, second.optimizer, tmp_path / "run")
    with dualform.record(*given, keep=EXACT, strict=True, resume=True) as recorder:
        second.run(recorder)
    assert second.graphs == [0, 1, 1, 1]
    assert dualform.open(tmp_path / "run").steps == 8
    balanced(tmp_path / "run")


@pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")
def test_a_model_of_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"n_positions": TOKENS, "n_embd": 12, "n_layer": 1, "n_head": 2}
            ends = {"bos_token_id": 0, "eos_token_id": 0}
            still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            self.text = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **ends, **still))
            self.text.loss_type = "ForCausalLM"  # else transformers warns, which is no graph

        def forward(self, ids: Tensor) -> Tensor:
            loss: Tensor = self.text(ids, labels=ids, use_cache=False).loss
            return loss

    plain = Training(Loss)
    plain.run()
    compiled = Training(Loss).record(tmp_path / "run")
    Training(Loss, compiled="").record(tmp_path / "eager")
    assert all(map(torch.equal, weights(plain.model), weights(compiled.model)))
    assert compiled.graphs == [0, 1, 1, 1]
    close(tmp_path / "run", tmp_path / "eager", 1e-4)
    eager = dualform.open(tmp_path / "eager").audit()  # biases of keys have no gradient but noise
    balanced(tmp_path / "run", eager.coverage, 1.1 * eager.remainder)


@pytest.mark.long
def test_inductor(tmp_path: Path) -> None:
    plain = Training(Text, backend="inductor")
    plain.run()
    compiled = Training(Text, backend="inductor").record(tmp_path / "run")
    for before, after in zip(weights(plain.model), weights(compiled.model), strict=True):
        torch.testing.assert_close(before, after)
    assert compiled.graphs == [0, 1, 1, 1]
    Training(Text, compiled="").record(tmp_path / "eager")
    close(tmp_path / "run", tmp_path / "eager", 1e-4)
    balanced(tmp_path / "run")
