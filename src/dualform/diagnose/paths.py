"""Attention paths of a real network: which heads do the ways of tokens to the target need?

The weights of each block's attention, as they are on some samples, make a network with linear
values and the same paths. Its order parameters, learned from targets, score heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group
from torch import Tensor, nn

from dualform.diagnose.blocks import find_blocks, look
from dualform.diagnose.calls import BlockState
from dualform.diagnose.heads import no_attention
from dualform.diagnose.path_kernels import PathKernel, PathPrior, fit_paths, path_features
from dualform.errors import AttentionError
from dualform.read.display import Displayed, columns, framed, matplotlib_axes, pandas_frame


@dataclass(frozen=True, repr=False)
class Paths(Displayed):
    """What attention paths score each head of a network; prints, plots, becomes a data frame.

    >>> x, y = torch.randn(30, 4, 6), torch.ones(30)
    >>> print(Paths(("h.0", "h.1"), fit_paths(x, y, PathPrior((2, 2), 8)), False).scores[0].shape)
    torch.Size([2])
    """

    blocks: tuple[str, ...]
    kernel: PathKernel
    skip: bool = True
    """Whether the last score of each block is that of its residual connection."""

    @property
    def scores(self) -> list[Tensor]:
        """For each block a score of each head: the share of `Σ |U_ππ'|` whose paths use it."""
        return [s[: len(s) - self.skip] for s in self.kernel.head_scores]

    @property
    def skipped(self) -> list[float | None]:
        """For each block the score of its residual connection."""
        return [float(s[-1]) if self.skip else None for s in self.kernel.head_scores]

    @property
    def fit(self) -> float:
        """The share of the targets' variance that the kernel machine explains, in training."""
        K = self.kernel.kernel(self.kernel.features, self.kernel.features)
        predicted, rest = K @ self.kernel.weights, self.kernel.prior.temperature
        y = predicted + rest * self.kernel.weights
        return float(1 - (y - predicted).square().sum() / (y - y.mean()).square().sum())

    @property
    def each(self) -> list[tuple[float, str]]:
        """The score of each head, with its name."""
        return [
            (float(score), f"head {head} of {block}")
            for block, row in zip(self.blocks, self.scores, strict=True)
            for head, score in enumerate(row)
        ]

    @property
    def finding(self) -> str:
        """The result in one sentence."""
        most, least = max(self.each), min(self.each)
        return (
            f"Paths to the targets use {most[1]} most (score {most[0]:.3f}) and {least[1]} least "
            f"({least[0]:.3f})."
        )

    def __rich__(self) -> Group:
        widest = max(map(len, self.scores))
        skip = ["residual"] if self.skip else []
        table = columns(("block", *map(str, range(widest)), *skip), {"block"})
        for name, row, rest in zip(self.blocks, self.scores, self.skipped, strict=True):
            cells = [f"{s:.3f}" for s in row] + ["–"] * (widest - len(row))
            table.add_row(name, *cells, *([] if rest is None else [f"{rest:.3f}"]))
        return framed("scores of heads by attention paths", table, self.finding)

    def to_pandas(self) -> Any:
        """A data frame with a line for each head."""
        rows = [
            (name, head, float(score))
            for name, row in zip(self.blocks, self.scores, strict=True)
            for head, score in enumerate(row)
        ]
        names = ("block", "head", "score")
        return pandas_frame({name: [row[at] for row in rows] for at, name in enumerate(names)})

    def plot(self, axes: Any = None) -> Any:
        """The order parameters, `log₁₀ |U_ππ'|`."""
        axes = matplotlib_axes(axes)
        picture = axes.imshow(
            self.kernel.order.abs().clamp_min(1e-12).log10().cpu().numpy(), cmap="Blues"
        )
        axes.set(xlabel="path", ylabel="path", title="log₁₀ |U|")
        axes.figure.colorbar(picture, ax=axes)
        return axes


def paths(
    model: nn.Module,
    *inputs: Any,
    targets: Tensor,
    layers: str | Sequence[str] | None = None,
    query: int | None = None,
    skip: bool = True,
    width: float | None = None,
    temperature: float = 0.01,
    **named: Any,
) -> Paths:
    """Scores of heads by attention paths, for targets (samples,) of the samples that are given.

    The network is called once. What its blocks do besides attention is left out, and values are
    taken to be linear: scores say what the attention pattern is good for.

    >>> _ = torch.manual_seed(0)
    >>> block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    >>> model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    >>> found = paths(model, torch.randn(20, 5, 8), targets=torch.randn(20).sign())
    >>> [len(scores) for scores in found.scores]
    [2, 2]

    Args:
        targets: one number for each sample, such as +1 and −1 for two classes.
        query: the token that is read; None for the mean of all.
        skip: whether paths may also go through residual connections.
        width: N of the theory, of every layer. Default: the width of tokens.
        temperature: how far predictions may stay from targets.
    """
    readings = PathReadings()
    look(model, find_blocks(model, layers), readings.see, inputs, named)
    if not readings.weights:
        raise no_attention(model)
    return readings.result(targets, query, skip, width, temperature)


class PathReadings:
    """Collects the tokens before a model's first block, and each block's attention, while it runs.

    >>> readings = PathReadings()
    >>> readings.see(BlockState("h.0", torch.zeros(3, 4, 8), torch.zeros(3, 4, 8)))
    >>> readings.weights
    []
    """

    def __init__(self) -> None:
        self.weights: list[tuple[str, Tensor]] = []
        """The block of each call of attention, and its weights."""
        self._first: BlockState | None = None
        self.samples = 0
        """How many the first block was given."""

    def see(self, seen: BlockState) -> None:
        """Takes what a block that ran was given, and its weights."""
        self._first = self._first or BlockState(seen.name, torch.empty(0), seen.given)
        self.samples = len(self._first.given)
        self.weights += [(seen.name, call.weights) for call in seen.calls]

    def result(
        self,
        targets: Tensor,
        query: int | None = None,
        skip: bool = True,
        width: float | None = None,
        temperature: float = 0.01,
    ) -> Paths:
        """The scores, for targets (samples,); the options are those of `paths`."""
        assert self._first is not None
        tokens = self._first.given
        if tokens.ndim != 3:
            raise AttentionError(
                f"'{self._first.name}' was given a tensor of shape {tuple(tokens.shape)} in place "
                "of tokens (samples, tokens, width); name other blocks with layers=."
            )
        x, weights = tokens.double(), [w.double() for _, w in self.weights]
        features = path_features(x, weights, query, skip)
        prior = PathPrior(
            tuple(w.shape[1] + skip for w in weights),
            float(x.shape[-1]) if width is None else width,
            temperature=temperature,
        )
        kernel = fit_paths(features, targets, prior)
        return Paths(tuple(name for name, _ in self.weights), kernel, skip)
