"""The page on attention: a transformer's tokens and heads, at some steps of its training."""

from __future__ import annotations

import math

from torch import nn

from dualform.errors import ReadingError
from dualform.explore.attention_contract import AttentionView, BlockCourse, HeadCourse
from dualform.explore.exhibit import Exhibit

MOST_QUERIES = 16
"""On so many queries the model is called."""


def has_attention(exhibit: Exhibit) -> bool:
    """Whether there is something to look at: a model with attention, and queries."""
    if exhibit.model is None or not len(exhibit):
        return False
    return any(
        isinstance(module, nn.MultiheadAttention) or "attention" in type(module).__name__.lower()
        for module in exhibit.model.modules()
    )


def attention_view(exhibit: Exhibit) -> AttentionView:
    """What the instruments of `dualform.diagnose` say at some steps, up to the one that is read."""
    from dualform.diagnose import Diagnosis, over_training

    if exhibit.model is None or not len(exhibit):
        raise ReadingError(
            "attention is looked at while the model runs on queries: give --model and --input, or "
            "view(run, model, x)."
        )
    count = min(len(exhibit), MOST_QUERIES)
    found = over_training(exhibit.run, exhibit.model, exhibit.inputs(count))

    def course(at: int) -> BlockCourse:
        layers = [report.collapse.layers[at] for report in found.reports]
        return {
            "name": layers[0].name,
            "relative": [_finite(layer.spread.relative) for layer in layers],
            "contraction": [_finite(layer.contraction) for layer in layers],
            "heads": heads_of(found.reports, layers[0].name),
        }

    def heads_of(reports: tuple[Diagnosis, ...], block: str) -> list[HeadCourse]:
        rows = [
            [one for one in report.heads.heads if one.block == block] if report.heads else []
            for report in reports
        ]
        return [
            {
                "head": own[-1].head,
                "share": [_finite(one.share) for one in own],
                "twin": own[-1].twin,
                "overlap": [_finite(one.overlap) for one in own],
            }
            for own in zip(*rows, strict=False)
        ]

    return {
        "steps": list(found.steps),
        "queries": count,
        "findings": [*found.findings, *(one.sentence for one in found.reports[-1].findings)],
        "blocks": [course(at) for at in range(len(found.reports[-1].collapse.layers))],
    }


def _finite(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else number
