"""What the page on attention answers: a third part of the contract; see contract.py."""

from __future__ import annotations

from typing import TypedDict


class HeadCourse(TypedDict):
    """One head over training."""

    head: int
    share: list[float | None]
    """The size of what it adds, relative to what its layer gives, at each step."""
    twin: int | None
    """The head of the layer that attends most as it does, at the last step."""
    overlap: list[float | None]
    """How much its attention overlaps with that of the head most like it: 1 where alike."""


class BlockCourse(TypedDict):
    """One block over training."""

    name: str
    relative: list[float | None]
    """μ/‖X‖ after it, at each step: 0 where all tokens are one."""
    contraction: list[float | None]
    """Dobrushin's coefficient of its attention."""
    heads: list[HeadCourse]


class AttentionView(TypedDict):
    """GET attention"""

    steps: list[int]
    """Those that were looked at; the last is the one that is read."""
    queries: int
    """On how many queries the model was called."""
    findings: list[str]
    blocks: list[BlockCourse]
