"""The way from main memory to a GPU: copies that are under way while it computes."""

from __future__ import annotations

import torch
from torch import Tensor


def bus_to(device: torch.device) -> Bus | None:
    """The way to a device; none to processors, which compute in main memory.

    >>> bus_to(torch.device("cpu"))
    """
    return Bus(device) if device.type == "cuda" else None


class Bus:
    """Copies to a GPU by a stream of its own; marks say when memory may be used again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computing = torch.cuda.current_stream(device)
        self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def main_memory(self, size: int) -> Tensor:
        """So many bytes that the GPU can read by itself."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def device_memory(self, size: int) -> Tensor:
        """So many bytes of the GPU, for what is computed."""
        with torch.cuda.stream(self._computing):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def computed(self) -> torch.cuda.Event:
        """A mark behind what was asked to be computed until now."""
        mark: torch.cuda.Event = self._computing.record_event()
        return mark

    def copy(self, source: Tensor, into: Tensor, free: torch.cuda.Event) -> torch.cuda.Event:
        """Begins a copy to the GPU, which waits for a mark; and a mark behind it."""
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copying):
            self._copying.wait_event(free)
            into.copy_(source, non_blocking=True)
            copied.record(self._copying)
        return copied

    def wait(self, copied: torch.cuda.Event) -> None:
        """What is computed from now on waits for a copy."""
        self._computing.wait_event(copied)

    def end(self) -> None:
        """Waits until all copies are done."""
        self._copying.synchronize()
