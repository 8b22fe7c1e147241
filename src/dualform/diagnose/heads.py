"""Heads: which attend alike, and which add little to what their layer gives?

A head `h` gives `o_h`, and the layer `Σ_h W_h o_h`: `W_h` are its columns of the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from rich.console import Group
from torch import Tensor, nn

from dualform.diagnose.blocks import find_blocks, in_eval_mode, look
from dualform.diagnose.calls import AttentionCall, BlockState
from dualform.errors import AttentionError
from dualform.read.display import Displayed, columns, framed, matplotlib_axes, pandas_frame

ALIKE = 0.95
"""Heads whose attention overlaps by this much attend alike."""
SMALL = 0.01
"""A head that adds, or changes, less than this share is a candidate for pruning."""
SHOWN = 6
"""So many heads, or groups of them, are named in a sentence."""


@dataclass(frozen=True)
class AttentionHead:
    """One head of attention, on the tokens that were given.

    >>> AttentionHead("layers.0", 3, share=0.004, twin=1, overlap=0.97).label
    'head 3 of layers.0'
    """

    block: str
    head: int
    share: float
    """`‖W_h o_h‖ / ‖Σ_g W_g o_g‖`: the size of what it adds, relative to what the layer gives."""
    twin: int | None = None
    """The head of the layer that attends most as it does; None where there is no other."""
    overlap: float | None = None
    """`Σ_j min(a_ij, b_ij)` of its weights and its twin's, mean over tokens: 1 where alike."""
    damage: float | None = None
    """`‖f − f₋ₕ‖ / ‖f − f̄‖`: by how much the model's output changes without the head."""

    @property
    def label(self) -> str:
        """Its name in a sentence."""
        return f"head {self.head} of {self.block}"

    @property
    def size(self) -> float:
        """Its damage; if that was not tried, its share."""
        return self.share if self.damage is None else self.damage

    @property
    def prunable(self) -> bool:
        """Whether its size is small."""
        return self.size < SMALL


@dataclass(frozen=True, repr=False)
class Heads(Displayed):
    """The heads of a network; prints, plots, and becomes a data frame.

    >>> two = [AttentionHead("h.0", at, share=0.7, twin=1 - at, overlap=0.99) for at in range(2)]
    >>> Heads(tuple(two)).findings[0]
    'Heads attend alike, so that one pattern would do for them: 0, 1 of h.0.'
    """

    heads: tuple[AttentionHead, ...]

    @property
    def redundant(self) -> tuple[tuple[AttentionHead, ...], ...]:
        """Groups of heads of a layer that attend alike: each as another of its group does."""
        groups: dict[tuple[str, int], set[int]] = {}
        for one in self.heads:
            if one.twin is not None and one.overlap is not None and one.overlap >= ALIKE:
                both = [groups.get((one.block, at), {at}) for at in (one.head, one.twin)]
                joined = set().union(*both)
                groups.update({(one.block, at): joined for at in joined})
        found: list[tuple[AttentionHead, ...]] = []
        for one in self.heads:
            group = groups.get((one.block, one.head), set())
            if group and min(group) == one.head:
                found.append(
                    tuple(x for x in self.heads if x.block == one.block and x.head in group)
                )
        return tuple(found)

    @property
    def prunable(self) -> tuple[AttentionHead, ...]:
        """Candidates for pruning."""
        return tuple(one for one in self.heads if one.prunable)

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found of heads that attend alike, and of heads that add little."""
        groups = [
            f"{', '.join(str(one.head) for one in group)} of {group[0].block}"
            for group in self.redundant
        ]
        few = [one.label for one in self.prunable]
        least = min(self.heads, key=lambda one: one.size)
        if any(one.damage is not None for one in self.heads):
            said = f"Without each of these heads the output changes by less than {SMALL:.0%}"
            none = f"Whichever head is left out, the output changes by {SMALL:.0%} or more"
        else:
            said = f"Each of these heads adds less than {SMALL:.0%} of what its layer gives"
            none = f"Every head adds {SMALL:.0%} or more of what its layer gives"
        return (
            f"Heads attend alike, so that one pattern would do for them: {_some(groups, '; ')}."
            if groups
            else f"No two heads of a layer attend alike: none overlap by {ALIKE}.",
            f"{said}, so that it may be pruned: {_some(few)}."
            if few
            else f"{none}; {least.label} least: {least.size:.1%}.",
        )

    @property
    def finding(self) -> str:
        """The result in two sentences."""
        return " ".join(self.findings)

    def __rich__(self) -> Group:
        return framed("heads, block by block", self._table(), self.finding)

    def _table(self) -> Any:
        tried = any(one.damage is not None for one in self.heads)
        table = columns(
            ("block", "head", "share", "like", "overlap", *["damage"] * tried), {"block"}
        )
        for name, group in groupby(self.heads, key=lambda one: one.block):
            for at, one in enumerate(group):
                cells = [name if at == 0 else "", str(one.head), f"{one.share:.3f}"]
                cells += ["–" if one.twin is None else str(one.twin)]
                cells += ["–" if one.overlap is None else f"{one.overlap:.3f}"]
                cells += ["–" if one.damage is None else f"{one.damage:.3g}"] * tried
                table.add_row(*cells)
        return table

    def to_pandas(self) -> Any:
        """A data frame with a line for each head."""
        rows = [asdict(one) for one in self.heads]
        return pandas_frame({name: [row[name] for row in rows] for name in rows[0]})

    def plot(self, axes: Any = None, value: str = "share") -> Any:
        """A matrix of blocks and heads; `value` is "share", "overlap" or "damage"."""
        axes = matplotlib_axes(axes)
        groups = [list(group) for _, group in groupby(self.heads, key=lambda one: one.block)]
        widest = max(map(len, groups))
        rows = [
            [float("nan") if (x := getattr(one, value)) is None else x for one in group]
            + [float("nan")] * (widest - len(group))
            for group in groups
        ]
        picture = axes.imshow(rows, aspect="auto", vmin=0, cmap="Blues")
        axes.set(xlabel="head", title=value, yticks=range(len(groups)))
        axes.set_yticklabels([group[0].block for group in groups])
        axes.figure.colorbar(picture, ax=axes)
        return axes


def heads(
    model: nn.Module,
    *inputs: Any,
    layers: str | Sequence[str] | None = None,
    ablate: bool = False,
    **named: Any,
) -> Heads:
    """Which heads attend alike, and which add little, in a model that is called with these inputs?

    Attention has to be seen: that of `nn.MultiheadAttention`, of our layers, and of calls of
    `scaled_dot_product_attention`. With `ablate` the model runs once without each head.

    >>> _ = torch.manual_seed(0)
    >>> block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    >>> found = heads(nn.TransformerEncoder(block, 2), torch.randn(3, 10, 16), ablate=True)
    >>> len(found.heads), found.heads[0].damage > 0
    (4, True)
    """
    collected = HeadReadings()
    out = look(model, find_blocks(model, layers), collected.see, inputs, named)
    if not collected.found:
        raise no_attention(model)
    if not ablate:
        return collected.result()
    return collected.ablated(model, out, lambda: model(*inputs, **named))


def no_attention(model: nn.Module) -> AttentionError:
    """The error for a model in which no self-attention was seen."""
    return AttentionError(
        f"no self-attention was seen in the forward pass of {type(model).__name__}. It is seen in "
        "nn.MultiheadAttention, in layers of dualform.attention, and in calls of "
        "scaled_dot_product_attention; load models of transformers with attn_implementation='sdpa'."
    )


class HeadReadings:
    """Collects what each block's heads do, while the model runs."""

    def __init__(self) -> None:
        self.found: list[AttentionHead] = []
        self._columns: list[Tensor | None] = []
        """Of each head: its columns of the output projection, where that is a parameter."""

    def see(self, seen: BlockState) -> None:
        """Takes what a block did."""
        first = 0
        for call in seen.calls:
            if call.outputs is None or not bool(call.weights.isfinite().all()):
                continue
            found = _heads_of(seen.name, first, call.outputs, call)
            self.found += found
            self._columns += _split(call, len(found))
            first += len(found)

    def result(self) -> Heads:
        """All heads so far."""
        return Heads(tuple(self.found))

    def ablated(self, model: nn.Module, out: Any, run: Callable[[], Any]) -> Heads:
        """The same, with the damage of leaving out each head whose projection is a parameter."""
        stored = {p.untyped_storage().data_ptr() for p in model.parameters()}
        full, heads = _first_tensor(out), list(self.found)
        apart = (full - full.mean(tuple(range(max(1, full.ndim - 1))))).norm()
        with torch.no_grad(), in_eval_mode(model):
            for at, W in enumerate(self._columns):
                if W is not None and W.untyped_storage().data_ptr() in stored:
                    with _zeroed(W):
                        change = (_first_tensor(run()) - full).norm()
                    heads[at] = replace(heads[at], damage=float(change / apart))
        return Heads(tuple(heads))


def _some(names: Sequence[str], between: str = ", ") -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return between.join(names[:SHOWN]) + more


@contextmanager
def _zeroed(W: Tensor) -> Iterator[None]:
    kept = W.clone()
    W.zero_()
    try:
        yield
    finally:
        W.copy_(kept)


def _split(call: AttentionCall, count: int) -> list[Tensor | None]:
    if call.mix is None:
        return [None] * count
    return list(call.mix.chunk(count, -1))


def _heads_of(block: str, first: int, outputs: Tensor, call: AttentionCall) -> list[AttentionHead]:
    """The heads of one call, numbered from `first`."""
    shares = _shares(outputs, call.mix).tolist()
    if len(shares) == 1:
        return [AttentionHead(block, first, shares[0])]
    twins, overlaps = (found.tolist() for found in _twins(call.weights))
    return [
        AttentionHead(block, first + at, share, first + twin, overlap)
        for at, (share, twin, overlap) in enumerate(zip(shares, twins, overlaps, strict=True))
    ]


def _shares(outputs: Tensor, mix: Tensor | None) -> Tensor:
    """‖W_h o_h‖ of each head, relative to the norm of their sum; without W, of the heads alone."""
    o = outputs.double().transpose(0, 1).flatten(1, 2)  # (heads, batch · tokens, D)
    if mix is None:
        alone: Tensor = o.flatten(1).norm(dim=1) / o.norm().clamp_min(1e-300)
        return alone
    parts = torch.stack(mix.double().chunk(len(o), -1))  # (heads, width, D)
    each = ((o @ (parts.mT @ parts)) * o).sum((1, 2)).clamp_min(0).sqrt()
    whole = (o @ parts.mT).sum(0).norm()
    found: Tensor = each / whole.clamp_min(1e-300)
    return found


def _twins(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Of each head: which other attends most alike, and by how much both overlap."""
    sees = ((weights > 0).sum(-1) > 1).any(1)  # (batch, tokens): of those that have a choice
    table = torch.stack([_overlaps(weights, h, sees) for h in range(weights.shape[1])])
    best = table.nan_to_num(1.0).fill_diagonal_(-1.0).max(1)
    return best.indices, best.values


def _overlaps(weights: Tensor, head: int, sees: Tensor) -> Tensor:
    """(heads,): `Σ_j min(a_ij, b_ij)`, mean over the tokens that see any."""
    both = torch.minimum(weights[:, head, None], weights).sum(-1)
    found: Tensor = both.transpose(1, 2)[sees].mean(0)
    return found


def _first_tensor(out: Any) -> Tensor:
    """What a model gives: its logits, or its tokens."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(out, name, None), Tensor):
            return getattr(out, name).double()  # type: ignore[no-any-return]
    while isinstance(out, tuple | list):
        out = out[0]
    if not isinstance(out, Tensor):
        raise AttentionError(
            f"the model gives a {type(out).__name__}; trying it without a head needs a tensor, a "
            "tuple that begins with one, or an output with logits or last_hidden_state."
        )
    return out.double()
