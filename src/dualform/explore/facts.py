"""What a run is, and what can be asked of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualform.explore.attention import has_attention
from dualform.explore.cards import LONGEST_NAME, plain_label, shorten
from dualform.explore.contract import Ask, QuestionCard, RunView
from dualform.explore.exhibit import Exhibit
from dualform.ledger import Stream
from dualform.read import Run
from dualform.read.ask import NEEDS_MODEL, keeps_inputs, layer_places, layer_rows
from dualform.read.display import moment

QUESTIONS: dict[Ask, tuple[str, str]] = {
    "layer": (
        "This layer",
        "What one layer's output is made of: signed amounts, training sample by training sample.",
    ),
    "network": (
        "Whole network",
        "What the model's output is made of, through all layers: a complete account of what "
        "training did.",
    ),
    "removed": (
        "What if removed",
        "How much the output would fall if a sample had not been trained on: an estimate, since "
        "others would have stood in for it.",
    ),
    "keys": (
        "Keys only",
        "How alike a training input and this one look to the layer, without what was learned "
        "from it: the score of the paper.",
    ),
}


def run_facts(exhibit: Exhibit) -> RunView:
    """The run, its layers, its labels, and the questions there are."""
    run = exhibit.run
    counts = Counter(plain_label(run.samples.labels.get(name)) for name in run.ids)
    labels = sorted((la for la in counts if la is not None), key=lambda la: (str(type(la)), la))
    questions: list[QuestionCard] = []
    for ask, (title, meaning) in QUESTIONS.items():
        why = _missing(exhibit, ask)
        card: QuestionCard = {
            "ask": ask,
            "title": title,
            "meaning": meaning,
            "available": not why,
            "why": why,
        }
        questions.append(card)
    return {
        "name": run.path.resolve().name,
        "runs": 1,
        "carried": False,
        "attention": has_attention(exhibit),
        "steps": run.steps,
        "samples": len(run.ids),
        "bytes": run.nbytes,
        "bins": {
            "unit": "epoch" if run.bins.unit == "epoch" else "step",
            "edges": list(run.bins.edges),
        },
        "layers": [
            {
                "name": stream.name,
                "inputs": math.prod(stream.keys),
                "outputs": stream.values[0] if stream.layout else math.prod(stream.values),
                "rows": layer_rows(run, stream.name),
                "places": layer_places(run, stream.name),
                "grid": grid(stream),
            }
            for stream in run.info.layers
        ],
        "columns": list(run.samples.columns),
        "labels": [{"label": label, "count": counts[label]} for label in labels],
        "classes": exhibit.classes,
        "names": exhibit.names,
        "questions": questions,
        "queries": exhibit.listed,
        "accepts": exhibit.accepts,
        "facts": _facts(run),
    }


def _missing(exhibit: Exhibit, ask: Ask) -> str:
    """What a question needs that is not there."""
    if ask in ("network", "removed") and exhibit.model is None:
        return f"It needs the model: {NEEDS_MODEL}."
    layers = exhibit.run.layers
    if ask == "keys" and layers and not keeps_inputs(exhibit.run, layers[-1]):
        return (
            f"It compares inputs, and the run has not kept those of `{shorten(layers[-1], 40)}`: "
            "record with `keep='rows'`, `'half'` or `'int8'`."
        )
    return ""


def grid(stream: Stream) -> tuple[int, int] | None:
    """Height and width of a layer's patches, where they lie in a plane."""
    if not stream.layout or len(stream.values) != 3:
        return None
    _, height, width = stream.values
    return height, width


def members_of(run: Run, column: str) -> dict[Any, NDArray[np.int64]]:
    """The places of the samples of each value of a column; None for those without one."""
    known, found = run.samples.columns[column], dict[Any, list[int]]()
    for at, name in enumerate(run.source.ids):
        found.setdefault(plain_label(known.get(name)), []).append(at)
    order = sorted(found, key=lambda value: (value is None, str(type(value)), value or 0))
    return {value: np.array(found[value]) for value in order}


def _facts(run: Run) -> dict[str, str]:
    """What was recorded, and how; nothing that tells of the machine."""
    metadata = run.info.metadata
    settings = metadata.get("settings", [])
    groups = [_listed(group) for group in settings] if isinstance(settings, list) else []
    return {
        "Optimizer": shorten(metadata.get("optimizer", "unknown"), LONGEST_NAME),
        "Settings at the start": "; ".join(dict.fromkeys(groups)) or "unknown",
        "Steps": f"{run.steps:,}",
        "Samples": f"{len(run.ids):,}",
        "Recorded": f"{run.nbytes / 1e6:,.1f} MB",
        "Versions": _listed(metadata.get("versions")) or "unknown",
        "Created": shorten(moment(metadata.get("created", "unknown")), LONGEST_NAME),
    }


def _listed(pairs: Any) -> str:
    """Names and values in one line; switches that are off are left out."""
    if not isinstance(pairs, Mapping):
        return ""
    shown = {n: value for n, value in pairs.items() if value is not None and value is not False}
    return ", ".join(f"{shorten(n, 30)} {shorten(v, 30)}" for n, v in shown.items())
