"""What is inside the wrappers that training libraries put around models and optimizers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from dualform.errors import RecordingError


def unwrap(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Optimizer]:
    """The module and the torch optimizer that `dualform.record` can watch, out of prepared ones.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> unwrap(model, optimizer) == (model, optimizer)
    True

    With accelerate, or with any optimizer that keeps torch's own as `.optimizer`:

    ```python
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with dualform.record(*unwrap(model, optimizer), "runs/mine") as recorder:
        for batch in with_ids(loader, recorder):
            ...
    ```
    """
    check_model(model)
    inner = optimizer
    while isinstance(deeper := getattr(inner, "optimizer", None), Optimizer):
        inner = deeper
    if not isinstance(inner, Optimizer):
        raise RecordingError(
            f"the optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, or a "
            "wrapper that keeps one as its `.optimizer`."
        )
    return model, inner


def check_model(model: nn.Module) -> None:
    """Refuses models whose layers are not those that see the batch.

    >>> import torch
    >>> check_model(torch.nn.Linear(3, 2))
    """
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise RecordingError(
            f"the model is wrapped in {type(model).__name__}: its gradients come from several "
            "replicas. Record on one device and in one process (CUDA_VISIBLE_DEVICES=0, without "
            "torchrun or with `accelerate launch --num_processes 1`)."
        )
    if hasattr(model, "_orig_mod"):
        raise RecordingError(
            "the model is compiled, and its layers' hooks may be compiled away; record the model "
            "that was given to torch.compile, without compiling it."
        )
