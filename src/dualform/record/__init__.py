"""Watching a training loop and booking what it does to every parameter."""

from dualform.record.entry import describe, record
from dualform.record.recorder import Recorder

__all__ = ["Recorder", "describe", "record"]
