"""What processes may do that cannot be recorded as one run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dualform


def net(seed: int = 0, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def recorded(model: nn.Module, path: Path, steps: int = 1, **options: Any) -> None:
    """Records some steps."""
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, strict=True, **options):
        for _ in range(steps):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def another_shape(rank: int, path: Path) -> None:
    recorded(net(width=4 + rank), path)


def other_weights(rank: int, path: Path) -> None:
    recorded(net(seed=rank), path)


def other_paths(rank: int, path: Path) -> None:
    recorded(net(), path.with_name(f"mine-{rank}"))


def a_path_that_is_not_shared(rank: int, path: Path) -> None:
    """It is called the same, and is each process's own."""
    (path / str(rank)).mkdir(parents=True)
    before = Path.cwd()
    os.chdir(path / str(rank))
    try:
        recorded(net(), Path("/proc/self/cwd/run"))
    finally:
        os.chdir(before)


def a_run_that_exists(rank: int, path: Path) -> None:
    recorded(net(), path)
    recorded(net(), path)


def another_count(rank: int, path: Path) -> None:
    """What one process has begun, two go on with."""
    if rank == 0:
        recorded(net(), path, processes=1)
    dist.barrier()
    model = net()
    model.load_state_dict(dualform.open(path).state_dict())
    recorded(model, path, resume=True)


def too_many(rank: int, path: Path) -> None:
    recorded(net(), path, processes=3)


def a_smaller_group(rank: int, path: Path) -> None:
    group = dist.new_group([rank], use_local_synchronization=True)
    recorded(DistributedDataParallel(net(), process_group=group), path)


def other_options(rank: int, path: Path) -> None:
    recorded(net(), path, keep=("rows", "half")[rank])


def mixed_norms(rank: int, path: Path) -> None:
    recorded(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3))), path)


def ids_in_one(rank: int, path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        if rank == 0:
            recorder.samples([0, 1])
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def replicas(rank: int, path: Path) -> None:
    recorded(nn.DataParallel(net()), path)


def sharded_by_itself(rank: int, path: Path) -> None:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    recorded(model, path, processes=1)


def sharded_twice(rank: int, path: Path) -> None:
    model, mesh = net(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("parts", "calls"))
    parallelize_module(model, mesh["calls"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["parts"])
    recorded(model, path)


def flat_parameters(rank: int, path: Path) -> None:
    recorded(FullyShardedDataParallel(net(), device_id=torch.device("cpu")), path)


def tensor_parallel(rank: int, path: Path) -> None:
    model = net()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    recorded(model, path)


def joined(rank: int, path: Path) -> None:
    model = DistributedDataParallel(net())
    with dualform.record(model, sgd(model), path), model.join():
        pass


def recorded_while_joined(rank: int, path: Path) -> None:
    model = DistributedDataParallel(net())
    with model.join():
        recorded(model, path)


REFUSED: dict[Callable[[int, Path], None], tuple[str, str]] = {
    another_shape: ("ModelMismatchError", "has '0.weight' of shape (4, 3) and float32"),
    other_weights: ("ModelMismatchError", "'0.weight' are not the same in process 0 and in proc"),
    other_paths: ("RecordingError", "processes=1"),
    a_path_that_is_not_shared: ("LedgerError", "choose a path on a disk that all processes share"),
    a_run_that_exists: ("RunExistsError", "already holds a run of 1 steps"),
    another_count: ("RecordingError", "was recorded by 1 process, and 2 would go on with it"),
    too_many: ("RecordingError", "processes=3, and torch.distributed has 2"),
    a_smaller_group: ("RecordingError", "over 1 processes, and 2 are to record"),
    other_options: ("RecordingError", "give dualform.record the same in every process"),
    mixed_norms: ("RecordingError", "is a SyncBatchNorm, which mixes samples of all processes"),
    ids_in_one: ("SampleIdsError", "process 0 names its samples, and process 1 does not"),
    replicas: ("RecordingError", "DataParallel: its gradients come from several replicas"),
    sharded_by_itself: ("RecordingError", "is sharded over 2 processes, and 1 are to record"),
    sharded_twice: ("RecordingError", "tensor parallelism divides calls as well as parameters"),
    flat_parameters: ("RecordingError", "Use torch.distributed.fsdp.fully_shard, which keeps"),
    joined: ("RecordingError", "have a process without a batch call the model with an empty one"),
    recorded_while_joined: ("RecordingError", "model.join() lets processes make steps without"),
    tensor_parallel: ("RecordingError", "What is recorded is fully_shard over one mesh of all"),
}
"""Each with its error, and what that says."""


def refuse_all(rank: int, of: int, folder: Path) -> None:
    """Each of them must raise in both processes, and leave them able to go on."""
    for act, expected in REFUSED.items():
        try:
            act(rank, folder / act.__name__)
        except Exception as error:
            given = (type(error).__name__, str(error))
            assert given[0] == expected[0], (act.__name__, given)
            assert expected[1] in given[1], (act.__name__, given)
        else:
            raise AssertionError(f"{act.__name__} was recorded")
    recorded(net(), folder / "at last")
