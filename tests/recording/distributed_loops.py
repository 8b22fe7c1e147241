"""Training loops that run in one process or in several, on the same global batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dualform

STEPS, BATCH, SAMPLES = 5, 8, 24


def evenly(samples: Sequence[int], rank: int, of: int, step: int) -> Sequence[int]:
    """One after the other."""
    return samples[rank::of]


def unevenly(samples: Sequence[int], rank: int, of: int, step: int) -> Sequence[int]:
    """Fewer for each process than for the one before, none for some; in turns."""
    sizes = {1: [8], 2: [8, 0] if step % 2 else [5, 3], 4: [4, 3, 1, 0]}[of]
    turn = (rank + step) % of
    first = sum(sizes[:turn])
    return samples[first : first + sizes[turn]]


@dataclass(frozen=True)
class Loop:
    """A model, what it is trained with, and how it is recorded."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    lr: float = 0.1
    dtype: torch.dtype = torch.float64
    keep: Any = "rows"
    ids: Callable[[int], Any] | None = int
    """What a sample is called; None where samples are numbered."""
    by_hand: bool = False
    """Whether gradients are added up over the processes without a wrapper."""
    clip: bool = False
    passes: int = 1
    """How many passes make a step."""
    apart: bool = False
    """Whether even and odd samples are passes of their own: in two processes, one each."""
    thrown_away: bool = False
    """Whether each step begins with a pass whose gradients are thrown away."""
    mean: bool = True
    """Whether each process takes the mean of its own losses; else its part of the mean of all."""
    deal: Callable[[Sequence[int], int, int, int], Sequence[int]] = evenly
    """A process's part of a batch, given its rank, how many there are, and the step."""
    given: dict[str, Any] = field(default_factory=dict)
    """What else the wrapper is given."""
    compiled: str = ""
    """What torch compiles: the model "inside" of its wrapper, or all from "outside"."""
    sharded: tuple[str, ...] | None = None
    """Modules that are sharded each by itself, before the rest is; None for whole parameters."""


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 3)
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class Experts(nn.Module):
    """Batches that begin with an even number go through one layer, others through the other."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SAMPLES, 5)
        self.even, self.odd = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, samples: Tensor) -> Tensor:
        expert = self.odd if int(samples[0]) % 2 else self.even
        found: Tensor = expert(torch.tanh(self.table(samples)))
        return found


class Words(nn.Module):
    """A table, a normalization, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.twice, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.norm(self.table(tokens))
        x = self.twice(torch.tanh(self.twice(x)))
        found: Tensor = self.head(x.mean(1))
        return found


def numbers() -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))


def places() -> Tensor:
    return torch.arange(SAMPLES)


def pictures() -> Tensor:
    return torch.randn(SAMPLES, 1, 4, 4, generator=torch.Generator().manual_seed(2))


def texts() -> Tensor:
    return torch.randint(11, (SAMPLES, 4), generator=torch.Generator().manual_seed(3))


LOOPS = {
    "momentum": Loop(
        perceptron, numbers, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), clip=True
    ),
    "AdamW": Loop(perceptron, numbers, torch.optim.AdamW, 0.01),
    "words": Loop(Words, texts, torch.optim.AdamW, 0.01, ids=lambda at: f"text {at}"),
    "float32": Loop(images, pictures, dtype=torch.float32),
    "8 bits": Loop(images, pictures, keep="int8"),
    "by step": Loop(perceptron, numbers, torch.optim.AdamW, 0.01, keep={"0": "steps", "2": "rows"}),
    "added up by hand": Loop(perceptron, numbers, by_hand=True, mean=False),
    "several passes": Loop(perceptron, numbers, passes=2),
    "one thrown away": Loop(perceptron, numbers, thrown_away=True),
    "uneven": Loop(perceptron, numbers, torch.optim.AdamW, 0.01, mean=False, deal=unevenly),
    "experts": Loop(Experts, places, apart=True, given={"find_unused_parameters": True}),
    "numbered": Loop(perceptron, numbers, ids=None),
    "sharded": Loop(
        perceptron,
        numbers,
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
        clip=True,
        sharded=("0",),
    ),
    "sharded words": Loop(
        Words,
        texts,
        torch.optim.AdamW,
        0.01,
        ids=lambda at: f"text {at}",
        sharded=("twice",),
    ),
    "sharded float32": Loop(images, pictures, dtype=torch.float32, sharded=(), clip=True),
    "sharded passes": Loop(
        perceptron,
        numbers,
        torch.optim.AdamW,
        0.01,
        passes=2,
        sharded=("0", "2"),
        given={"reshard_after_forward": False},
    ),
    "sharded by step": Loop(
        perceptron,
        numbers,
        torch.optim.AdamW,
        0.01,
        keep={"0": "steps", "2": "half"},
        sharded=(),
    ),
    "summaries": Loop(
        Words,
        texts,
        torch.optim.AdamW,
        0.01,
        keep=dualform.summaries(2, 2, numbers="rows"),
        mean=False,
        deal=unevenly,
    ),
    "compiled": Loop(
        Words,
        texts,
        torch.optim.AdamW,
        0.01,
        keep=dualform.summaries(2, 2, numbers="rows"),
        compiled="inside",
    ),
    "sharded summaries": Loop(
        Words,
        texts,
        torch.optim.AdamW,
        0.01,
        keep=dualform.summaries(2, 2, numbers="rows"),
        sharded=("twice",),
    ),
}


FOUR = (
    *("momentum", "words", "several passes", "uneven", "numbered"),
    *("sharded", "sharded words", "sharded float32", "sharded passes"),
    *("summaries", "sharded summaries"),
)
"""What four processes do."""


def start(loop: Loop) -> nn.Module:
    """The model as training begins."""
    torch.manual_seed(0)
    return loop.make().to(loop.dtype)


def train(
    name: str, rank: int, of: int, path: Path | None, steps: int = STEPS, **options: Any
) -> nn.Module:
    """The trained model; recorded where a path is given."""
    loop, data = LOOPS[name], LOOPS[name].inputs()
    data = data.to(loop.dtype) if data.is_floating_point() else data
    model = start(loop)
    is_sharded = of > 1 and loop.sharded is not None
    if is_sharded:
        shard(loop, model)
    optimizer = loop.optimizer(model.parameters(), lr=loop.lr)
    wrapped = of > 1 and not loop.by_hand and loop.sharded is None
    called = compiled(model) if loop.compiled == "inside" else model
    called = DistributedDataParallel(called, **loop.given) if wrapped else called
    called = compiled(called) if loop.compiled == "outside" else called
    recording: Any = nullcontext()
    if path is not None:
        given = {"strict": True, "keep": loop.keep, **options}
        recording = dualform.record(called, optimizer, path, **given)
    with recording as recorder:
        for step in range(steps):
            if loop.thrown_away:
                run_pass(loop, called, recorder, data, range(rank, rank + 3), 1.0)
                optimizer.zero_grad()
            passes = own_passes(loop, rank, of, step)
            for number, own in enumerate(passes):
                last = number == len(passes) - 1
                if is_sharded:
                    model.set_requires_gradient_sync(last)  # type: ignore[operator]
                with called.no_sync() if wrapped and not last else nullcontext():  # type: ignore[operator]
                    averaged = 1 if loop.by_hand else of
                    weight = 1 / len(own) if loop.mean else averaged / BATCH
                    weight /= len(passes) if loop.apart else 1
                    run_pass(loop, called, recorder, data, own, weight)
            if of > 1 and loop.by_hand:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            if loop.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model


def compiled(model: nn.Module) -> nn.Module:
    """The model, to be compiled without changes in what it computes."""
    torch._dynamo.reset()
    return cast(nn.Module, torch.compile(model, backend="aot_eager"))


def shard(loop: Loop, model: nn.Module) -> None:
    """Has each process keep a part of each parameter."""
    for name in loop.sharded or ():
        fully_shard(model.get_submodule(name), **loop.given)
    fully_shard(model, **loop.given)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights, whole."""
    return {
        name: kept.full_tensor() if isinstance(kept, DTensor) else kept
        for name, kept in model.state_dict().items()
    }


def own_passes(loop: Loop, rank: int, of: int, step: int) -> list[Sequence[int]]:
    """The samples of each pass that a process makes in a step."""
    first = step * loop.passes * BATCH
    whole = [at % SAMPLES for at in range(first, first + loop.passes * BATCH)]
    if loop.apart:
        return [whole[0::2], whole[1::2]][rank::of]
    batches = [whole[at : at + BATCH] for at in range(0, len(whole), BATCH)]
    return [loop.deal(batch, rank, of, step) for batch in batches]


def run_pass(
    loop: Loop, called: nn.Module, recorder: Any, data: Tensor, own: Sequence[int], weight: float
) -> None:
    """A forward and a backward pass of these samples, whose losses have this weight."""
    if recorder is not None and loop.ids is not None:
        ids = [loop.ids(at) for at in own]
        recorder.samples(ids)
        if own and isinstance(ids[0], str):
            recorder.describe(ids, labels=[at % 3 for at in own])
    logits = called(data[list(own)])
    wanted = torch.tensor(own, dtype=torch.int64) % 3
    (weight * nn.functional.cross_entropy(logits, wanted, reduction="sum")).backward()


def train_all(rank: int, of: int, folder: Path) -> None:
    """Every loop, recorded and not; their weights are held against each other."""
    for name in LOOPS if of == 2 else FOUR:
        recorded = whole_state(train(name, rank, of, folder / name))
        for part, plain in whole_state(train(name, rank, of, None)).items():
            assert torch.equal(recorded[part], plain), f"{name}: {part}"
