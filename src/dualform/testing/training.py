"""A small training loop with everything people do to gradients, for the contracts to share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.read import Run, open_run
from dualform.recording import Recorder, record


@dataclass(frozen=True)
class Loop:
    """How to train.

    >>> Loop(steps=2, accumulate=2).micro_batches(torch.arange(4))
    [tensor([0, 1]), tensor([2, 3])]
    """

    steps: int = 6
    batch: int = 4
    accumulate: int = 1
    clip: float | None = None
    schedule: bool = False
    seed: int = 0

    def micro_batches(self, ids: Tensor) -> list[Tensor]:
        """A batch's ids, split for gradient accumulation."""
        return list(ids.chunk(self.accumulate))

    def batches(self, samples: int) -> Iterator[Tensor]:
        """The ids of each step: epochs in a shuffled order."""
        generator = torch.Generator().manual_seed(self.seed)
        order: list[int] = []
        for _ in range(self.steps):
            while len(order) < self.batch:
                order += torch.randperm(samples, generator=generator).tolist()
            yield torch.tensor(order[: self.batch])
            order = order[self.batch :]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """A sum over everything, so that the split into micro-batches cannot matter."""
    return (output - target).square().sum() / 8


def train(
    model: nn.Module,
    optimizer: Optimizer,
    inputs: Tensor,
    targets: Tensor,
    loop: Loop,
    path: Path | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = squared_error,
) -> None:
    """Trains the model; records it if a path is given. Both ways do exactly the same.

    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> train(model, optimizer, torch.randn(8, 3), torch.randn(8, 2), Loop(steps=2))
    """
    recording = nullcontext() if path is None else record(model, optimizer, path, strict=True)
    rate = [group["lr"] for group in optimizer.param_groups]
    with recording as recorder:
        for number, ids in enumerate(loop.batches(len(inputs))):
            for part in loop.micro_batches(ids):
                if isinstance(recorder, Recorder):
                    recorder.samples(part)
                loss(model(inputs[part]), targets[part]).backward()  # type: ignore[no-untyped-call]
            if loop.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
            if loop.schedule:
                for group, lr in zip(optimizer.param_groups, rate, strict=True):
                    group["lr"] = lr * (1 + 0.5 * (number % 3))
            optimizer.step()
            optimizer.zero_grad()


def tiny_run(
    make: Callable[..., Optimizer] = torch.optim.SGD,
) -> tuple[Run, nn.Module, Tensor]:
    """A small run in a temporary folder, its model and its inputs, for examples to ask about.

    >>> run, model, x = tiny_run()
    >>> run.steps, run.layers, tuple(x.shape)
    (6, ['0', '2'], (8, 4))
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = make(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    path = Path(tempfile.mkdtemp()) / "run"
    train(model, optimizer, x, y, Loop(), path)
    return open_run(path), model, x


def tiny_attention_run() -> tuple[Run, nn.Module, Tensor]:
    """The same for a transformer: two blocks of two heads that learn to copy their first token.

    >>> run, model, x = tiny_attention_run()
    >>> run.steps, tuple(x.shape)
    (6, (8, 5, 8))
    """
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = torch.randn(8, 5, 8)
    path = Path(tempfile.mkdtemp()) / "run"
    train(model, optimizer, x, x[:, :1].expand_as(x), Loop(), path)
    return open_run(path), model, x
