"""Watching a training loop and booking what it does to every parameter."""

from dualform.ledger import run_path
from dualform.recording.front_door import describe, record
from dualform.recording.keep import summaries
from dualform.recording.recorder import Recorder

__all__ = ["Recorder", "describe", "record", "run_path", "summaries"]
