"""Whether SDPA leaves room for other work on a GPU: `python -m benchmarks.streams` (needs CUDA).

Forward and backward of cuDNN's attention as one call, against the same batch cut into parts that
run on several streams. If its kernels overlapped, Attention-BN could hide its own behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.attention import captured, compare

SHAPE = (16, 16, 1024, 64)
CUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4))
"""Parts of the batch, and streams."""
Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """cuDNN's forward kernel, and what its backward kernel needs."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    saved: Saved = attend(q, k, v, None, True, 0.0, False, False)
    return saved


def backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Saved) -> Saved:
    """Gradients of q, k and v."""
    y, lse, starts_q, starts_k, most_q, most_k, seed, offset, _ = saved
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    found: Saved = attend(
        dy, q, k, v, y, lse, seed, offset, None, starts_q, starts_k, most_q, most_k, 0.0, False
    )
    return found


def whole(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Saved:
    """One call each way."""
    return backward(dy, q, k, v, forward(q, k, v))


def cut(given: Sequence[Tensor], parts: int, count: int) -> list[Saved]:
    """The same in parts, in turn on each stream; backward begins when forward has ended."""
    pieces = list(zip(*(t.chunk(parts) for t in given), strict=True))
    streams = [torch.cuda.Stream() for _ in range(count)]
    saved = _on(streams, [partial(forward, *piece[:3]) for piece in pieces])
    calls = [partial(backward, p[3], *p[:3], s) for p, s in zip(pieces, saved, strict=True)]
    return _on(streams, calls)


def _on(streams: Sequence[torch.cuda.Stream], calls: Sequence[Callable[[], Saved]]) -> list[Saved]:
    """Makes the calls, in turn on each stream, after all that came before."""
    current, found = torch.cuda.current_stream(), []
    for stream in streams:
        stream.wait_stream(current)
    for at, call in enumerate(calls):
        with torch.cuda.stream(streams[at % len(streams)]):
            found.append(call())
    for stream in streams:
        current.wait_stream(stream)
    return found


def main() -> None:
    torch.manual_seed(0)
    given = torch.randn(4, *SHAPE, device="cuda", dtype=torch.bfloat16).unbind()
    reference = captured(lambda: whole(*given), "cuda")
    for parts, count in CUTS:
        subject = captured(partial(cut, given, parts, count), "cuda")
        print(f"{parts} parts, {count} streams: ms, ratio {compare(subject, reference, 'cuda')}")


if __name__ == "__main__":
    main()
