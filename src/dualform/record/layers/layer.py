"""What it takes to book a kind of layer by row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The widths of a layer's rows, and how its parameters are made of them.

    `forms` maps an attribute to "outer" (its gradient is Σ value ⊗ key) or "sum" (Σ value).
    """

    keys: int
    values: int
    forms: dict[str, str]


class LayerKind(ABC):
    """A kind of layer: which modules it is, and what rows their calls leave.

    A new kind writes `accepts` and `shape`, and `rows` where its input is not already the keys.
    """

    @abstractmethod
    def accepts(self, module: nn.Module) -> bool:
        """Whether the module computes exactly what this kind books."""

    @abstractmethod
    def shape(self, module: nn.Module) -> Shape:
        """Widths and forms of this module."""

    def rows(self, x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, `(..., width)` each, from a call's input and its output's gradient."""
        return x, error
