"""Every case, trained by several processes that average their gradients."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.cases import CASES
from tests.cases.optimizers import OPTIMIZERS, trained
from tests.laws.training import PARTS, STEPS, new_model
from torch import nn

import dualform

DTYPE = torch.float64


def optimizer_of(name: str) -> str:
    """The optimizer of a case: all of them in turn."""
    usual = [each for each in OPTIMIZERS if each != "Muon"]
    return usual[list(CASES).index(name) % len(usual)]


def fit(name: str, rank: int, of: int, path: Path | None) -> nn.Module:
    """Trains a case on batches of this process; recorded, if a path is given."""
    case = CASES[name]
    model = new_model(case, DTYPE)
    optimizer = OPTIMIZERS[optimizer_of(name)](trained(model))
    torch.manual_seed(1)
    recorder: Any = None
    if path is not None:
        recorder = dualform.record(model, optimizer, path, strict=True).__enter__()
    try:
        for step in range(STEPS):
            for part in range(PARTS):
                number = (PARTS * step + part) * of + rank
                inputs = case.batch(number, DTYPE)
                if recorder is not None:
                    recorder.samples([f"{number}: {n}" for n in case.names(number, inputs)])
                case.losses(model, inputs).mean().backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    whole = parameter.grad.to_dense()
                    dist.all_reduce(whole)
                    parameter.grad = whole / of
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if recorder is not None:
            recorder.__exit__(None, None, None)
    return model


def fit_all(rank: int, of: int, folder: Path) -> None:
    """Every case, recorded and not; what does not go as it must is written down."""
    warnings.simplefilter("ignore")
    problems = {}
    for at, name in enumerate(CASES):
        recorded, plain = (fit(name, rank, of, path) for path in (folder / str(at), None))
        pairs = zip(recorded.parameters(), plain.parameters(), strict=True)
        if not all(torch.equal(a.detach(), b.detach()) for a, b in pairs):
            problems[name] = "training is not the same"
    (folder / f"problems-{rank}.json").write_text(json.dumps(problems))
