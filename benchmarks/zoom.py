"""How near must kept weights be for a zoom? Agreement by the steps between, on a small GPT-2.

`python -m benchmarks.zoom --data DIR` trains on windows of Tiny Shakespeare
(DIR/text/tinyshakespeare.txt), keeps summaries, and weights after every so many steps. It then runs
the visits of some windows again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tests.cases.architectures import gpt2
from torch import Tensor, nn

import dualform
from benchmarks.language import windows

LENGTH, WINDOWS, BATCH, STEPS, SAMPLES = 64, 256, 16, 240, 6
BINS = ((0, 0), (1, 5), (6, 20), (21, 40), (41, 80), (81, STEPS))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """As in training; the model has no dropout."""
    loss: Tensor = model(x, labels=x, use_cache=False).loss
    return loss


def train(path: Path, text: Tensor, every: int) -> tuple[dualform.Run, nn.Module]:
    """A small GPT-2, recorded as summaries; the weights are kept after every so many steps."""
    torch.manual_seed(0)
    model = gpt2(256, LENGTH, 128, 2, 2, 0.02)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    with dualform.record(model, optimizer, path, keep="summaries") as recorder:
        for step in range(1, STEPS + 1):
            ids = torch.randperm(WINDOWS, generator=order)[:BATCH]
            recorder.samples(ids)
            loss_of(model, text[ids]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if every and step % every == 0:
                recorder.checkpoint()
    return dualform.open(path), model.eval()


def main() -> None:
    """Prints a table for each number of steps between kept weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    text = windows(parser.parse_args().data, LENGTH)[:WINDOWS]
    for every in (0, 80, 20):
        with tempfile.TemporaryDirectory() as folder:
            run, model = train(Path(folder) / "run", text, every)
            began = time.perf_counter()
            zoom = run.zoom(range(SAMPLES), model, lambda net, ids: loss_of(net, text[ids]))
            seconds = time.perf_counter() - began
            print(f"weights kept after {run.kept_steps}; attributed {run.audit().attributed:.2f}")
            print(f"{len(zoom.visits)} visits in {seconds:.1f} s")
            for first, last in BINS:
                found = [v for v in zoom.visits if first <= v.distance <= last]
                if found:
                    cosines = np.array([v.agreement.cosine for v in found])
                    ratios = np.array([v.scale for v in found]) * BATCH
                    print(
                        f"  {first}-{last} steps between: {len(found)} visits, agreement median "
                        f"{np.median(cosines):.3f}, least {cosines.min():.3f}; factor × batch "
                        f"{ratios.min():.2f} to {ratios.max():.2f}"
                    )


if __name__ == "__main__":
    main()
