"""How a language model is trained and recorded: a sample is a window, as a step visits it."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dualform.ledger.samples import SampleId
from dualform.read.rerun import Loss
from dualform.recording import record
from dualform.recording.keep import Keep
from dualform.studies.language.models import RecurrentLanguageModel
from dualform.studies.language.tasks import LanguageData, LanguageTask

WARMING = 2
"""So many windows before a window are read to find the state that was carried to it."""


def train_language_model(
    data: LanguageData, task: LanguageTask, seed: int, path: Path, keep: Keep, device: str
) -> nn.Module:
    """Trains for the steps of a task, and records them at a path; the samples are windows."""
    torch.manual_seed(seed)
    model = task.make_model(data.words).to(device)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=task.rate, eps=task.eps, weight_decay=task.decay
    )
    state = None
    with record(model, optimizer, path, keep=keep, overwrite=True) as recorder:
        described = range(len(data.windows))
        texts = [data.train.written(window) for window in data.windows.inputs(described)]
        recorder.describe(described, previews=texts)
        steps = itertools.islice(task.batches(data.windows, seed), task.steps)
        for step, (ids, begins) in enumerate(steps, 1):
            x, y = (
                part.to(device) for part in (data.windows.inputs(ids), data.windows.targets(ids))
            )
            recorder.samples(ids)
            if isinstance(model, RecurrentLanguageModel):
                logits, after = model(x, model.rested(len(ids)) if begins else state)
                state = tuple(part.detach() for part in after)
            else:
                logits = model(x)
            torch.autograd.backward(cross_entropy(logits.flatten(0, 1), y.flatten()))
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            optimizer.zero_grad()
            if keep != "rows" and task.checkpoint and not step % task.checkpoint:
                recorder.checkpoint()
    return model.eval()


def window_loss(data: LanguageData, task: LanguageTask, device: str) -> Loss:
    """The loss of one window, as `run.zoom` asks for it.

    The state that was carried to a window is not kept. The model that is given reads the windows
    before it, so that the state is nearly that of training.
    """
    each = len(data.windows) // task.batch

    def loss(model: nn.Module, ids: list[SampleId]) -> Tensor:
        at = int(ids[0])
        x, y = (part.to(device) for part in (data.windows.inputs([at]), data.windows.targets([at])))
        if isinstance(model, RecurrentLanguageModel):
            state = model.rested(1)
            with torch.no_grad():
                for before in range(max(each * (at // each), at - WARMING), at):
                    _, state = model(data.windows.inputs([before]).to(device), state)
            logits, _ = model(x, state)
        else:
            logits = model(x)
        return cross_entropy(logits.flatten(0, 1), y.flatten())

    return loss
