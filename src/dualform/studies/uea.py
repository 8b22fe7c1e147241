"""Time series classification with each attention layer, as the primal-dual paper does it.

A transformer of two layers on sets of the UEA archive. Epochs are chosen by a fifth of TRAIN that
is kept out of training; TEST is read once, with those weights. Published figures choose by TEST,
and stand in the table for comparison only.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from dualform.attention import Inspection, MultiheadAttention, kind
from dualform.errors import ReadingError
from dualform.evaluate.workers import Ids, Job, train_all
from dualform.read.scores import Array
from dualform.studies.estimate import estimate
from dualform.studies.series import Series, load

DATASETS = ("JapaneseVowels", "Handwriting", "UWaveGestureLibrary", "BasicMotions")
PUBLISHED = {"JapaneseVowels": 98.7, "Handwriting": 32.0, "UWaveGestureLibrary": 85.6}
"""Softmax attention, 2 layers, d_model 512; chosen by test accuracy."""
KINDS = ("softmax", "linear", "batch_norm", "scaled_heads", "batch_norm_scaled_heads")


@dataclass(frozen=True)
class Setting:
    """The model and its training."""

    width: int
    heads: int
    hidden: int
    epochs: int
    rate: float
    layers: int = 2
    batch: int = 16
    dropout: float = 0.1


SETTINGS = {
    "small": Setting(width=64, heads=8, hidden=128, epochs=20, rate=1e-3),
    "paper": Setting(width=512, heads=8, hidden=2048, epochs=100, rate=1e-4),
}


@dataclass(frozen=True)
class Result:
    """One training."""

    dataset: str
    kind: str
    seed: int
    accuracy: float
    validation: float
    epoch: int
    distance: float
    """Relative distance of heads' outputs, mean over layers; small where heads repeat."""
    flops: int
    """Multiplications and additions of attention and projections, one sample, forward."""
    kept_bytes: int
    """What the forward pass of a batch keeps for the backward pass."""
    seconds: float

    @property
    def numbers(self) -> list[float]:
        """All that was found, without what was given."""
        return [float(number) for number in astuple(self)[3:]]

    @classmethod
    def from_numbers(cls, dataset: str, kind: str, seed: int, numbers: list[float]) -> Result:
        """What was given, and the numbers."""
        accuracy, validation, epoch, distance, flops, kept_bytes, seconds = numbers
        whole = (int(epoch), distance, int(flops), int(kept_bytes), seconds)
        return cls(dataset, kind, seed, accuracy, validation, *whole)


class Classifier(nn.Module):
    """Projection, positions, encoder layers of a kind of attention, a linear map of all steps."""

    def __init__(self, data: Series, kind: str, setting: Setting) -> None:
        super().__init__()
        length, channels = data.x.shape[1:]
        self.project = nn.Linear(channels, setting.width)
        self.positions = nn.Parameter(torch.randn(length, setting.width) * 0.02)
        self.layers = nn.ModuleList(_layer(kind, setting) for _ in range(setting.layers))
        self.dropout = nn.Dropout(setting.dropout)
        self.classify = nn.Linear(length * setting.width, len(data.classes))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Logits (samples, classes)."""
        h = self.dropout(self.project(x) + self.positions)
        padding = None if bool(real.all()) else ~real
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=padding)
        logits: Tensor = self.classify(self.dropout(h * real[..., None]).flatten(1))
        return logits


def _layer(kind: str, setting: Setting) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        setting.width,
        setting.heads,
        setting.hidden,
        setting.dropout,
        activation="gelu",
        batch_first=True,
    )
    layer.self_attn = MultiheadAttention(setting.width, setting.heads, batch_first=True, kind=kind)
    return layer


def study(
    data: Path,
    setting: str = "small",
    datasets: Sequence[str] = (),
    kinds: Sequence[str] = (),
    seeds: int = 5,
    epochs: int | None = None,
    device: str = "cpu",
    workers: int = 0,
    console: Console | None = None,
) -> list[Result]:
    """Every training of all sets and kinds, unless some are named; `workers` of them at a time."""
    chosen = SETTINGS[setting] if epochs is None else replace(SETTINGS[setting], epochs=epochs)
    for unknown in (name for name in kinds if name not in KINDS):
        raise ReadingError(f"kind '{unknown}' is not in this study; it has {', '.join(KINDS)}.")
    console, results = console or Console(quiet=True), {}
    sets = {name: load(data, name) for name in datasets or DATASETS}
    plan = [(name, seed, kind) for name in sets for seed in range(seeds) for kind in kinds or KINDS]
    jobs = [
        Job(f"{name}, {kind}, seed {seed}", np.array([at]), seed)
        for at, (name, seed, kind) in enumerate(plan)
    ]

    def done(job: Job, numbers: Array) -> None:
        name, seed, kind = plan[int(job.ids[0])]
        results[job.name] = Result.from_numbers(name, kind, seed, numbers.tolist())
        console.print(f"{job.name}: {results[job.name].accuracy:.1%}")

    train_all(partial(_numbers, sets, plan, chosen, device), jobs, done, workers)
    return [results[job.name] for job in jobs]


def _numbers(
    sets: dict[str, tuple[Series, Series]],
    plan: list[tuple[str, int, str]],
    setting: Setting,
    device: str,
    ids: Ids,
    seed: int,
) -> list[float]:
    """What the training at this place of the plan found, as numbers, which a worker sends."""
    name, _, kind = plan[int(ids[0])]
    data, test = (part.to(device) for part in sets[name])
    return train(name, data, test, kind, seed, setting).numbers


def train(
    name: str, train_part: Series, test: Series, kind: str, seed: int, setting: Setting
) -> Result:
    """Trains, keeps the weights of the best validation epoch, and reads TEST once with them."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    chosen, held = split(train_part.y, seed)
    data, validation = train_part[chosen], train_part[held]
    model = Classifier(data, kind, setting).to(data.x.device)
    best = _fit(model, data, validation, setting)
    return Result(
        dataset=name,
        kind=kind,
        seed=seed,
        accuracy=evaluate(model, test, setting)[0],
        validation=best.accuracy,
        epoch=best.epoch,
        distance=head_distance(model, test[torch.arange(min(64, len(test)))]),
        flops=count_flops(model, data),
        kept_bytes=kept_bytes(model, data[torch.arange(min(setting.batch, len(data)))]),
        seconds=time.perf_counter() - began,
    )


class _Best(NamedTuple):
    """An epoch by its accuracy on what was held out, and by its loss where that is equal."""

    accuracy: float
    gain: float
    epoch: int


def _fit(model: nn.Module, data: Series, validation: Series, setting: Setting) -> _Best:
    """Trains, and leaves the model with the weights of its best epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.rate)
    best, weights = _Best(-1.0, -math.inf, 0), model.state_dict()
    for epoch in range(1, setting.epochs + 1):
        _epoch(model, optimizer, data, setting)
        accuracy, loss = evaluate(model, validation, setting)
        if (accuracy, -loss) > best[:2]:
            best = _Best(accuracy, -loss, epoch)
            weights = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(weights)
    return best


def split(y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to choose by: a fifth of each class, one at least.

    >>> train, held = split(torch.tensor([0, 0, 0, 1, 1, 1]), seed=0)
    >>> len(train), len(held), sorted([*train.tolist(), *held.tolist()])
    (4, 2, [0, 1, 2, 3, 4, 5])
    """
    generator = torch.Generator().manual_seed(seed)
    train, held = [], []
    for label in range(int(y.max()) + 1):
        rows = (y == label).nonzero().flatten().cpu()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        count = max(1, len(rows) // 5)
        held.append(rows[:count])
        train.append(rows[count:])
    return torch.cat(train), torch.cat(held)


def _epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Series, setting: Setting
) -> None:
    model.train()
    for rows in torch.split(torch.randperm(len(data)), setting.batch):
        batch = data[rows]
        loss = cross_entropy(model(batch.x, batch.real), batch.y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 4.0)
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, data: Series, setting: Setting) -> tuple[float, float]:
    """Accuracy and mean loss."""
    model.eval()
    parts = [data[rows] for rows in torch.split(torch.arange(len(data)), 8 * setting.batch)]
    logits = torch.cat([model(part.x, part.real) for part in parts])
    right = (logits.argmax(-1) == data.y).float().mean()
    return float(right), float(cross_entropy(logits, data.y))


@torch.no_grad()
def head_distance(model: Classifier, data: Series) -> float:
    """The relative distance of heads' outputs at real steps, mean over layers."""
    model.eval()
    h, found = model.project(data.x) + model.positions, []
    for layer in model.layers:
        module = layer.self_attn
        assert isinstance(module, MultiheadAttention)
        seen = data.real[:, None, None]
        outputs = kind(module.kind, **module.options)(*module.heads(h, h, h), seen)
        at_steps = outputs.transpose(1, 2)[data.real].unsqueeze(2)
        found.append(Inspection((), at_steps).distance(relative=True))
        h = layer(h, src_key_padding_mask=~data.real)
    return statistics.mean(found)


def count_flops(model: nn.Module, data: Series) -> int:
    """Floating point operations of one sample's forward pass, by torch's counter."""
    one = data[torch.tensor([0])]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(one.x, one.real)
    return int(counter.get_total_flops())


def kept_bytes(model: nn.Module, batch: Series) -> int:
    """Bytes that a forward pass keeps for the backward pass, each tensor's storage once."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model.train()(batch.x, batch.real).sum()
    del loss
    return sum(size for place, size in kept.items() if place not in own)


def summary(results: list[Result]) -> list[dict[str, Any]]:
    """Means with 95 % intervals over seeds, for each set and kind."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.dataset, result.kind), []).append(result)
    rows = []
    for (dataset, kind_name), runs in groups.items():
        first = runs[0]
        rows.append(
            {
                "dataset": dataset,
                "kind": kind_name,
                "seeds": len(runs),
                "accuracy": 100 * statistics.mean(r.accuracy for r in runs),
                "interval": estimate([r.accuracy for r in runs], scale=100).interval,
                "distance": statistics.mean(r.distance for r in runs),
                "mflops": first.flops / 1e6,
                "kept_mb": first.kept_bytes / 1e6,
                "seconds": statistics.mean(r.seconds for r in runs),
            }
        )
    return rows


def table(results: list[Result]) -> Table:
    """The summary as a table, next to published figures."""
    shown = Table(title="UEA, test accuracy of weights chosen on a fifth of TRAIN")
    for column in ("set", "attention", "seeds", "accuracy %", "published %", "head distance"):
        shown.add_column(column, justify="left" if column in ("set", "attention") else "right")
    for column in ("MFLOP", "kept MB", "s"):
        shown.add_column(column, justify="right")
    for row in summary(results):
        published = PUBLISHED.get(row["dataset"]) if row["kind"] == "softmax" else None
        shown.add_row(
            row["dataset"],
            row["kind"],
            str(row["seeds"]),
            f"{row['accuracy']:.1f}" + (f" ± {row['interval']:.1f}" if row["seeds"] > 1 else ""),
            "" if published is None else f"{published:.1f}*",
            f"{row['distance']:.3f}",
            f"{row['mflops']:.1f}",
            f"{row['kept_mb']:.1f}",
            f"{row['seconds']:.0f}",
        )
    shown.caption = "* d_model 512, chosen by test accuracy"
    return shown


def save(results: list[Result], path: Path) -> None:
    """Every training as JSON."""
    path.write_text(json.dumps([asdict(r) for r in results], indent=1), encoding="utf-8")
