"""Makes tests/ledger/format-4, a run that later versions must go on reading.

To be run once for each format, by the version that writes it: python -m tests.ledger.make_format_4
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from torch import nn

from dualform.recording.recorder import Recorder

FORMAT_4 = Path(__file__).parent / "format-4"


def make(path: Path) -> nn.Module:
    """Two sessions, the second with lossy entries: rows, residuals, kept weights and ids."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for keep in ("rows", "half"):
        with Recorder(model, optimizer, path, keep=keep, resume=path.exists()) as recorder:
            for _ in range(2):
                recorder.samples(["ant", "bee"])
                model(torch.randint(4, (2, 3))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    (path / "writer-0.lock").unlink(missing_ok=True)
    return model


if __name__ == "__main__":
    sys.argv = ["make_format_4"]  # it is part of the run
    shutil.rmtree(FORMAT_4, ignore_errors=True)
    make(FORMAT_4)
