"""The front door of recording."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dualform.record.recorder import Recorder


def record(
    model: nn.Module,
    optimizer: Optimizer,
    path: str | os.PathLike[str],
    *,
    dataset: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    buffer_bytes: int = 128 << 20,
    strict: bool = False,
) -> Recorder:
    """Records the training loop inside the `with` statement as a ledger at `path`.

    >>> import tempfile, torch, dualform
    >>> path = tempfile.mkdtemp() + "/run"
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> with dualform.record(model, optimizer, path) as recorder:
    ...     for ids in ([0, 1], [2, 3]):
    ...         recorder.samples(ids)
    ...         loss = model(torch.randn(2, 3)).square().mean()
    ...         loss.backward(); optimizer.step(); optimizer.zero_grad()
    >>> dualform.open(path).steps
    2

    Args:
        dataset: a map-style dataset whose item `i` is sample id `i`; its labels and small previews
            of its inputs are kept with the run.
        resume: go on with the run at `path`, from the marked step whose weights the model has.
        overwrite: replace the run at `path`.
        buffer_bytes: how much is held in memory before it is written as one file; when the disk
            is slower than training, training waits rather than memory filling up.
        strict: raise where recording fails (a full disk, a gradient that is not finite, a defect of
            ours). Otherwise such a failure ends the recording with one warning: what is committed
            stays readable, and the training goes on as if nothing had happened.
    """
    return Recorder(
        model,
        optimizer,
        Path(path),
        dataset=dataset,
        resume=resume,
        overwrite=overwrite,
        buffer_bytes=buffer_bytes,
        strict=strict,
    )
