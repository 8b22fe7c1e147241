"""What the models are asked: prompts from the training text and from the test text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dualform.errors import ReadingError
from dualform.studies.language.tasks import LanguageData, LanguageTask
from dualform.studies.texts import UNKNOWN

KINDS = ("test", "training")


@dataclass(frozen=True)
class Prompts:
    """Some prompts of equal length, and the token that the model foretells after each.

    >>> x = torch.tensor([[1, 2], [3, 4]])
    >>> prompts = Prompts(x, torch.tensor([5, 6]), torch.tensor([5, 0]), torch.tensor([9, -1]))
    >>> len(prompts), prompts.some(1).foretold.tolist(), prompts.right.tolist()
    (2, [5, 6], [True, False])
    """

    x: Tensor
    """(prompts, tokens)."""
    foretold: Tensor
    """(prompts,): what the model says comes next."""
    following: Tensor
    """(prompts,): what does."""
    places: Tensor
    """(prompts,): where the last token stands in the training text; -1 in the test text."""

    def __len__(self) -> int:
        return len(self.x)

    def some(self, each: int) -> Prompts:
        """The first so many of each kind."""
        own = self.places >= 0
        first = [torch.nonzero(own == kind).flatten()[:each] for kind in (False, True)]
        chosen = torch.cat(first).sort().values
        parts = (self.x, self.foretold, self.following, self.places)
        return Prompts(*(part[chosen] for part in parts))

    @property
    def right(self) -> Tensor:
        """(prompts,): whether the model foretells what comes next."""
        return self.foretold == self.following

    def of_kind(self, kind: str) -> list[int]:
        """The numbers of the test prompts, or of the training prompts."""
        return torch.nonzero((self.places >= 0) == (kind == "training")).flatten().tolist()


def draw_prompts(
    model: nn.Module,
    data: LanguageData,
    task: LanguageTask,
    each: int,
    context: int,
    seed: int,
    device: str,
) -> Prompts:
    """So many test prompts, then as many training prompts, from places drawn at random.

    A training prompt ends where the model was trained. What is foretold is a word that has a name:
    the unknown ones are many, and say nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    trained = task.batch * (len(data.windows) // task.batch) * task.unroll
    unnamed = [at for at, word in enumerate(data.train.vocabulary) if word == UNKNOWN]
    found: list[Prompts] = []
    for corpus, stop in ((data.test, len(data.test) - 1), (data.train, trained)):
        last = torch.randperm(stop - context + 1, generator=generator)[:each] + context - 1
        if len(last) < each:
            raise ReadingError(
                f"the text '{task.text}' has {len(last)} places for prompts of {context} tokens, "
                f"and {each} are asked for; is --data right?"
            )
        x = torch.stack([corpus.tokens[at - context + 1 : at + 1] for at in last.tolist()])
        with torch.no_grad():
            logits = model(x.to(device))[:, -1].cpu()
        logits[:, unnamed] = -torch.inf
        places = last if corpus is data.train else torch.full_like(last, -1)
        found.append(Prompts(x, logits.argmax(1), corpus.tokens[last + 1], places))
    names = ("x", "foretold", "following", "places")
    return Prompts(*(torch.cat([getattr(part, name) for part in found]) for name in names))
