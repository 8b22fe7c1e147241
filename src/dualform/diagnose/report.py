"""Every instrument at once: `dualform.diagnose(model, batch)`, and the report it gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from rich.console import Group
from rich.text import Text
from torch import Tensor, nn

from dualform.diagnose.blocks import find_blocks, look
from dualform.diagnose.calls import AttentionCall, BlockState
from dualform.diagnose.collapse import Collapse, CollapseReading
from dualform.diagnose.heads import HeadReadings, Heads, no_attention
from dualform.diagnose.kernel_pca import ValueAudit, audit_values
from dualform.diagnose.mask_graph import MaskGraph, mask_graph
from dualform.diagnose.paths import PathReadings, Paths
from dualform.errors import AttentionError
from dualform.read.display import Displayed, columns, framed, matplotlib_axes
from dualform.read.queries import arguments

PAGE = "docs/diagnose.md"
AUDITED = 256
"""Values of up to so many tokens are compared with kernel PCA: it takes the cube of them."""


@dataclass(frozen=True)
class Statement:
    """One sentence of a report, and where its meaning is explained.

    >>> Statement("All tokens are one after 'h.0'.", "do-tokens-collapse").link
    'docs/diagnose.md#do-tokens-collapse'
    """

    sentence: str
    topic: str

    @property
    def link(self) -> str:
        """The paragraph that says what it means."""
        return f"{PAGE}#{self.topic}"


@dataclass(frozen=True)
class LayerMask:
    """Who attended to whom in a block: the graph of what its attention let through.

    >>> LayerMask("h.0", mask_graph(torch.ones(3, 3).bool())).graph.radius
    1
    """

    block: str
    graph: MaskGraph
    blind: tuple[int, ...] = ()
    """Tokens that saw no token at all, in any sample."""
    unseen: tuple[int, ...] = ()
    """Tokens that no other token saw."""


@dataclass(frozen=True, repr=False)
class Diagnosis(Displayed):
    """What all instruments found in a model; prints, plots, and becomes a data frame.

    >>> import dualform
    >>> _ = torch.manual_seed(0)
    >>> block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    >>> report = dualform.diagnose(nn.TransformerEncoder(block, 3), torch.randn(3, 10, 16))
    >>> report.findings[1].sentence
    'Masks let token 5 reach all 10 tokens within 1 layer, in all 3 blocks: attention alone brings tokens together.'
    """  # noqa: E501

    collapse: Collapse
    masks: tuple[LayerMask, ...]
    heads: Heads | None
    values: tuple[tuple[str, int, ValueAudit], ...]
    """Block, head, and how far its values are from kernel principal components."""
    notes: tuple[str, ...] = ()
    """What was not looked at, and why."""
    paths: Paths | None = None
    """What attention paths score each head; None without targets."""

    @property
    def findings(self) -> tuple[Statement, ...]:
        """One plain sentence each, with a link to its meaning."""
        found = [Statement(self.collapse.finding, "do-tokens-collapse")]
        found += [Statement(said, "what-does-a-mask-imply") for said in _of_masks(self.masks)]
        if self.heads is not None:
            found += [Statement(said, "which-heads-are-needed") for said in self.heads.findings]
        if self.values:
            found.append(
                Statement(_of_values(self.values), "are-values-kernel-principal-components")
            )
        if self.paths is not None:
            found.append(Statement(self.paths.finding, "which-paths-do-tokens-take"))
        return tuple(found)

    def __rich__(self) -> Group:
        names = (
            "block",
            "tokens",
            "μ/‖X‖",
            "contraction",
            "radius",
            "heads",
            "alike",
            "least share",
            *(["path scores"] if self.paths is not None else []),
        )
        table = columns(names, {"block"})
        masks = {one.block: one for one in self.masks}
        for one in self.collapse.layers:
            seen, factor = masks.get(one.name), one.contraction
            table.add_row(
                one.name or "model",
                "–" if seen is None else str(seen.graph.tokens),
                f"{one.spread.relative:.3g}",
                "–" if factor is None else f"{factor:.3f}",
                "–" if seen is None or seen.graph.radius is None else str(seen.graph.radius),
                *self._head_cells(one.name),
                *self._path_cells(one.name),
            )
        sentences = [Text(f"· {one.sentence}  [{one.link}]") for one in self.findings]
        notes = [Text(f"Not looked at: {note}", style="dim") for note in self.notes]
        return Group(framed("what the model does", table), *sentences, *notes)

    def _head_cells(self, block: str) -> tuple[str, str, str]:
        own = [] if self.heads is None else [x for x in self.heads.heads if x.block == block]
        if self.heads is None or not own:
            return "–", "–", "–"
        alike = sum(len(group) for group in self.heads.redundant if group[0].block == block)
        return str(len(own)), str(alike), f"{min(x.share for x in own):.3f}"

    def _path_cells(self, block: str) -> tuple[str, ...]:
        """The least and the largest score of a head."""
        if self.paths is None:
            return ()
        own = zip(self.paths.blocks, self.paths.scores, strict=True)
        scores = [score for name, row in own if name == block for score in row.tolist()]
        return (f"{min(scores):.3f}–{max(scores):.3f}" if scores else "–",)

    def to_pandas(self) -> Any:
        """A data frame with a line for each block; `report.heads.to_pandas()` has the heads."""
        return self.collapse.to_pandas()

    def plot(self) -> Any:
        """A figure: tokens by depth, each head's share, and how much heads overlap."""
        if self.heads is None:
            return self.collapse.plot().figure
        figure = matplotlib_axes().figure
        figure.clear()
        figure.set_size_inches(12, 3.5)
        first, second, third = figure.subplots(1, 3)
        self.collapse.plot(first)
        self.heads.plot(second, "share")
        self.heads.plot(third, "overlap")
        return figure


def diagnose(
    model: nn.Module,
    batch: Any,
    *,
    layers: str | Sequence[str] | None = None,
    targets: Tensor | None = None,
    ablate: bool = False,
) -> Diagnosis:
    """Calls the model once, and runs every instrument that applies: `dualform.diagnose(…)`.

    >>> _ = torch.manual_seed(0)
    >>> block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    >>> report = diagnose(nn.TransformerEncoder(block, 2), torch.randn(3, 10, 16))
    >>> len(report.heads.heads), [one.topic for one in report.findings][0]
    (4, 'do-tokens-collapse')

    Args:
        batch: what the model is called with: a tensor, a tuple of arguments or a dict of keywords.
        layers: names of blocks, or patterns. Default: the largest row of alike modules, or the
            attention layers of a model that has no such row.
        targets: one number a sample, such as +1 and −1 for two classes: also scores heads by the
            attention paths that lead to them.
        ablate: also runs the model once without each head, to see what it loses.
    """
    inputs, named = arguments(batch)
    tokens, masks, audits = CollapseReading(), _Masks(), _Audits()
    heads, paths = HeadReadings(), PathReadings()

    def see(seen: BlockState) -> None:
        tokens.see(seen)
        masks.see(seen)
        audits.see(seen)
        heads.see(seen)
        if targets is not None:
            paths.see(seen)

    out = look(model, _blocks(model, layers), see, inputs, named)
    if not masks.calls:
        raise no_attention(model)
    found = heads.ablated(model, out, lambda: model(*inputs, **named)) if ablate else heads.result()
    scored, notes = _scored(paths, targets)
    return Diagnosis(
        tokens.result(),
        tuple(masks.found),
        found if found.heads else None,
        tuple(audits.found),
        tuple(dict.fromkeys([*masks.notes, *audits.notes, *notes])),
        scored,
    )


def _scored(paths: PathReadings, targets: Tensor | None) -> tuple[Paths | None, tuple[str, ...]]:
    """Scores of heads by attention paths; or why there are none."""
    if targets is None:
        return None, ("attention paths, which need targets=, one number a sample.",)
    if targets.shape != (paths.samples,):
        raise AttentionError(
            f"targets have shape {tuple(targets.shape)}; give one number for each of "
            f"{paths.samples} samples, such as +1 and −1 for two classes."
        )
    try:
        return paths.result(targets), ()
    except AttentionError as error:
        return None, (f"attention paths: {error}",)


def _blocks(model: nn.Module, layers: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """The blocks, or the attention layers of a model without a row of alike blocks."""
    try:
        return find_blocks(model, layers)
    except AttentionError:
        found: dict[str, nn.Module] = {
            n: m for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)
        }
        if layers is not None:
            raise
        if not found:
            raise no_attention(model) from None
        return found


class _Masks:
    """Reads from the weights of each call who attended to whom."""

    def __init__(self) -> None:
        self.found: list[LayerMask] = []
        self.notes: list[str] = []
        self.calls = 0

    def see(self, seen: BlockState) -> None:
        for call in seen.calls:
            self.calls += 1
            count = call.weights.shape[-1]
            if seen.is_apart(call):
                self.notes.append(
                    f"what masks of {seen.name} imply: it attends within groups of {count} of its "
                    f"{seen.given.shape[1]} tokens, and how groups meet cannot be seen."
                )
            elif not bool(call.weights.isfinite().any()):
                self.notes.append(f"weights of {seen.name}: none is a finite number.")
            else:
                self.found.append(LayerMask(seen.name, *_mask_of(call.weights)))


def _mask_of(weights: Tensor) -> tuple[MaskGraph, tuple[int, ...], tuple[int, ...]]:
    """Who attended to whom in any sample and head, who saw nobody, and whom no other saw."""
    seen = (weights > 0).flatten(0, 1).any(0)
    others = seen & ~torch.eye(*seen.shape, dtype=torch.bool, device=seen.device)
    blind = tuple((~seen.any(1)).nonzero().flatten().tolist())
    unseen = tuple((~others.any(0)).nonzero().flatten().tolist()) if len(seen) > 1 else ()
    return mask_graph(seen), blind, unseen


def _of_masks(masks: Sequence[LayerMask]) -> Iterator[str]:
    """A sentence for each run of blocks that let the same through."""
    for (graph, blind, unseen), group in groupby(masks, lambda m: (m.graph, m.blind, m.unseen)):
        names = list(dict.fromkeys(one.block for one in group))
        every = len(names) == len({one.block for one in masks})
        where = f"in all {len(names)} blocks" if every else f"in {', '.join(names[:6])}"
        where = where if len(names) > 1 or not every else "in its block"
        yield _reach(graph, where)
        if blind:
            yield f"Masks hide all tokens from {_tokens(blind)} {where}: give each one to see."
        elif unseen and graph.radius is None:
            yield f"No other token sees {_tokens(unseen)} {where}: what is there is not used."


def _reach(graph: MaskGraph, where: str) -> str:
    if graph.radius is None:
        named = ", ".join(map(str, graph.apart[:8]))
        return (
            f"Masks let no token reach all {graph.tokens} others, {where}: the groups of tokens "
            f"{named} hear nothing from each other, and attention alone does not join them."
        )
    layers = "1 layer" if graph.radius == 1 else f"{graph.radius} layers"
    return (
        f"Masks let token {graph.center} reach all {graph.tokens} tokens within {layers}, {where}: "
        "attention alone brings tokens together."
    )


def _tokens(which: Sequence[int]) -> str:
    some = ", ".join(map(str, which[:8])) + (" …" if len(which) > 8 else "")
    return f"token{'s' * (len(which) > 1)} {some}"


class _Audits:
    """Compares the values of each head's first sample with kernel principal components."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, ValueAudit]] = []
        self.notes: list[str] = []

    def see(self, seen: BlockState) -> None:
        for call in seen.calls:
            reason = _no_audit(call)
            if reason is not None:
                self.notes.append(reason)
            elif call.projected is not None:
                q, k, v, scale = call.projected
                for head in range(q.shape[1]):
                    parts = [x[0, head].detach().cpu() for x in (q, k, v)]
                    self._add(seen.name, head, parts, scale)

    def _add(self, block: str, head: int, parts: Sequence[Tensor], scale: float | None) -> None:
        q, k, v = parts
        try:
            self.found.append((block, head, audit_values(q, k, v, scale)))
        except AttentionError as error:
            self.notes.append(f"values against kernel PCA: {error}")


def _no_audit(call: AttentionCall) -> str | None:
    """Why the values of a call are not compared with kernel PCA; None if they are."""
    if call.projected is None:
        return "values against kernel PCA, where a layer is not softmax attention."
    if not bool(call.weights.isfinite().all()):
        return "values against kernel PCA, where weights are not finite."
    if not bool((call.weights > 0).all()):
        return "values against kernel PCA, where a mask hides keys: it has one set of axes for all."
    if call.weights.shape[-1] > AUDITED:
        return (
            f"values against kernel PCA, where there are more than {AUDITED} tokens; "
            "diagnose.audit_values takes any number."
        )
    return None


def _of_values(values: Sequence[tuple[str, int, ValueAudit]]) -> str:
    close = [one for one in values if one[2].is_kernel_pca]
    cosines = [found.cosine for _, _, found in values]
    null = [found.null.cosine for _, _, found in values if found.null is not None]
    mean, shuffled = (sum(x) / len(x) for x in (cosines, null))
    return (
        f"The values of {len(close)} of {len(values)} heads are kernel principal components: "
        f"|cos| with the axes is {mean:.2f} on average, {shuffled:.2f} where values are shuffled."
    )
