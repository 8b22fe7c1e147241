"""A real size: GPT-2-small on one GPU, a few steps with recording against steps without.

`python -m benchmarks.large --device cuda --keep rows` prints seconds of the first step, of later
ones and of the end, bytes a step, and memory of the device. `--profile` shows where the first step
spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import torch
from tests.cases.architectures import gpt2
from torch import nn

import dualform

WORDS = 50257


class Training:
    """GPT-2 with AdamW and clipping under autocast, on random tokens."""

    def __init__(self, layers: int, width: int, batch: int, length: int, device: str) -> None:
        torch.manual_seed(0)
        heads = max(1, width // 64)
        self.model = gpt2(WORDS, length, width, layers, heads, spread=0.02).to(device).train()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.tokens = torch.randint(0, WORDS, (batch, length), device=device)
        self.device = device

    def step(self) -> float:
        """One step; its seconds, with all that it left to the device."""
        began = time.perf_counter()
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def peak(device: str) -> float:
    """GB of the device at most, since the last call."""
    if device != "cuda":
        return float("nan")
    found = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return found


def measure(given: argparse.Namespace, keep: str, folder: str | None) -> None:
    """Prints one line for a policy."""
    training = Training(given.layers, given.width, given.batch, given.length, given.device)
    plain = [training.step() for _ in range(6)][-1]
    memory = peak(given.device)
    path = Path(tempfile.mkdtemp(dir=folder)) / "run"
    profile = cProfile.Profile()
    recorder = dualform.record(training.model, training.optimizer, path, keep=keep)
    began = time.perf_counter()
    with recorder:
        starting = time.perf_counter() - began
        if given.profile:
            profile.enable()
        first = training.step()
        profile.disable()
        later = [training.step() for _ in range(given.steps - 1)]
        ending = time.perf_counter()
    ending = time.perf_counter() - ending
    stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    weights = sum(p.nbytes for p in training.model.parameters())
    shown = " ".join(f"{s:.2f}" for s in later)
    print(
        f"{keep}: plain {plain * 1e3:.0f} ms, start {starting:.1f} s, first {first:.2f} s, later "
        f"{shown} s, end {ending:.1f} s, {(stored - 4 * weights) / given.steps / 1e9:.2f} GB a "
        f"step (+ 4 × weights), device {memory:.1f} → {peak(given.device):.1f} GB, "
        f"failure: {recorder.failure}",
        flush=True,
    )
    if given.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
    shutil.rmtree(path.parent)


def main() -> None:
    """Measures each policy that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--keep", nargs="+", default=["rows"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--folder", default=None, help="where runs are written for the while")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("always")
    for keep in given.keep:
        measure(given, keep, given.folder)


if __name__ == "__main__":
    main()
