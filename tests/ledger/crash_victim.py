"""Trains and records until it is killed; run by test_crash in a process of its own.

Prints the step after every `checkpoint`, when the step is promised to be durable.
"""

from pathlib import Path

import torch
from torch import nn

import dualform
from dualform.ledger import writer


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def main(path: Path, resume: bool, side_by_side: int) -> None:
    writer.SIDE_BY_SIDE = side_by_side
    state_file = path.parent / "state.pt"
    model, optimizer = fresh()
    if resume:
        saved = torch.load(state_file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    settings = {"resume": resume, "overwrite": not resume, "buffer_bytes": 1 << 14}
    with dualform.record(model, optimizer, path, **settings) as recorder:
        print("started", recorder.step, flush=True)
        while True:
            for _ in range(9):
                recorder.samples(range(8))
                model(torch.randn(8, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            recorder.checkpoint()
            draft = state_file.with_suffix(".draft")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, draft)
            draft.replace(state_file)
            print("step", recorder.step, flush=True)
