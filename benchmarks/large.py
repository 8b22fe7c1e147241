"""Real sizes: a training step with recording against one without, sustained, on one GPU.

`python -m benchmarks.large --model gpt2 --keep summaries` prints the median of blocks of steps with
and without recording (in turns, before and after), the first step, the end, all of it together,
bytes a step, memory of the device, and what share of each layer's change the run attributes to
samples. `--compiled` compiles the model, `--profile` shows where the training thread spends time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from tests.cases.architectures import LanguageModel, gpt2
from torch import Tensor, nn

import dualform

WORDS, BLOCK = 50257, 10


class Gpt2:
    """GPT-2 with AdamW and clipping under autocast, on random tokens."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = gpt2(WORDS, given.length, given.width, given.layers, given.width // 64, 0.02)
        self.model.loss_type = "ForCausalLM"  # or transformers warns, which breaks the graph
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.model = self.model.to(given.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        shape = (given.batch or 16, given.length)
        self.x = torch.randint(0, WORDS, shape, device=given.device)
        self.device = given.device
        self.call: Callable[..., Tensor] = self.model

    def loss(self) -> Tensor:
        """Of the one batch."""
        with torch.autocast(self.device, torch.bfloat16):
            found: Tensor = self.call(self.x, labels=self.x, use_cache=False).loss
        return found

    def step(self) -> None:
        """One step of training."""
        self.loss().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut, as in ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.body = nn.Sequential(*(part for size in sizes for part in _conv(*size)))
        del self.body[-1]
        same = stride == 1 and inputs == 4 * width
        self.short = nn.Sequential(*([] if same else _conv(inputs, 4 * width, 1, stride)[:2]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


def resnet50() -> nn.Module:
    """ResNet-50: 16 blocks, 25.6 million parameters."""
    parts, inputs = [*_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for at in range(depth):
            parts.append(Bottleneck(inputs, width, stride if at == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class ResNet(Gpt2):
    """ResNet-50 at 224², SGD with momentum, under autocast."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = resnet50().to(given.device).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.x = torch.randn(given.batch or 64, 3, 224, 224, device=given.device)
        self.y = torch.randint(0, 1000, (len(self.x),), device=given.device)
        self.device, self.call = given.device, self.model

    def loss(self) -> Tensor:
        """Of the one batch."""
        with torch.autocast(self.device, torch.bfloat16):
            return nn.functional.cross_entropy(self.call(self.x), self.y)


class Lstm(Gpt2):
    """A language model of two LSTM layers, 650 units, unrolled over 35 words; Adam, clipping."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = (
            LanguageModel(dropout=0.0, words=10_000, sizes=(650, 650), layers=2)
            .to(given.device)
            .train()
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.x = torch.randint(0, 10_000, (given.batch or 64, 36), device=given.device)
        self.device, self.call = given.device, self.model

    def loss(self) -> Tensor:
        """Of the one batch."""
        out = self.call(self.x[:, :-1])
        return nn.functional.cross_entropy(out.flatten(0, 1), self.x[:, 1:].flatten())


POLICIES = {"lean": dualform.summaries(offsets="steps")}
"""Policies that have no name of their own."""
MODELS = {"gpt2": Gpt2, "resnet": ResNet, "lstm": Lstm}


def timed(training: Gpt2, blocks: int) -> list[float]:
    """Seconds a step of some blocks of steps, with all that they left to the device."""
    found = []
    for _ in range(blocks):
        began = time.perf_counter()
        for _ in range(BLOCK):
            training.step()
        _sync(training)
        found.append((time.perf_counter() - began) / BLOCK)
    return found


def once(training: Gpt2) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    training.step()
    _sync(training)
    return time.perf_counter() - began


def _sync(training: Gpt2) -> None:
    if training.device == "cuda":
        torch.cuda.synchronize()


def peak(device: str) -> float:
    """GB of the device at most, since the last call."""
    if device != "cuda":
        return float("nan")
    found = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return found


def measure(given: argparse.Namespace, keep: str) -> None:
    """Prints the lines of a policy."""
    training = MODELS[given.model](given)
    if given.compiled:
        training.model = training.call = torch.compile(training.model)  # type: ignore[assignment]
    timed(training, 2)
    peak(given.device)
    before, memory = timed(training, 5), peak(given.device)
    path = Path(tempfile.mkdtemp(dir=given.folder)) / "run"
    profile = cProfile.Profile()
    began = time.perf_counter()
    chosen = {} if keep == "default" else {"keep": POLICIES.get(keep, keep)}
    with dualform.record(training.model, training.optimizer, path, **chosen) as recorder:
        first, second = once(training), once(training)
        at_first = peak(given.device)
        if given.profile:
            profile.enable()
        steps = timed(training, given.steps // BLOCK)
        profile.disable()
        ended = time.perf_counter()
    ending, total = time.perf_counter() - ended, time.perf_counter() - began
    plain, step = statistics.median([*before, *timed(training, 5)]), statistics.median(steps)
    count, late = 2 + BLOCK * len(steps), statistics.median(steps[len(steps) // 2 :])
    thousand = total - BLOCK * sum(steps) + 998 * step
    stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(
        f"{given.model} {keep}{' compiled' * given.compiled}: plain {plain * 1e3:.1f} ms, recorded "
        f"{step * 1e3:.1f} ms, × {step / plain:.3f} (last half × {late / plain:.3f}); first "
        f"{first:.2f} s, second {second:.2f} s, end {ending:.1f} s; all {count} steps × "
        f"{total / count / plain:.3f}, of 1,000 steps × {thousand / 1000 / plain:.3f}; device "
        f"{memory:.1f} → {at_first:.1f} GB at first, {peak(given.device):.1f} later; "
        f"{stored / 1e6:,.0f} MB, {stored / count / 1e6:.1f} a step; failure: {recorder.failure}",
        flush=True,
    )
    if given.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    if given.audit:
        audit = dualform.open(path, device=given.device).audit()
        shown = [f"{b.name} {b.attributed:.2f}" for b in audit.books if b.attributed < 1]
        print(f"coverage {audit.coverage:.4f}, remainder {audit.remainder:.1e}; {', '.join(shown)}")
        by_step = [(b.name, b.reason) for b in audit.books if "step" in b.granularity]
        print("by step:", by_step, flush=True)
    shutil.rmtree(path.parent)


def main() -> None:
    """Measures each policy that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--keep", nargs="+", default=["default"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--folder", default=None, help="where runs are written for the while")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--audit", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("always")
    for keep in given.keep:
        measure(given, keep)


if __name__ == "__main__":
    main()
