"""Hypernetwork attention, forward and backward: `python -m benchmarks.hyper --device cuda`.

`attention.hyper` against the plain formula, which holds the values of all pairs (N × N × width
numbers a sample), and against softmax attention on torch's fused kernels. All of them take turns,
and a ratio is that of times in the same turn. "peak" is GPU memory beyond the inputs; "held" is
what the forward pass keeps for the backward pass. First come errors against float64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.attention import Layer, milliseconds, sdpa, tensors, with_gradients
from dualform.attention.hyper import EPS, hyper

LENGTHS = {"cuda": (1024, 4096), "cpu": (256, 512)}
TOKENS = {"cuda": 16384, "cpu": 1024}
TURNS = 11
SECONDS = 10.0
"""No turn begins after so long at one length, except for the first three."""
LEAST_MS = 10.0
"""A layer is called several times a turn, until it has taken about so long."""
MOST_CALLS = 20


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Σ_k a_hqk ReLU(Σ_g a_gqk v_gk), with the values of all pairs at once."""
    a = (q @ k.mT * q.shape[-1] ** -0.5).float()
    a = (a * torch.rsqrt(a.square().mean(-3, keepdim=True) + EPS)).to(q.dtype)
    values = torch.einsum("...hqk,...hkm->...qkm", a, v).relu()
    return torch.einsum("...hqk,...qkm->...hqm", a, values)


def plain_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention, with its weights held as HYLA holds its scores."""
    return torch.softmax((q @ k.mT * q.shape[-1] ** -0.5).float(), -1).to(v.dtype) @ v


LAYERS: dict[str, Layer] = {
    "hyper": hyper,
    "hyper, causal": partial(hyper, is_causal=True),
    "hyper, linear": partial(hyper, activation="linear"),
    "hyper, softmax scores": partial(hyper, scores="softmax"),
    "plain": plain,
    "softmax, plain": plain_softmax,
    "SDPA": sdpa,
}
REFERENCES = ("plain", "SDPA")


def check(device: str, dtype: torch.dtype) -> None:
    """Relative errors of output and gradients against the plain formula in float64."""
    print(f"\n| layer, {dtype} | shape | y | dq | dk | dv |\n|---|---|---|---|---|---|")
    for shape in ((2, 8, 256, 64), (1, 4, 333, 40)):
        given = tensors(*shape, device, dtype)
        right = with_gradients(plain, *(x.double() for x in given))
        for name in ("hyper", "plain"):
            pairs = zip(with_gradients(LAYERS[name], *given), right, strict=True)
            errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
            print(f"| {name} | {shape} | " + " | ".join(f"{e:.1e}" for e in errors) + " |")


def held(layer: Layer, given: list[Tensor]) -> int:
    """Bytes that the forward pass keeps for the backward pass, beyond q, k and v themselves."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    own = {x.untyped_storage().data_ptr() for x in leaves}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = layer(*leaves)
    assert y.requires_grad
    return sum(storage.nbytes() for at, storage in kept.items() if at not in own)


def peak(layer: Layer, given: list[Tensor]) -> int:
    """Bytes at the peak of forward and backward pass, beyond what it is given; of a GPU."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with_gradients(layer, *given)
    return torch.cuda.max_memory_allocated() - before


def fitting(given: list[Tensor]) -> dict[str, Layer]:
    """The layers whose forward and backward pass fit into memory."""
    found = {}
    for name, layer in LAYERS.items():
        try:
            with_gradients(layer, *given)
            found[name] = layer
        except torch.OutOfMemoryError as error:
            print(f"{name} does not fit: {str(error).splitlines()[0]}")
    return found


def in_turn(works: Mapping[str, Callable[[], object]], device: str) -> dict[str, list[float]]:
    """Milliseconds of a call in each turn; every second turn goes backward through the layers."""
    first = {name: milliseconds(work, 1, device) for name, work in works.items()}
    calls = {n: max(1, min(MOST_CALLS, int(LEAST_MS / ms))) for n, ms in first.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    began = time.perf_counter()
    for turn in range(TURNS):
        if turn >= 3 and time.perf_counter() - began > SECONDS:
            break
        for name in list(works)[:: -1 if turn % 2 else 1]:
            times[name].append(milliseconds(works[name], calls[name], device))
    return times


def ratio(mine: list[float], others: list[float] | None) -> str:
    """The median of the turns' ratios, with quartiles."""
    if others is None:
        return ""
    ratios = [a / b for a, b in zip(mine, others, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.3f} ({low:.3f}–{high:.3f})"


def measure(device: str, dtype: torch.dtype, tokens: int, heads: int, width: int) -> None:
    """One table: time, ratios and memory of every layer at every length."""
    titles = ["N", "batch", "layer", "ms", "/ plain", "/ SDPA", "peak MB", "held MB"]
    print(f"\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for N in LENGTHS[device]:
        batch = max(1, tokens // N)
        given = tensors(batch, heads, N, width, device, dtype)
        works = {n: partial(with_gradients, f, *given) for n, f in fitting(given).items()}
        times = in_turn(works, device)
        for name, mine in times.items():
            ratios = [ratio(mine, times.get(reference)) for reference in REFERENCES]
            most = f"{peak(LAYERS[name], given) / 1e6:,.0f}" if device == "cuda" else ""
            kept = f"{held(LAYERS[name], given) / 1e6:,.0f}"
            cells = (N, batch, name, f"{statistics.median(mine):.3f}", *ratios, most, kept)
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    """Correctness, then time and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=LENGTHS)
    parser.add_argument("--tokens", type=int, help="in a batch")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    options = parser.parse_args()
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    print(f"torch {torch.__version__}, {options}, {dtype}")
    if device == "cuda":
        print(torch.cuda.get_device_name())
    began = time.perf_counter()
    check(device, dtype)
    tokens = options.tokens or TOKENS[device]
    measure(device, dtype, tokens, options.heads, options.width)
    print(f"\n{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
