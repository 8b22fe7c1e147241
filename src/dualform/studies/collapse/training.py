"""A network that tells hidden characters of a text, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dualform.studies.collapse.networks import Reader
from dualform.studies.collapse.setting import Architecture, CollapseSetting

HELD_OUT = 0.1
"""The share of the text, at its end, that is not trained on."""
CHECKED = 128
"""On so many windows of it a network is tested."""


@dataclass(frozen=True)
class HiddenCharacters:
    """Windows of a text in which some characters are hidden.

    >>> task = HiddenCharacters("abcabcabc" * 50, CollapseSetting(tokens=6))
    >>> asked, hidden, told = task.test
    >>> asked.shape, bool((asked[hidden] == 3).all()), bool((asked == told)[~hidden].all())
    (torch.Size([128, 6]), True, True)
    """

    text: str
    setting: CollapseSetting

    @cached_property
    def alphabet(self) -> list[str]:
        """The characters of the text, in the order of their numbers."""
        return sorted(set(self.text))

    @cached_property
    def _ids(self) -> Tensor:
        numbers = {letter: at for at, letter in enumerate(self.alphabet)}
        return torch.tensor([numbers[letter] for letter in self.text])

    def windows(
        self, count: int, generator: torch.Generator, held_out: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Windows (count, tokens) as they are asked, which places are hidden, and the windows."""
        split, tokens = int(len(self._ids) * (1 - HELD_OUT)), self.setting.tokens
        own = self._ids[split:] if held_out else self._ids[:split]
        starts = torch.randint(len(own) - tokens, (count, 1), generator=generator)
        told = own[starts + torch.arange(tokens)]
        hidden = torch.rand(told.shape, generator=generator) < self.setting.hidden
        return told.masked_fill(hidden, len(self.alphabet)), hidden, told

    @cached_property
    def test(self) -> tuple[Tensor, Tensor, Tensor]:
        """The windows that every network is tested on."""
        return self.windows(CHECKED, torch.Generator().manual_seed(0), held_out=True)

    @cached_property
    def loss_of_frequencies(self) -> float:
        """The loss of who tells each hidden character by how often characters are, and no more."""
        own = self._ids[: int(len(self._ids) * (1 - HELD_OUT))]
        shares = torch.bincount(own, minlength=len(self.alphabet)).clamp_min(1).double()
        _, hidden, told = self.test
        return float(-(shares / shares.sum()).log()[told[hidden]].mean())

    def make(self, architecture: Architecture, seed: int) -> Reader:
        """A network that is not trained yet."""
        torch.manual_seed(seed)
        return Reader(self.setting, architecture, len(self.alphabet))

    def train(self, model: Reader, seed: int) -> None:
        """Trains a network in place, by Adam with a rate that rises, and falls."""
        setting = self.setting
        device = model.places.device
        optimizer = torch.optim.Adam(model.parameters(), lr=setting.rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, setting.rate, total_steps=setting.steps, pct_start=0.1
        )
        generator = torch.Generator().manual_seed(seed)
        for _ in range(setting.steps):
            asked, hidden, told = (x.to(device) for x in self.windows(setting.batch, generator))
            loss = cross_entropy(model(asked)[hidden], told[hidden])
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    @torch.no_grad()
    def loss(self, model: Reader) -> float:
        """In nats for a hidden character of the held-out text."""
        asked, hidden, told = (x.to(model.places.device) for x in self.test)
        return float(cross_entropy(model(asked)[hidden], told[hidden]))
