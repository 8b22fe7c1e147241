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
    check(fused, lambda q, k, v: attention.batch_norm(q, k, v, beta=0.7), q, k, v, 2e-5)
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
        check(fused, plain, k, v, 1e-6)
    assert layout_of("packed", (B, H, 50), S, factors, k.device).keys[-1] == layout.rows
    grouped = lambda q, k, v: scaled_heads_attention(q, k, v, factors, None, "grouped")
    check(grouped, attention.scaled_heads, make(B, H, 50, D), k, v, 1e-5)
"""
START = """
import torch
from dualform import attention
from dualform.attention.shorten import shorten

torch.manual_seed(0)
torch.set_num_threads(1)
make = torch.randn

def check(fused, plain, *given):
    *given, tolerance = given
    given = [x.requires_grad_() for x in given]
    wide = [x.detach().double().requires_grad_() for x in given]
    y, expected = fused(*given), plain(*wide)
    e = torch.randn_like(y)
    pairs = zip(
        (y, *torch.autograd.grad(y, given, e)),
        (expected, *torch.autograd.grad(expected, wide, e.double())),
    )
    for one, other in pairs:
        assert (one - other).norm() <= tolerance * other.norm(), (one - other).norm() / other.norm()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")
@pytest.mark.parametrize("script", [STATISTICS, POOL], ids=["statistics", "pool"])
def test_kernels_are_the_plain_layers(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    subprocess.run([sys.executable, "-c", START + script], check=True)
