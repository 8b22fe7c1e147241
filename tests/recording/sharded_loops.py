"""Loops over models of which each process has a part of every parameter."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.recording.distributed_loops import whole_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import dualform

STEPS, SAMPLES = 6, 24
After = Callable[[int, nn.Module, Optimizer, int], None]
"""What a loop does after a step, given the step, the model, the optimizer and the rank."""


class Attending(nn.Module):
    """A transformer's layer between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(self.first(x[..., None])).mean(1))
        return found


class Again(nn.Module):
    """Its middle is computed again in the backward pass; of its gate, process 1 has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.gate, self.head = nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.layer, self.norm(self.first(x)), use_reentrant=False)
        found: Tensor = self.head(inner * torch.sigmoid(self.gate(inner)))
        return found


def net() -> nn.Module:
    inner = nn.Sequential(nn.Linear(12, 12), nn.GELU())
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), inner, nn.Linear(12, 3))


def with_norm() -> nn.Module:
    model = net()
    weight_norm(model[3][0])  # type: ignore[index]
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    model[4].bias.requires_grad_(False)
    return model


def by_columns(parameter: nn.Parameter) -> Shard:
    """Matrices are cut along their width, where four processes can."""
    return Shard(int(parameter.ndim == 2 and parameter.shape[1] % 4 == 0))


def hybrid() -> DeviceMesh:
    """Two copies of the model; of four processes, each copy is in two parts."""
    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))


def one_element(step: int, model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    """Changes one element in the part of process 1."""
    if step == 2 and rank == 1:
        with torch.no_grad():
            model[0].weight.to_local()[-1, 2] += 1.0  # type: ignore[index]


def whole_parameter(step: int, model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    """Shrinks a parameter after every step."""
    with torch.no_grad():
        model[4].weight.mul_(0.9)  # type: ignore[index]


def memory(step: int, model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    """Clears what the optimizer remembers of a parameter."""
    if step == 2:
        optimizer.state[model[0].weight]["exp_avg"].zero_()  # type: ignore[index]


def nothing(step: int, model: nn.Module, optimizer: Optimizer, rank: int) -> None:
    """Leaves all as it is."""


@dataclass(frozen=True)
class Sharded:
    """A model, how it is sharded and trained, and which books are not kept by row to the end."""

    make: Callable[[], nn.Module] = net
    inner: str = "3"
    """A block that is sharded by itself."""
    options: Callable[[], dict[str, Any]] = dict
    after: After = nothing
    dtype: torch.dtype = torch.float64
    by_step: tuple[str, ...] = ()
    tolerance: float = 1e-12
    evaluated: bool = False
    """Whether a forward pass before the recording has left whole parameters in the model."""


LOOPS = {
    "attention": Sharded(Attending, "layer", by_step=("layer.self_attn.in_proj_bias",)),
    "computed again": Sharded(Again, "layer", by_step=("first.bias",)),
    "weight norm": Sharded(with_norm),
    "tied": Sharded(tied, "3"),
    "by columns": Sharded(options=lambda: {"shard_placement_fn": by_columns}),
    "copies of parts": Sharded(options=lambda: {"mesh": hybrid()}),
    "evaluated before": Sharded(evaluated=True),
    "bfloat16": Sharded(
        options=lambda: {
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "reshard_after_forward": False,
        },
        dtype=torch.float32,
        tolerance=1e-2,
    ),
    "one element": Sharded(after=one_element, by_step=("0.weight", "0.bias")),
    "a whole parameter": Sharded(after=whole_parameter, by_step=("4.weight", "4.bias")),
    "memory": Sharded(after=memory, by_step=("0.weight",)),
}


def train(name: str, rank: int, of: int, path: Path | None) -> dict[str, Tensor]:
    """The weights of a trained model; recorded where a path is given."""
    loop = LOOPS[name]
    torch.manual_seed(0)
    model = loop.make().to(loop.dtype)
    fully_shard(model.get_submodule(loop.inner), **loop.options())
    fully_shard(model, **loop.options())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)).to(loop.dtype)
    if loop.evaluated:
        with torch.no_grad():
            model(data)
    recording: Any = nullcontext()
    if path is not None:
        recording = dualform.record(model, optimizer, path, strict=True, keep="rows")
    with recording as recorder:
        for step in range(STEPS):
            own = [(8 * step + at) % SAMPLES for at in range(8)][rank::of]
            if recorder is not None:
                recorder.samples(own)
            logits = model(data[own]).to(loop.dtype)
            nn.functional.cross_entropy(logits, torch.tensor(own) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.after(step, model, optimizer, rank)
    return whole_state(model)


FOUR = ("attention", "by columns", "copies of parts", "one element", "a whole parameter")
"""What four processes do."""


def train_all(rank: int, of: int, folder: Path) -> None:
    """Every loop, recorded and not; their weights are held against each other."""
    warnings.simplefilter("ignore")
    for name in LOOPS if of == 2 else FOUR:
        recorded, plain = train(name, rank, of, folder / name), train(name, rank, of, None)
        for part, weight in plain.items():
            assert torch.equal(recorded[part], weight), f"{name}: {part}"
        if rank == 0:
            torch.save(plain, folder / f"{name}.pt")
