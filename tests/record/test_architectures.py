"""Whole architectures, recorded: every row belongs to its sample and position, and they add up."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dualform
from dualform.read import Run
from dualform.record.settle import NOISY
from dualform.testing.training import Loop

os.environ["HF_HUB_OFFLINE"] = "1"

Batch: TypeAlias = dict[str, Tensor]
"""What a model is called with, by name."""

SAMPLES, WORDS, TIME, CLASSES = 12, 11, 7, 4
LOOP = Loop(steps=6, batch=4)
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
IGNORED = -100
"""The target where a sequence has ended."""


# The models


class LanguageModel(nn.Module):
    """Words, two recurrent layers with dropout in between, a head."""

    def __init__(self, batch_first: bool = True, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.lstm = nn.LSTM(6, 5, 2, dropout=dropout, batch_first=batch_first)
        self.head = nn.Linear(5, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(words))[0])


class Packed(LanguageModel):
    """The same over sequences of different lengths, or over all they are filled up with."""

    def __init__(self, pack: bool = True) -> None:
        super().__init__(dropout=0.0)
        self.pack = pack

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        read = self.embed(words)
        if not self.pack:
            return self.head(self.lstm(read)[0])
        packed = pack_padded_sequence(read, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        return self.head(pad_packed_sequence(out, batch_first=True, total_length=TIME)[0])


class ViT(nn.Module):
    """Patches by convolution, a class token, positions, an encoder, a head on the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8) / 2)
        self.positions = nn.Parameter(torch.randn(1, 5, 8) / 2)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.encoder(x))[:, 0])


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        around = (nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.around = nn.Sequential(*around) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.around(x), inplace=True)


class ResNet(nn.Module):
    """The first convolution has a bias, which its normalization takes out again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(Residual(4, 4, 1), Residual(4, 8, 2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(image)), inplace=True))
        return self.head(self.drop(x.mean((2, 3))))


class Classifier(nn.Module):
    """What is fine-tuned: an encoder that gets an adapter, and a head that is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(features)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_positions": TIME, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, initializer_range=0.3, bos_token_id=0, eos_token_id=0)
    )


def lora_gpt2() -> nn.Module:
    return _adapted(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True)


def lora_linear() -> nn.Module:
    return _adapted(Classifier(), target_modules=["encoder"], modules_to_save=["head"])


def _adapted(model: nn.Module, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, lora_alpha=8, lora_dropout=0.1, **options))


# Their data


def words() -> tuple[Batch, Tensor]:
    drawn = torch.randint(0, WORDS, (SAMPLES, TIME + 1))
    return {"words": drawn[:, :-1]}, drawn[:, 1:]


def words_over_time() -> tuple[Batch, Tensor]:
    batch, targets = words()
    return {"words": batch["words"].T}, targets.T


def unequal_words() -> tuple[Batch, Tensor]:
    batch, targets = words()
    lengths = torch.tensor([3, 7, 1, 5, 2, 6, 4, 7, 3, 1, 5, 2])
    return batch | {"lengths": lengths}, _until(targets, lengths)


def masked_words() -> tuple[Batch, Tensor]:
    batch, targets = unequal_words()
    mask = (targets != IGNORED).long()
    return {"input_ids": batch["words"], "attention_mask": mask}, targets


def _until(targets: Tensor, lengths: Tensor) -> Tensor:
    return targets.masked_fill(torch.arange(TIME) >= lengths[:, None], IGNORED)


def images() -> tuple[Batch, Tensor]:
    return {"image": torch.randn(SAMPLES, 3, 8, 8)}, torch.randint(0, CLASSES, (SAMPLES,))


def features() -> tuple[Batch, Tensor]:
    return {"features": torch.randn(SAMPLES, 6)}, torch.randint(0, CLASSES, (SAMPLES,))


@dataclass(frozen=True)
class Architecture:
    """A model and its data, how it is trained, and which books no row can explain, by pattern."""

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Batch, Tensor]]
    lr: float = 1.0
    axis: int = 0
    """The dimension of the data that counts samples."""
    noisy: str = "nothing"
    """Offsets that what follows takes out again, as regular expression."""
    noisy_count: int = 0


ARCHITECTURES = {
    "LSTM": Architecture(LanguageModel, words, lr=4.0),
    "LSTM, time first": Architecture(
        lambda: LanguageModel(batch_first=False), words_over_time, lr=4.0, axis=1
    ),
    "LSTM, packed": Architecture(Packed, unequal_words, lr=6.0),
    "ViT": Architecture(ViT, images, noisy=r"self_attn\.in_proj_bias$", noisy_count=2),
    "ResNet": Architecture(ResNet, images, noisy=r"^stem\.bias$", noisy_count=1),
    "GPT-2": Architecture(gpt2, masked_words, lr=0.2, noisy=r"attn\.c_attn\.bias$", noisy_count=2),
    "LoRA on GPT-2": Architecture(lora_gpt2, masked_words, lr=0.3),
    "LoRA on Linear": Architecture(lora_linear, features, lr=3.0),
}
NAMES = list(ARCHITECTURES)
OPTIMIZERS = ["SGD", "AdamW"]
DECAY = 0.1
RATE = 0.05
"""AdamW's."""


# Training them


@dataclass(frozen=True)
class Problem:
    """A model before training, and its data."""

    name: str
    model: nn.Module
    batch: Batch
    targets: Tensor

    def of(self, ids: Tensor) -> tuple[Batch, Tensor]:
        axis = ARCHITECTURES[self.name].axis
        chosen = {name: x.index_select(axis, ids) for name, x in self.batch.items()}
        return chosen, self.targets.index_select(axis if self.targets.ndim > 1 else 0, ids)

    def loss(self, model: nn.Module, ids: Tensor) -> Tensor:
        """A sum over samples, so that each has a share of its own."""
        batch, targets = self.of(ids)
        out = model(**batch)
        logits = out.logits if hasattr(out, "logits") else out
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / 16


def problem(name: str, dtype: torch.dtype) -> Problem:
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = architecture.make().to(dtype)
    batch, targets = architecture.data()
    batch = {n: x.to(dtype) if x.is_floating_point() else x for n, x in batch.items()}
    return Problem(name, model, batch, targets)


def optimizer_of(name: str, optimizer: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer == "AdamW":
        return torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY)
    return torch.optim.SGD(trained, lr=ARCHITECTURES[name].lr, momentum=0.9)


def train(
    given: Problem, model: nn.Module, optimizer: str, steps: int = LOOP.steps, path: Any = None
) -> None:
    """Trains with dropout; records it if a path is given."""
    made = optimizer_of(given.name, optimizer, model.train())
    torch.manual_seed(1)
    with recording(model, made, path) as name_samples:
        for number, ids in enumerate(LOOP.batches(SAMPLES)):
            if number == steps:
                break
            name_samples(ids)
            given.loss(model, ids).backward()
            made.step()
            made.zero_grad()


@contextmanager
def recording(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: Any
) -> Iterator[Callable[[Tensor], None]]:
    if path is None:
        yield lambda ids: None
    else:
        with dualform.record(model, optimizer, path) as recorder:
            yield recorder.samples


@dataclass(frozen=True)
class Trained:
    """A model after training, and the run that was recorded."""

    given: Problem
    before: nn.Module
    model: nn.Module
    run: Run

    def queries(self, ids: list[int]) -> Batch:
        return self.given.of(torch.tensor(ids))[0]


@pytest.fixture(scope="module")
def trained() -> Iterator[Callable[..., Trained]]:
    """Trains each architecture once for all tests."""
    with TemporaryDirectory() as folder:

        @cache
        def make(name: str, optimizer: str, dtype: torch.dtype) -> Trained:
            given = problem(name, dtype)
            model = copy.deepcopy(given.model)
            path = Path(folder) / f"{name}, {optimizer}, {dtype}"
            train(given, model, optimizer, path=path)
            return Trained(given, given.model, model, dualform.open(path))

        yield lambda name, optimizer, dtype=torch.float64: make(name, optimizer, dtype)


@dataclass(frozen=True)
class Stepped:
    """One step of plain gradient descent from `problem`, in evaluation mode."""

    given: Problem
    ids: list[int]
    rate: float
    model: nn.Module
    run: Run
    seen: dict[str, tuple[Tensor, Tensor]]
    """What each module got, and the error at what it gave."""


@pytest.fixture(scope="module")
def stepped() -> Iterator[Callable[[str], Stepped]]:
    with TemporaryDirectory() as folder:

        @cache
        def make(name: str) -> Stepped:
            given, ids, rate = problem(name, torch.float64), [9, 2, 7, 4], 0.3
            model = copy.deepcopy(given.model).eval()
            with seeing(model) as seen:
                given.loss(model, torch.tensor(ids)).backward()
            model.zero_grad()
            sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate)
            with recording(model, sgd, Path(folder) / name) as name_samples:
                name_samples(torch.tensor(ids))
                given.loss(model, torch.tensor(ids)).backward()
                sgd.step()
            return Stepped(given, ids, rate, model, dualform.open(Path(folder) / name), seen)

        yield make


@contextmanager
def seeing(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Keeps each module's first input and output; once backward has run, the output's error."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple) else out
            if not args or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
                return
            seen[name] = (args[0].detach(), out.detach().clone())
            if out.requires_grad:
                out.register_hook(lambda error: seen.update({name: (args[0].detach(), error)}))

        return hook

    handles = [m.register_forward_hook(look(n)) for n, m in model.named_modules() if n]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


# The books


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_books_balance(
    trained: Callable[..., Trained], name: str, optimizer: str, dtype: torch.dtype
) -> None:
    """Everything by row, but for the named exceptions; the remainder is rounding."""
    made, architecture = trained(name, optimizer, dtype), ARCHITECTURES[name]
    audit = made.run.audit()
    before = {name: p.detach() for name, p in made.before.named_parameters()}
    after = {name: p.detach() for name, p in made.model.named_parameters()}
    trainable = {name for name, p in made.model.named_parameters() if p.requires_grad}
    noisy = [b for b in audit.books if b.granularity not in ("row", "frozen")]
    count = architecture.noisy_count if optimizer == "AdamW" else 0
    assert [b.reason for b in noisy] == [NOISY] * count, audit
    assert all(re.search(architecture.noisy, book.name) for book in noisy)
    assert (audit.coverage == 1.0) == (count == 0)
    assert {book.name for book in audit.books if book.granularity != "frozen"} == trainable
    if dtype == torch.float64:
        assert audit.remainder <= TOLERANCE[dtype], audit
    moved = 0
    for book in (book for book in audit.books if book.name in trainable):
        change = (after[book.name] - before[book.name]).norm() / after[book.name].norm()
        moved += bool(change >= 0.15)
        # of what hardly moved, the rounding of the weight itself is most of the change
        rounding = 0.0 if change >= 0.15 else LOOP.steps * torch.finfo(dtype).eps / float(change)
        assert book.remainder <= TOLERANCE[dtype] + min(rounding, 1.0), (book, float(change))
    assert moved > len(trainable) / 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_recording_changes_nothing(
    trained: Callable[..., Trained], name: str, optimizer: str
) -> None:
    """Bit for bit, dropout and running statistics included."""
    made = trained(name, optimizer, torch.float32)
    twin = copy.deepcopy(made.before)
    train(made.given, twin, optimizer)
    ours, theirs = made.model.state_dict(), twin.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_step_is_training_stopped_there(
    trained: Callable[..., Trained], name: str, optimizer: str
) -> None:
    made = trained(name, optimizer)
    twin = copy.deepcopy(made.before)
    train(made.given, twin, optimizer, steps=4)
    recorded = made.run.at(4).state_dict()
    for key, value in twin.named_parameters():
        torch.testing.assert_close(recorded[key], value.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_run_has_the_whole_state(trained: Callable[..., Trained], name: str) -> None:
    """Shared weights under all their names, buffers as well: it loads without a word."""
    made = trained(name, "SGD")
    fresh = copy.deepcopy(made.before)
    fresh.load_state_dict(made.run.state_dict())
    for key, value in made.model.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], value), key


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_without_all_samples_the_start_is_left(
    trained: Callable[..., Trained], name: str, optimizer: str
) -> None:
    """Decayed where the optimizer decays; what was kept by step stays."""
    made = trained(name, optimizer)
    left = made.run.forget(made.run.ids)
    assert sorted(made.run.ids) == list(range(SAMPLES))
    decay = (1 - RATE * DECAY) ** LOOP.steps if optimizer == "AdamW" else 1.0
    before, after = dict(made.before.named_parameters()), dict(made.model.named_parameters())
    by_row = {book.name for book in made.run.audit().books if book.granularity == "row"}
    for key in before:
        expected = before[key].detach() * decay if key in by_row else after[key].detach()
        torch.testing.assert_close(left[key], expected, rtol=1e-9, atol=1e-11)


def test_offsets_without_a_gradient_are_found_wherever_they_are(tmp_path: Path) -> None:
    """The keys' third of attention's bias; here it begins at the 129th of 384 numbers."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(128, 2, 8, dropout=0.0, batch_first=True)
    adam, tokens = torch.optim.AdamW(model.parameters(), lr=RATE), torch.randn(4, 5, 128)
    with recording(model, adam, tmp_path / "run") as name_samples:
        for _ in range(3):
            name_samples(torch.arange(4))
            (model(tokens) * torch.randn(4, 5, 128)).sum().backward()
            adam.step()
            adam.zero_grad()
    audit = dualform.open(tmp_path / "run").audit()
    noisy = {book.name: book.reason for book in audit.books if book.granularity != "row"}
    assert noisy == {"self_attn.in_proj_bias": NOISY}, audit


# Rows and samples


@pytest.mark.parametrize("name", NAMES)
def test_a_samples_share_is_its_own_gradient(stepped: Callable[[str], Stepped], name: str) -> None:
    """One step: what forgetting a sample gives back is the step's rate times its gradient."""
    made = stepped(name)
    twin = copy.deepcopy(made.given.model).eval()
    after = dict(made.model.named_parameters())
    for sample in made.ids:
        twin.zero_grad()
        made.given.loss(twin, torch.tensor([sample])).backward()
        left = made.run.forget([sample])
        for key, parameter in twin.named_parameters():
            share = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            expected = after[key].detach() + made.rate * share
            torch.testing.assert_close(left[key], expected, rtol=1e-9, atol=1e-12, msg=key)


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
    if ARCHITECTURES[name].axis == 1:
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
    if ARCHITECTURES[name].axis == 1:
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


# Questions


def assert_output(reading: Any, output: Tensor, tolerance: float) -> None:
    """A reading's totals against a module's own output (samples, positions, width)."""
    units = reading.directions.argmax(1).tolist()
    samples, positions, _ = output.shape
    assert len(reading.queries.names) == samples * positions
    assert len(set(reading.queries.names)) == samples * positions
    places = [name.rstrip("]").partition("[") for name in reading.queries.names]
    actual = [
        output[int(sample), int(at or 0), unit].item()
        for (sample, _, at), unit in zip(places, units, strict=True)
    ]
    evidence = reading.samples().values.sum(0)
    total = reading.initial + evidence + reading.check.steps + reading.remainder
    np.testing.assert_allclose(total, actual, rtol=tolerance, atol=tolerance)
    assert np.abs(reading.remainder).max() <= tolerance


def module_outputs(made: Trained, batch: Batch) -> dict[str, Tensor]:
    """(samples, positions, width): what modules give in evaluation mode, told by hooks."""
    axis = ARCHITECTURES[made.given.name].axis
    model = copy.deepcopy(made.model).eval()
    with seeing(model) as seen:
        model(**batch)
    outputs = {}
    for name, (_, out) in seen.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            out = out.flatten(2).transpose(1, 2)
        elif axis == 1:
            out = out.transpose(0, 1)
        samples = next(iter(batch.values())).shape[axis]
        if len(out) == samples:
            outputs[name] = out.reshape(samples, -1, out.shape[-1])
    return outputs


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_parts_sum_to_what_the_modules_give(
    trained: Callable[..., Trained], name: str, dtype: torch.dtype, optimizer: str
) -> None:
    """Query by query, under the name of its sample and position, and without dropout."""
    made = trained(name, optimizer, dtype)
    batch = made.queries([5, 1, 8])
    made.model.train()
    spotlight = made.run.spotlight(made.model, batch)
    assert made.model.training
    outputs = module_outputs(made, batch)
    outputs |= {
        f"{layer}.out_proj": out for layer, out in outputs.items() if layer.endswith("self_attn")
    }
    checked = [layer for layer in spotlight if layer in outputs]
    assert len(checked) >= 2
    for layer in checked:
        assert_output(spotlight[layer], outputs[layer], {torch.float32: 3e-5}.get(dtype, 1e-10))


def test_a_position_table_is_asked_once(trained: Callable[..., Trained]) -> None:
    """It is read once for all samples; each sample's tokens are the queries."""
    made = trained("GPT-2", "SGD")
    reading = made.run.spotlight(made.model, made.queries([5, 1, 8]))["transformer.wpe"]
    table = made.model.get_submodule("transformer.wpe").weight.detach()
    assert_output(reading, table.expand(3, -1, -1), 1e-10)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["LSTM", "LSTM, time first", "LSTM, packed"])
def test_parts_sum_to_the_gates(trained: Callable[..., Trained], name: str, optimizer: str) -> None:
    """`W x + b` of every time step, with states found by stepping a cell."""
    made, ids = trained(name, optimizer), [5, 1, 8]
    spotlight = made.run.spotlight(made.model, made.queries(ids))
    model: Any = copy.deepcopy(made.model).eval()
    gates: dict[str, list[Tensor]] = {}
    for sample in ids:
        batch, _ = made.given.of(torch.tensor([sample]))
        length = int(batch["lengths"]) if "lengths" in batch else TIME
        x = model.embed(batch["words"].flatten())[:length]
        for number in range(2):
            x = gate_sums(model.lstm, number, x, gates)
    for layer, sums in gates.items():
        assert_output(spotlight[f"lstm.{layer}"], torch.stack(sums), 1e-10)


def gate_sums(lstm: Any, number: int, x: Tensor, gates: dict[str, list[Tensor]]) -> Tensor:
    """Steps one layer over (time, width); adds what its matrices give, and returns its states."""
    given = {
        kind: [getattr(lstm, f"{part}_{kind}_l{number}").detach() for part in ("weight", "bias")]
        for kind in ("ih", "hh")
    }
    cell = nn.LSTMCell(x.shape[1], 5, dtype=x.dtype)
    names = [f"{part}_{kind}" for kind in given for part in ("weight", "bias")]
    cell.load_state_dict(dict(zip(names, [*given["ih"], *given["hh"]], strict=True)))
    h = c = x.new_zeros(5)
    states = []
    for at in range(len(x)):
        states.append(h)
        h, c = cell(x[at], (h, c))
    for kind, keys in (("ih", x), ("hh", torch.stack(states))):
        weight, bias = given[kind]
        padded = F.pad(keys.detach(), (0, 0, 0, TIME - len(x)))
        gates.setdefault(f"{kind}_l{number}", []).append(F.linear(padded, weight, bias))
    return torch.stack([*states[1:], h])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_timelines_add_up(trained: Callable[..., Trained], name: str, optimizer: str) -> None:
    made = trained(name, optimizer)
    batch = made.queries([5, 1])
    layers = list(made.run.spotlight(made.model, batch))
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        timeline = made.run.timeline(made.model, batch, layer=layer)
        assert timeline.at.tolist() == list(range(1, LOOP.steps + 1))
        shares = np.abs(timeline.values).max(1)
        assert shares[1:].all()
        assert shares[0] or "lora_A" in layer, "an adapter's first step moves one side only"
        np.testing.assert_allclose(timeline.cumulative[-1], timeline.check.evidence, atol=1e-12)
        by_epoch = made.run.timeline(made.model, batch, layer=layer, by="epoch")
        np.testing.assert_allclose(by_epoch.values[0], timeline.values[:3].sum(0), atol=1e-12)
        assert len(by_epoch) == 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_forgetting_takes_away_what_the_spotlight_shows(
    trained: Callable[..., Trained], name: str, optimizer: str
) -> None:
    made, gone = trained(name, optimizer), [3, 8, 10]
    reading = made.run.spotlight(made.model, made.queries([5, 1])).last
    left, now = made.run.forget(gone), made.run.state_dict()
    scores = reading.samples()
    shown = scores.values[[scores.ids.index(sample) for sample in gone]].sum(0)
    prefix = f"{reading.layer}."
    weight = now[f"{prefix}weight"] - left[f"{prefix}weight"]
    taken = reading.queries.inputs.double() @ weight.T
    if f"{prefix}bias" in now:
        taken = taken + now[f"{prefix}bias"] - left[f"{prefix}bias"]
    units = reading.directions.argmax(1)
    np.testing.assert_allclose(shown, taken[torch.arange(len(units)), units], atol=1e-12)
    assert np.abs(shown).max() > 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_revisited_as_they_were_seen(
    stepped: Callable[[str], Stepped], name: str
) -> None:
    """After one step: each layer's inputs of that step, through the weights of now."""
    made = stepped(name)
    spotlight = made.run.revisit([4, 9])
    twin = copy.deepcopy(made.given.model).eval()
    batch, _ = made.given.of(torch.tensor([4, 9]))
    with seeing(twin) as seen:
        twin(**batch)
    linear = [n for n in spotlight if n in seen and isinstance(twin.get_submodule(n), nn.Linear)]
    assert linear or name == "GPT-2"
    for layer in linear:
        keys = seen[layer][0]
        keys = keys.transpose(0, 1) if ARCHITECTURES[name].axis == 1 else keys
        reading = spotlight[layer]
        inputs = keys.reshape(-1, keys.shape[-1])
        torch.testing.assert_close(reading.queries.inputs, inputs, rtol=1e-9, atol=1e-12)
        given = made.model.get_submodule(layer)(inputs).detach()
        units = reading.directions.argmax(1)
        np.testing.assert_allclose(reading.total, given[torch.arange(len(units)), units])
        names = [f"{i}[{t}]" for i in (4, 9) for t in range(keys[0].numel() // keys.shape[-1])]
        assert reading.queries.names == (names if len(names) > 2 else ["4", "9"])


# Packed sequences


def test_packed_sequences_are_the_padded_ones(tmp_path: Path) -> None:
    """Packing sorts the samples by length; their rows come back to them."""
    given = problem("LSTM, packed", torch.float64)
    padded, packed = Packed(pack=False).double(), copy.deepcopy(given.model)
    padded.load_state_dict(given.model.state_dict())
    for model, path in ((padded, tmp_path / "padded"), (packed, tmp_path / "packed")):
        train(given, model, "SGD", path=path)
    one, other = (dualform.open(tmp_path / name) for name in ("padded", "packed"))
    for sample in range(SAMPLES):
        for key, weight in one.forget([sample]).items():
            torch.testing.assert_close(other.forget([sample])[key], weight, rtol=1e-9, atol=1e-12)
    batch, _ = given.of(torch.tensor([2, 5, 0]))
    first, second = one.spotlight(padded, batch), other.spotlight(packed, batch)
    assert list(first) == list(second)
    for layer in first:
        asked, answered = first[layer].queries.names, second[layer].queries.names
        inside = [query for query in asked if _inside(query, batch)]
        a, b = first[layer].samples().values, second[layer].samples().values
        a, b = a[:, [*map(asked.index, inside)]], b[:, [*map(answered.index, inside)]]
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12)


def _inside(query: str, batch: Batch) -> bool:
    """Whether a query's time step is before the end of its sequence."""
    sample, _, at = query.rstrip("]").partition("[")
    return int(at) < int(batch["lengths"][int(sample)])


# Where samples are hard to tell


def test_time_first_where_there_are_as_many_steps_as_samples(tmp_path: Path) -> None:
    """The shape does not say which dimension is time; the recurrent layer does."""
    torch.manual_seed(0)
    model = LanguageModel(batch_first=False, dropout=0.0).double()
    twin, drawn = copy.deepcopy(model), torch.randint(0, WORDS, (4, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with recording(model, sgd, tmp_path / "run") as name_samples:
        name_samples(torch.arange(4))
        model(drawn).square().sum().backward()
        sgd.step()
    twin(drawn[:, 1:2]).square().sum().backward()
    run = dualform.open(tmp_path / "run")
    for key, parameter in twin.named_parameters():
        share = run.forget([1])[key] - run.state_dict()[key]
        torch.testing.assert_close(share, parameter.grad, rtol=1e-9, atol=1e-12, msg=key)


class Chosen(nn.Module):
    """A head on the tokens that a mask chooses, as masked language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.head(tokens[mask])


@pytest.mark.parametrize("lengths", [[1, 3], [1, 4], [2, 2]], ids=str)
def test_chosen_tokens_are_not_given_to_another_sample(tmp_path: Path, lengths: list[int]) -> None:
    """Where rows cannot be told apart by sample they are kept by step, never guessed."""
    torch.manual_seed(0)
    model, tokens = Chosen().double(), torch.randn(2, 5, 3, dtype=torch.float64)
    twin = copy.deepcopy(model)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with recording(model, sgd, tmp_path / "run") as name_samples:
        name_samples(torch.tensor([0, 1]))
        model(tokens, mask).square().sum().backward()
        sgd.step()
    run = dualform.open(tmp_path / "run")
    assert run.audit().remainder <= 1e-12
    if run.audit().coverage == 1.0:
        twin(tokens[:1], mask[:1]).square().sum().backward()
        share = run.forget([0])["head.weight"] - run.state_dict()["head.weight"]
        torch.testing.assert_close(share, twin.head.weight.grad)
