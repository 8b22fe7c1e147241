"""What the architectures are trained on, how, and what is kept of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from tests.architectures.models import (
    CLASSES,
    TIME,
    WORDS,
    LanguageModel,
    Packed,
    ResNet,
    ViT,
    gpt2,
    lora_gpt2,
    lora_linear,
)
from tests.told import told
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.read import Run
from dualform.testing.training import Loop

os.environ["HF_HUB_OFFLINE"] = "1"

Batch: TypeAlias = dict[str, Tensor]
"""What a model is called with, by name."""

SAMPLES = 12
LOOP = Loop(steps=6, batch=4)
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
IGNORED = -100
"""The target where a sequence has ended."""


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
        with told(path), dualform.record(model, optimizer, path) as recorder:
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
