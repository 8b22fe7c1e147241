"""The fused kernels against the plain layers, run by Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

STATISTICS = """
from dualform.attention.kernels_statistics import rewrite

for B, H, L, S, D in ((2, 3, 50, 70, 8), (1, 2, 300, 600, 16), (1, 1, 5, 700, 24)):
    q, k, v = make(B, H, L, D), make(B, H, S, D) + 3, make(B, H, S, D)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # as projections leave it
    def fused(q, k, v):
        return attention.softmax(*rewrite(q, k, 0.7, 1e-5), v)
    check(fused, lambda q, k, v: attention.batch_norm(q, k, v, beta=0.7), q, k, v)
"""
PREFIXES = """
from dualform.attention.kernels_prefixes import rewrite_causal

for B, H, N, D in ((2, 3, 70, 8), (1, 2, 600, 16), (1, 1, 700, 24), (1, 1, 1, 8)):
    q, k, v = make(B, H, N, D), make(B, H, N, D) + 3, make(B, H, N, D)
    def fused(q, k, v):
        return attention.softmax(*rewrite_causal(q, k, 0.7, 1e-1), v, is_causal=True)
    def plain(q, k, v):
        return attention.batch_norm(q, k, v, is_causal=True, beta=0.7, eps=1e-1)
    check(fused, plain, q, k, v)
    later = k.detach().clone()
    later[:, :, N // 2 :] = 9
    pair = [rewrite_causal(q, keys, 1.0, 1e-5)[0][:, :, : N // 2] for keys in (k, later)]
    assert torch.equal(*pair)
"""
POOL = """
from dualform.attention.kernels_pool import _Pool, layout_of, scaled_heads_attention

factors = (1, 2, 4, 8)
for B, H, S, D in ((2, 4, 70, 8), (1, 8, 64, 16)):
    k, v = make(B, H, S, D), make(B, H, S, D)
    for route in ("packed", "grouped"):
        layout = layout_of(route, (B, H, 50), S, factors, k.device)
        def fused(k, v):
            return torch.cat(_Pool.apply(k, v, layout), -1)
        def plain(k, v):
            rows = k.new_empty(layout.rows, 2 * D)
            for n in range(B * H):
                b, h = divmod(n, H)
                short = shorten(k[b, h], v[b, h], factors[h * 4 // H])
                place = int(layout.places[n])
                rows[place : place + len(short.k)] = torch.cat(short[:2], -1)
            return rows
        check(fused, plain, k, v)
    packed = layout_of("packed", (B, H, 50), S, factors, k.device)
    assert torch.equal(packed.keys[:-1], packed.places) and packed.keys[-1] == layout.rows
    assert packed.queries.tolist() == list(range(0, 50 * B * H + 1, 50))
    grouped = lambda q, k, v: scaled_heads_attention(q, k, v, factors, None, "grouped")
    check(grouped, attention.scaled_heads, make(B, H, 50, D), k, v)
"""
START = '''
import torch
from dualform import attention
from dualform.attention.shorten import shorten

torch.manual_seed(0)
torch.set_num_threads(1)
make = torch.randn

def check(fused, plain, *given):
    """At most four times as far from float64 as the plain layer is in float32."""
    def read(layer, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in given]
        y = layer(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, e(y))]
    def e(y):
        return torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    reads = read(fused, torch.float32), read(plain, torch.float32), read(plain, torch.float64)
    for ours, low, exact in zip(*reads):
        assert (ours - exact).norm() <= 4 * (low - exact).norm() + 1e-6 * exact.norm()
'''


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")
@pytest.mark.parametrize(
    "script", [STATISTICS, PREFIXES, POOL], ids=["statistics", "prefixes", "pool"]
)
def test_kernels_are_the_plain_layers(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    subprocess.run([sys.executable, "-c", START + script], check=True)
