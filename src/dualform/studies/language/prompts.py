"""What the models are asked: prompts from the training text and from the test text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dualform.errors import ReadingError
from dualform.studies.language.tasks import LanguageData, LanguageTask
from dualform.studies.texts import UNKNOWN

KINDS = ("test", "training")
TRIED = 8
"""How many prompts are drawn for each that is wanted: some foretell what has no name."""


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

    A training prompt ends where the model was trained. Where the model foretells an unknown word,
    there is nothing to ask about.
    """
    generator = torch.Generator().manual_seed(seed)
    trained = task.batch * (len(data.windows) // task.batch) * task.unroll
    found: list[Prompts] = []
    for corpus, stop in ((data.test, len(data.test) - 1), (data.train, trained)):
        last = torch.randperm(stop - context + 1, generator=generator)[: TRIED * each] + context - 1
        x = torch.stack([corpus.tokens[at - context + 1 : at + 1] for at in last.tolist()])
        with torch.no_grad():
            foretold = model(x.to(device))[:, -1].argmax(1).cpu()
        places = last if corpus is data.train else torch.full_like(last, -1)
        named = [data.train.vocabulary[token] != UNKNOWN for token in foretold.tolist()]
        kept = torch.nonzero(torch.tensor(named)).flatten()[:each]
        if len(kept) < each:
            raise ReadingError(
                f"of {len(x)} prompts from '{task.text}', the model foretells a known word after "
                f"{len(kept)}, and {each} are asked for; train longer, or ask for fewer prompts."
            )
        parts = (x, foretold, corpus.tokens[last + 1], places)
        found.append(Prompts(*(part[kept] for part in parts)))
    names = ("x", "foretold", "following", "places")
    return Prompts(*(torch.cat([getattr(part, name) for part in found]) for name in names))
