"""Watching a training loop and booking what it does to every parameter."""

from dualform.record.recorder import Recorder, record

__all__ = ["Recorder", "record"]
