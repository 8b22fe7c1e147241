"""What a report carries: the second part of the contract; see contract.py."""

from __future__ import annotations

from typing import TypedDict

from dualform.explore.attention_contract import AttentionView
from dualform.explore.contract import (
    AnswerView,
    BooksView,
    Id,
    Label,
    LayersView,
    PreviewCard,
    QueryCard,
    RunView,
    SampleView,
)


class CarriedAnswer(AnswerView):
    """An answer, and what further answers are made of."""

    cells: str | None
    """(samples, bins) in the order of the ids: base64 of little-endian float32."""


class ReportData(TypedDict):
    """What a report carries, as JSON in <script id="carried">"""

    run: RunView
    books: BooksView
    attention: AttentionView | None
    ids: list[Id]
    suspicion: str
    """Of every sample, in the order of the ids: base64 of little-endian float32."""
    columns: dict[str, list[Label | None]]
    previews: dict[str, PreviewCard]
    queries: list[QueryCard]
    answers: dict[str, CarriedAnswer]
    """By `query|ask|layer|output`."""
    layers: dict[str, LayersView]
    """By `query|output`."""
    samples: dict[str, SampleView]
