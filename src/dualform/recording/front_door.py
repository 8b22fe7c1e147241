"""The functions that users call: `record` and `describe`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import SampleIdsError
from dualform.ledger import run_path
from dualform.ledger.format import read_info
from dualform.ledger.samples import Columns, Label, Previews, SampleId, describe_samples
from dualform.recording.dataset import Decode, describe_dataset
from dualform.recording.guard import writing
from dualform.recording.keep import AUTO, Keep
from dualform.recording.recorder import Recorder


def record(
    model: nn.Module,
    optimizer: Optimizer,
    path: str | os.PathLike[str],
    *,
    dataset: Any = None,
    decode: Decode | None = None,
    resume: bool = False,
    overwrite: bool = False,
    buffer_bytes: int = 128 << 20,
    strict: bool = False,
    keep: Keep = AUTO,
    layers: str | Sequence[str] | None = None,
    processes: int | None = None,
) -> Recorder:
    """Records the training loop inside the `with` statement as a ledger at `path`.

    Where torch.distributed trains with several processes, each of them calls this, with the same
    path: together they record one run.

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
        dataset: a map-style dataset whose item `i` is sample id `i`; its labels, class names and
            small previews of its inputs are kept with the run (see `dualform.describe`).
        decode: makes texts of the dataset's `input_ids`, as `tokenizer.decode` does.
        resume: go on with the run at `path`, from the marked step whose weights the model has.
        overwrite: replace the run at `path`.
        buffer_bytes: how much is held in memory before it is written as one file; when the disk
            is slower than training, training waits rather than memory filling up.
        strict: raise where recording fails (a full disk, a gradient that is not finite, a defect of
            ours). Otherwise such a failure ends the recording with one warning: what is committed
            stays readable, and the training goes on as if nothing had happened.
        keep: how much of each row is stored: "auto" ("rows" while those of a forward pass take at
            most 64 MB, else "summaries"), "rows" (all of it), "half" (numbers of 16 bits),
            "int8" (numbers of 8 bits, with a scale a row), "summaries" (one small matrix a sample
            and layer, see `dualform.summaries`) or "steps" (no rows: the change that each step
            made). A dict gives policies by the names of parameters or modules, the first that
            matches: `keep={"head": "steps", "*.bias": "rows", "*": "int8"}`. The books stay exact:
            what entries miss of a parameter is measured, as its residual. `dualform.plan` tells
            what each policy takes.
        layers: the layers that are recorded, by the same patterns: `layers=["head", "*.mlp"]`. All
            other parameters are kept as with keep="steps", which takes their size a step.
        processes: how many processes record together; all of torch.distributed, if left out. To go
            on with a run that another number has recorded, it must be given. 1 records this
            process by itself, for models that share no gradients.
    """
    return Recorder(
        model,
        optimizer,
        run_path(path),
        describe=None
        if dataset is None
        else partial(describe_dataset, dataset=dataset, decode=decode),
        resume=resume,
        overwrite=overwrite,
        buffer_bytes=buffer_bytes,
        strict=strict,
        keep=keep,
        layers=layers,
        processes=processes,
    )


def describe(
    path: str | os.PathLike[str],
    dataset: Any = None,
    *,
    ids: Sequence[SampleId] | None = None,
    labels: Sequence[Label] | Tensor | None = None,
    previews: Previews | None = None,
    columns: Columns | None = None,
    decode: Decode | None = None,
) -> None:
    """Adds labels, class names and small previews to the samples of a run, at any time.

    A dataset describes sample `i` by its item `i`: a pair of input and label, or a dict with a
    column such as `label`, `labels`, `text`, `image` or `input_ids`. Names of classes, which
    torchvision keeps as `classes` and datasets as `features`, become the column "class". What is
    given by hand comes on top of it.

    >>> from dualform.testing import tiny_run
    >>> run, _, _ = tiny_run()
    >>> describe(run.path, [{"text": f"text {i}", "label": i % 2} for i in range(8)])
    >>> describe(run.path, ids=[3], labels=["odd one"], columns={"source": ["web"]})
    >>> import dualform; samples = dualform.open(run.path).samples
    >>> samples.labels[2], samples.labels[3], samples.preview(3).data
    (0, 'odd one', 'text 3')

    Args:
        ids: the samples that are described; with a dataset, the id of each of its items.
        columns: what else is known of each sample, such as `{"source": ["web", "book"]}`.
        decode: makes texts of the dataset's `input_ids`, as `tokenizer.decode` does.
    """
    path = run_path(path)
    read_info(path)
    with writing(path):
        if dataset is not None:
            describe_dataset(path, dataset, ids, decode)
        if any(given is not None for given in (labels, previews, columns)):
            if ids is None:
                raise SampleIdsError("describe got no ids; say whose labels or previews they are.")
            describe_samples(path, ids, labels, previews, columns)
