"""Attention layers against SDPA, forward and backward: `python -m benchmarks.attention --device
cuda`.

First the fused kernels against float64, then times in turn with SDPA. "graph" is device time (a
captured CUDA graph), "eager" includes what the host needs for the launches. Where the package
`fla` can be imported, its linear attention is measured too, which takes minutes to tune itself.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear as project
from torch.nn.functional import scaled_dot_product_attention

from dualform.attention.batch_norm import batch_norm
from dualform.attention.batch_norm import statistics as key_statistics
from dualform.attention.linear import linear
from dualform.attention.scaled_heads import scaled_heads
from dualform.attention.softmax import softmax
from dualform.memory import EluPlusOne

FACTORS = (1, 2, 4, 8)
LENGTHS = (1024, 4096, 16384)
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def layers(device: str) -> dict[str, Layer]:
    """What is measured; on CUDA also the routes that the layers choose from."""
    found: dict[str, Layer] = {
        "batch_norm": batch_norm,
        "batch_norm, plain": plain_batch_norm,
        "batch_norm, causal": partial(batch_norm, is_causal=True, eps=0.1),
        "scaled_heads": scaled_heads,
        "linear": linear,
        "linear, causal": partial(linear, is_causal=True),
    }
    if device == "cuda":
        from dualform.attention.kernels_pool import scaled_heads_attention

        route = partial(scaled_heads_attention, factors=FACTORS, scale=None)
        for name in ("packed", "in turn", "parallel"):
            found[f"scaled_heads, {name}"] = partial(route, route=name)
    return found


def published(device: str) -> dict[str, Layer]:
    """flash-linear-attention's fastest kernel, where that package can be imported."""
    if device != "cuda":
        return {}
    try:
        from fla.ops.linear_attn import fused_chunk_linear_attn
    except ImportError:
        return {}

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phi_q, phi_k = (EluPlusOne().features(x).transpose(1, 2) for x in (q, k))
        y, _ = fused_chunk_linear_attn(phi_q, phi_k, v.transpose(1, 2), scale=1.0, normalize=True)
        return y.transpose(1, 2)

    return {"linear, causal, fla": layer}


def plain_batch_norm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention-BN without fused statistics."""
    return softmax(key_statistics(q, k).rewrite(q, 1.0, 1e-5).to(q.dtype), k, v)


def tensors(B: int, H: int, N: int, D: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output; the keys' mean is not 0."""
    torch.manual_seed(0)
    x = torch.randn(4, B, H, N, D, device=device)
    x[1] += 1
    return [t.to(dtype).clone() for t in x]


def with_gradients(layer: Layer, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k, v."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    y = layer(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def check(device: str, dtype: torch.dtype) -> None:
    """Relative errors of output and gradients against float64, fused and plain."""
    print(f"\n| layer, {dtype} | shape | y | dq | dk | dv |\n|---|---|---|---|---|---|")
    exact = layers("cpu")
    for shape in ((2, 8, 256, 64), (1, 4, 4100, 64), (3, 4, 333, 128), (2, 4, 512, 40)):
        given = tensors(*shape, device, dtype)
        for name, layer in layers(device).items():
            plain = exact[", ".join(name.split(", ")[: 2 if "causal" in name else 1])]
            with sdpa_kernel(SDPBackend.MATH):
                right = with_gradients(plain, *(t.double() for t in given))
            found = with_gradients(layer, *given)
            pairs = zip(found, right, strict=True)
            errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
            print(f"| {name} | {shape} | " + " | ".join(f"{e:.1e}" for e in errors) + " |")


def far_keys(device: str, dtype: torch.dtype) -> None:
    """Errors of Attention-BN where queries and keys lie at 0 and at 100, fused and plain."""
    print(f"\n| batch_norm, {dtype} | at | y | dq | dk | dv |\n|---|---|---|---|---|---|")
    for place in (0, 100):
        for causal in (False, True):
            q, k, v, dy = tensors(2, 8, 512, 64, device, dtype)
            given = [q + place, k + place, v, dy]
            layer = partial(batch_norm, is_causal=causal, eps=0.1)
            plain = partial(layer, beta=torch.ones((), device=device))  # which no kernel takes
            with sdpa_kernel(SDPBackend.MATH):
                right = with_gradients(layer, *(t.double() for t in given))
            for name, one in (("fused", layer), ("plain", plain)):
                pairs = zip(with_gradients(one, *given), right, strict=True)
                errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
                row = " | ".join(f"{e:.1e}" for e in errors)
                print(f"| {name}{', causal' if causal else ''} | {place} | {row} |")


def masked_rows(device: str, dtype: torch.dtype) -> None:
    """Rows that see nothing read 0, and their gradients are finite."""
    given = tensors(2, 8, 64, 64, device, dtype)
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool, device=device)
    mask[0, :, 3] = False
    for layer in (softmax, batch_norm, linear):
        y, *gradients = with_gradients(partial(layer, attn_mask=mask), *given)
        fine = bool((y[0, :, 3] == 0).all()) and all(g.isfinite().all() for g in gradients)
        print(f"all-masked rows, {layer.__name__}: {'zero, no NaN' if fine else 'WRONG'}")


def captured(work: Callable[[], object], device: str) -> Callable[[], object]:
    """The same work as a CUDA graph."""
    if device != "cuda":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def milliseconds(work: Callable[[], object], repeats: int, device: str) -> float:
    """Time of one call, from `repeats` in a row."""
    if device != "cuda":
        import time

        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) * 1e3 / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def compare(subject: Callable[[], object], reference: Callable[[], object], device: str) -> str:
    """Milliseconds of the subject, and the median of ratios of neighboring turns with quartiles."""
    for work in (subject, reference):
        milliseconds(work, 2, device)
    repeats = max(1, min(20, int(30 / milliseconds(reference, 2, device))))
    turns = []
    for turn in range(11 if device == "cuda" else 3):
        order = (subject, reference) if turn % 2 else (reference, subject)
        times = {work: milliseconds(work, repeats, device) for work in order}
        turns.append((times[subject], times[reference]))
    ratios = [a / b for a, b in turns]
    low, _, high = statistics.quantiles(ratios, n=4)
    mine = statistics.median(a for a, _ in turns)
    return f"{mine:.3f} | {statistics.median(ratios):.3f} ({low:.3f}–{high:.3f})"


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """The reference."""
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def times(device: str, dtype: torch.dtype, tokens: int, heads: int, width: int) -> None:
    """Forward and backward of every layer against SDPA of torch's own choice, fla's against
    ours."""
    print(
        "\n| N | layer | ms, graph | ratio, graph | ms, eager | ratio, eager |\n" + "|---" * 6 + "|"
    )
    lengths = LENGTHS if device == "cuda" else (256, 512)
    for N in lengths:
        shape = (max(1, tokens // N), heads, N, width)
        given = tensors(*shape, device, dtype)
        subjects = {"SDPA": sdpa, **layers(device), **backends(device), **published(device)}
        for name, layer in subjects.items():
            try:
                base = partial(linear if "fla" in name else sdpa, is_causal="causal" in name)
                mine, other = (partial(with_gradients, f, *given) for f in (layer, base))
                graph = compare(captured(mine, device), captured(other, device), device)
                print(f"| {N} | {name} | {graph} | {compare(mine, other, device)} |", flush=True)
            except RuntimeError as error:
                print(f"| {N} | {name} | {str(error).splitlines()[0][:80]} | | | |", flush=True)


def exponents(device: str, dtype: torch.dtype, heads: int, width: int) -> None:
    """The power of N that time grows with at a fixed batch, from the two largest lengths."""
    lengths = (8192, 16384, 32768) if device == "cuda" else (512, 1024)
    subjects = {name: layer for name, layer in layers(device).items() if "linear" in name}
    print("\n| layer | " + " | ".join(f"ms, N = {N}" for N in lengths) + " | exponent |")
    print("|---" * (len(lengths) + 2) + "|")
    for name, layer in {"SDPA": sdpa, **subjects}.items():
        found = []
        for N in lengths:
            work = partial(with_gradients, layer, *tensors(1, heads, N, width, device, dtype))
            milliseconds(work, 2, device)
            found.append(statistics.median(milliseconds(work, 3, device) for _ in range(5)))
        exponent = math.log2(found[-1] / found[-2])
        print(f"| {name} | " + " | ".join(f"{t:.2f}" for t in found) + f" | {exponent:.2f} |")


def backends(device: str) -> dict[str, Layer]:
    """SDPA by each backend, to see which one torch chose."""
    if device != "cuda":
        return {}

    def by(backend: SDPBackend) -> Layer:
        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v)

        return layer

    chosen = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    return {f"SDPA by {backend.name}": by(backend) for backend in chosen}


def peaks(dtype: torch.dtype, tokens: int, heads: int, width: int) -> None:
    """Peak memory of projections, attention and backward pass, relative to SDPA's."""
    print("\n| N | layer | peak MB | / SDPA |\n|---|---|---|---|")
    for N in LENGTHS:
        found = {}
        for name, layer in {"SDPA": sdpa, **layers("cuda")}.items():
            found[name] = peak(layer, max(1, tokens // N), heads, N, width, dtype)
            ratio = found[name] / found["SDPA"]
            print(f"| {N} | {name} | {found[name] / 1e6:,.0f} | {ratio:.3f} |", flush=True)


def peak(layer: Layer, B: int, H: int, N: int, D: int, dtype: torch.dtype) -> int:
    """Bytes at the peak of x → q, k, v → attention → output and back."""
    torch.cuda.empty_cache()
    x = torch.randn(B, N, H * D, device="cuda", dtype=dtype, requires_grad=True)
    weights = torch.randn(4, H * D, H * D, device="cuda", dtype=dtype) / math.sqrt(H * D)
    weights.requires_grad_()
    torch.cuda.reset_peak_memory_stats()

    def head(number: int) -> Tensor:
        return project(x, weights[number]).unflatten(-1, (H, D)).transpose(1, 2)

    y = layer(head(0), head(1), head(2)).transpose(1, 2).flatten(2)
    project(y, weights[3]).sum().backward()
    return torch.cuda.max_memory_allocated()


def kernels(device: str, dtype: torch.dtype, heads: int, width: int) -> None:
    """Which kernels run, and for how long, at N = 1024."""
    from torch.profiler import ProfilerActivity, profile

    given = tensors(16, heads, 1024, width, device, dtype)
    for name, layer in {"SDPA": sdpa, **layers(device)}.items():
        if "linear" in name or "plain" in name:
            continue
        with_gradients(layer, *given)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            with_gradients(layer, *given)
            torch.cuda.synchronize()
        print(f"\n{name}")
        for event in seen.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                print(f"  {event.device_time:8.1f} µs  {event.name[:100]}")


def main() -> None:
    """Correctness, then time, then memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, help="in a batch")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    options = parser.parse_args()
    device, dtype = options.device, torch.bfloat16
    print(f"torch {torch.__version__}, {options}")
    if device == "cuda":
        print(torch.cuda.get_device_name(), "cuDNN", torch.backends.cudnn.version())
    masked_rows(device, dtype)
    far_keys(device, dtype)
    check(device, dtype)
    if device == "cuda":
        kernels(device, dtype, options.heads, options.width)
    tokens = options.tokens or (16384 if device == "cuda" else 1024)
    times(device, dtype, tokens, options.heads, options.width)
    exponents(device, dtype, options.heads, options.width)
    if device == "cuda":
        peaks(dtype, tokens, options.heads, options.width)


if __name__ == "__main__":
    main()
