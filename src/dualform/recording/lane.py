"""The writer's work on an accelerator, beside training's instead of in its way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Lane:
    """A stream of the writer's own where parameters lie on a GPU; on a CPU it does nothing."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        device = next((p.device for p in parameters if p.is_cuda), None)
        self._stream: torch.cuda.Stream | None = None
        if device is not None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        return self._stream is not None

    def mark(self) -> torch.cuda.Event | None:
        """Now, in training's stream: what is handed over is computed when it is reached."""
        if self._stream is None:
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self._stream.device).record_event()
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Works in the lane, after the mark; when it ends, all of it is done."""
        if self._stream is None or mark is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            self._stream.synchronize()
