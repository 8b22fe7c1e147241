"""How large the study is, and which networks it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NEAR = 2
"""How far a token of a local mask sees."""
NORMS = ("none", "pre", "post")


def complete(count: int) -> Tensor:
    """Every token sees all.

    >>> complete(2)
    tensor([[True, True],
            [True, True]])
    """
    return torch.ones(count, count, dtype=torch.bool)


def _distance(count: int) -> Tensor:
    return torch.arange(count)[:, None] - torch.arange(count)


def _with_global_token(count: int) -> Tensor:
    mask = _distance(count).abs() <= NEAR
    mask[0, :] = mask[:, 0] = True
    return mask


MASKS: dict[str, Callable[[int], Tensor]] = {
    "complete": complete,
    "causal": lambda count: _distance(count) >= 0,
    "local": lambda count: _distance(count).abs() <= NEAR,
    "sliding": lambda count: (_distance(count) >= 0) & (_distance(count) <= NEAR),
    "global token": _with_global_token,
}
"""Who sees whom among so many tokens: row i says what token i sees."""


def kind_name(norm: str, residual: bool) -> str:
    """A norm and a residual in words.

    >>> kind_name("none", False), kind_name("pre", True)
    ('no norm', 'pre-norm, residual')
    """
    first = "no norm" if norm == "none" else f"{norm}-norm"
    return f"{first}, residual" if residual else first


@dataclass(frozen=True)
class Architecture:
    """What differs between the networks of the study.

    >>> Architecture("causal", "pre", residual=True).name_in_words
    'causal, pre-norm, residual, d_qk 8'
    """

    mask: str = "complete"
    norm: str = "none"
    """LayerNorm before what a block computes, after it, or none."""
    residual: bool = False
    width_qk: int = 8
    """d_qk, the width of queries and keys."""
    sharpness: float = 1.0
    """The standard deviation of scores of random tokens, before any training."""

    @property
    def name(self) -> str:
        """What it is called among what was measured."""
        residual = "residual" if self.residual else "no residual"
        return (
            f"{self.mask}, norm {self.norm}, {residual}, d_qk {self.width_qk}, "
            f"scores {self.sharpness:g}"
        )

    @property
    def name_in_words(self) -> str:
        """What it is called in tables, among networks with scores of one size."""
        return f"{self.mask}, {kind_name(self.norm, self.residual)}, d_qk {self.width_qk}"


@dataclass(frozen=True)
class CollapseSetting:
    """How large the networks are, and how long they are trained."""

    tokens: int = 32
    width: int = 32
    """Of the random networks, which only attend."""
    depth: int = 48
    samples: int = 4
    widths_qk: tuple[int, ...] = (2, 8, 32)
    sharpnesses: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    seeds: int = 10
    trained_width: int = 48
    """Of the trained networks, which have MLPs too."""
    trained_depth: int = 6
    steps: int = 300
    batch: int = 16
    rate: float = 2e-3
    hidden: float = 0.25
    """The share of characters that are hidden, and are to be told."""
    trained_seeds: int = 3

    def random(self) -> list[Architecture]:
        """The random networks: masks × norms × residuals × d_qk, and scores of several sizes."""
        grid = [
            Architecture(mask, norm, residual, width)
            for mask in MASKS
            for norm in NORMS
            for residual in (False, True)
            for width in self.widths_qk
        ]
        sharper = [
            Architecture(mask, "pre", sharpness=sharpness)
            for mask in MASKS
            for sharpness in self.sharpnesses
        ]
        return list(dict.fromkeys([*grid, *sharper]))

    def trained(self) -> list[Architecture]:
        """The trained networks: each mask, norm and residual, and d_qk, around one of them."""
        usual = Architecture(norm="pre", residual=True)
        found = [replace(usual, mask=mask) for mask in MASKS]
        found += [
            Architecture(norm=norm, residual=more) for norm in NORMS for more in (True, False)
        ]
        found += [replace(usual, width_qk=width) for width in self.widths_qk]
        return list(dict.fromkeys(found))


SETTINGS = {
    "small": CollapseSetting(),
    "paper": CollapseSetting(
        tokens=128,
        width=128,
        depth=128,
        trained_width=256,
        trained_depth=12,
        steps=5000,
        batch=64,
        rate=5e-4,
        trained_seeds=5,
    ),
}
