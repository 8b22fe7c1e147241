"""The three models of the study: which text each reads, how it is trained and what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dualform.errors import ReadingError
from dualform.recording.keep import Keep
from dualform.studies.language.models import RecurrentLanguageModel, TransformerLanguageModel
from dualform.studies.texts import LOADERS, Corpus, Windows


@dataclass(frozen=True)
class LanguageTask:
    """One text, the model that learns it, and its training."""

    text: str
    """A name in `LOADERS`."""
    units: int
    embedding: int | None = None
    """How wide tokens are; by default as wide as the model."""
    blocks: int = 0
    """How many a transformer has; an LSTM has none."""
    heads: int = 4
    dropout: float = 0.0
    unroll: int = 100
    """How many tokens a window has."""
    batch: int = 64
    steps: int = 5000
    rate: float = 1e-3
    decay: float = 0.0
    """Coupled L2."""
    eps: float = 1e-8
    """What Adam adds to the size of gradients; small ones are magnified, and so is rounding."""
    clip: float = 1.0
    words: int | None = None
    """How many words the vocabulary has at most; by default all. Characters are never left out."""
    tokens: int | None = None
    """How many tokens of the training part are read; by default all."""
    keep: Keep = "rows"
    checkpoint: int = 0
    """With summaries weights are kept every so many steps, to zoom; 0: only at the end."""

    def make_model(self, words: int) -> nn.Module:
        """The model, with weights drawn at random."""
        if self.blocks:
            return TransformerLanguageModel(words, self.unroll, self.units, self.heads, self.blocks)
        return RecurrentLanguageModel(words, self.embedding, self.units, self.dropout)

    @property
    def carries(self) -> bool:
        """Whether the state of one window is carried to the next."""
        return not self.blocks

    def batches(self, windows: Windows, seed: int) -> Iterator[tuple[Tensor, bool]]:
        """The windows of each step, and whether the texts begin anew with them; without end.

        With a state to carry, each line of the batch reads its own part of the text in order.
        Else whole batches of the same windows, in a new order each epoch.

        >>> task = LanguageTask("fables", units=4, batch=2)
        >>> steps = task.batches(Windows(torch.arange(13), 3), seed=0)
        >>> [(ids.tolist(), begins) for ids, begins in itertools.islice(steps, 3)]
        [([0, 2], True), ([1, 3], False), ([0, 2], True)]
        """
        each = len(windows) // self.batch
        if self.carries:
            first = each * torch.arange(self.batch)
            yield from ((first + at, at == 0) for at in itertools.cycle(range(each)))
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(each * self.batch, generator=generator)
            yield from ((ids, True) for ids in torch.split(order, self.batch))


@dataclass(frozen=True)
class LanguageSetting:
    """How large the study is."""

    tasks: dict[str, LanguageTask]
    prompts: int
    """How many test prompts there are, and as many training prompts."""
    explained: int
    """How many of each kind the whole network is asked about."""
    context: int
    """How many tokens a prompt has."""
    again: tuple[str, ...]
    """The models that are also recorded as summaries, to compare."""
    zoomed: int
    """How many visits are run again for each prompt, where summaries are kept."""
    seeds: int
    only: tuple[str, ...] = ()
    """Which of the models are trained; by default all."""

    @property
    def trained(self) -> dict[str, LanguageTask]:
        """The models that are trained, by name."""
        return {name: self.tasks[name] for name in self.only or self.tasks}


SETTINGS = {
    "small": LanguageSetting(
        {
            "fables": LanguageTask(
                "fables",
                96,
                32,
                unroll=50,
                batch=8,
                steps=300,
                rate=3e-3,
                tokens=40_000,
                checkpoint=10,
            ),
            "wikitext": LanguageTask(
                "wikitext",
                64,
                dropout=0.2,
                unroll=25,
                batch=8,
                steps=400,
                rate=3e-3,
                decay=1e-7,
                clip=0.3,
                words=2000,
                tokens=25_000,
            ),
            "shakespeare": LanguageTask(
                "shakespeare",
                48,
                blocks=2,
                unroll=50,
                batch=8,
                steps=300,
                rate=3e-3,
                eps=1e-6,
                tokens=40_000,
            ),
        },
        prompts=10,
        explained=3,
        context=25,
        again=("fables",),
        zoomed=10,
        seeds=3,
    ),
    "paper": LanguageSetting(
        {
            "fables": LanguageTask("fables", 1024, 64, keep="summaries", checkpoint=100),
            "wikitext": LanguageTask(
                "wikitext",
                200,
                dropout=0.5,
                batch=128,
                steps=10_000,
                rate=3e-3,
                decay=1e-7,
                clip=0.3,
                keep="summaries",
                checkpoint=200,
            ),
            "shakespeare": LanguageTask(
                "shakespeare", 128, blocks=4, eps=1e-6, keep="summaries", checkpoint=100
            ),
        },
        prompts=20,
        explained=8,
        context=100,
        again=(),
        zoomed=10,
        seeds=5,
    ),
}


@dataclass(frozen=True)
class LanguageData:
    """The text that a model learns, in windows, and the text that it has not seen."""

    train: Corpus
    test: Corpus
    windows: Windows

    @property
    def words(self) -> int:
        """How many tokens the vocabulary has."""
        return len(self.train.vocabulary)


def load_task(data: Path, task: LanguageTask, context: int) -> LanguageData:
    """The text of a task; refused where it has not a window for each line of a batch.

    Args:
        context: how many tokens a prompt has.
    """
    train, test = LOADERS[task.text](data, task.words)
    train = train.part(0, task.tokens or len(train))
    windows = Windows(train.tokens, task.unroll)
    if len(windows) < task.batch:
        raise ReadingError(
            f"the text '{task.text}' has {len(train):,} tokens to train on, which are "
            f"{len(windows)} windows of {task.unroll} and fewer than the {task.batch} of a batch; "
            "is --data right?"
        )
    if len(test) <= 2 * context:
        raise ReadingError(
            f"the test part of '{task.text}' has {len(test)} tokens, and prompts have {context}; "
            "is --data right?"
        )
    return LanguageData(train, test, windows)
