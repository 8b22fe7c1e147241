"""The fused kernels against the plain layers, run by Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

STATISTICS = """
from dualform.attention import kernels_statistics
from dualform.attention.kernels_statistics import rewrite

kernels_statistics.ROWS = 256

shapes = ((2, 3, 50, 70, 8), (1, 1, 300, 600, 16), (1, 1, 5, 700, 24), (1, 1, 300, 600, 64))
for B, H, L, S, D in shapes:
    q, k, v = make(B, H, L, D), make(B, H, S, D) + 3, make(B, H, S, D)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # as projections leave it
    def fused(q, k, v):
        return attention.softmax(*rewrite(q, k, 0.7, 1e-5), v)
    def plain(q, k, v):
        return attention.softmax(statistics(q, k).rewrite(q, 0.7, 1e-5), k, v)
    check(fused, plain, q, k, v)
"""
PREFIXES = """
from dualform.attention.kernels_prefixes import rewrite_causal

for B, H, N, D in ((2, 3, 70, 8), (1, 2, 600, 16), (1, 1, 700, 24), (1, 1, 1, 8)):
    q, k, v = make(B, H, N, D), make(B, H, N, D) + 3, make(B, H, N, D)
    def fused(q, k, v):
        return attention.softmax(*rewrite_causal(q, k, 0.7, 1e-1), v, is_causal=True)
    def plain(q, k, v):
        rewritten = statistics(q, k, is_causal=True).rewrite(q, 0.7, 1e-1)
        return attention.softmax(rewritten, k, v, is_causal=True)
    check(fused, plain, q, k, v)
    later = k.detach().clone()
    later[:, :, N // 2 :] = 9
    pair = [rewrite_causal(q, keys, 1.0, 1e-5)[0][:, :, : N // 2] for keys in (k, later)]
    assert torch.equal(*pair)
"""
POOL = """
from dualform.attention.kernels_pool import _Pool, layouts_of, scaled_heads_attention

factors = (1, 2, 4, 8)
for B, H, S, D in ((2, 4, 70, 8), (1, 8, 64, 16)):
    q, k, v = make(B, H, 50, D), make(B, H, S, D), make(B, H, S, D)
    layout, _ = layouts_of((B, H, 50), S, factors, k.device)
    def packed(k, v):
        return torch.cat(_Pool.apply(k, v, layout, True), -1)
    def plain(k, v):
        heads = [(k[b, h], v[b, h], factors[h * 4 // H]) for b in range(B) for h in range(H)]
        return torch.cat([torch.cat(shorten(*head)[:2], -1) for head in heads])
    check(packed, plain, k, v)
    lengths = [len(shorten(k[0, 0], v[0, 0], factors[h * 4 // H]).k) for h in range(H)] * B
    assert layout.keys.diff().tolist() == lengths and layout.queries.diff().tolist() == [50] * B * H
    for route in ("in turn", "parallel"):
        def fused(q, k, v):
            return scaled_heads_attention(q, k, v, factors, None, route)
        check(fused, attention.scaled_heads, q, k, v)

def parallel(q, k, v, factors=(3, 1)):
    return scaled_heads_attention(q, k, v, factors, None, "parallel")
check(parallel, lambda *given: attention.scaled_heads(*given, factors=(3, 1)), q, k, v)
assert torch.equal(parallel(q, k, v, (1,)), attention.softmax(q, k, v))
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
loss = parallel(*leaves).square().sum()
once, again = (torch.autograd.grad(loss, leaves, retain_graph=kept) for kept in (True, False))
assert all(map(torch.equal, once, again))
try:
    torch.autograd.grad(loss, leaves)
except RuntimeError as error:
    assert "second time" in str(error)
else:
    raise AssertionError("what a call keeps outlives its backward pass")
"""
LINEAR = """
from dualform.attention import kernels_linear
from dualform.attention.kernels_linear import linear_attention

kernels_linear.PROGRAMS = 8
for B, H, N, D, M in ((2, 3, 70, 8, 16), (1, 2, 600, 16, 24), (1, 1, 2, 24, 8)):
    q, k, v = make(B, H, N, D), make(B, H, N, D), make(B, H, N, M)
    for is_causal in (False, True):
        def fused(q, k, v):
            return linear_attention(q, k, v, is_causal)
        def plain(q, k, v):
            return attention.linear(q, k, v, is_causal=is_causal)
        check(fused, plain, q, k, v)
    later = k.clone()
    later[:, :, N // 2 :] = 9
    pair = [linear_attention(q, keys, v, True)[:, :, : N // 2] for keys in (k, later)]
    assert torch.equal(*pair)
"""
START = '''
import torch
from dualform import attention
from dualform.attention.batch_norm import statistics
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


SCRIPTS = {"statistics": STATISTICS, "prefixes": PREFIXES, "pool": POOL, "linear": LINEAR}
RUN_ALL = """
import json, sys
for name, script in json.load(sys.stdin).items():
    print("running", name, flush=True)
    exec(compile(script, name, "exec"), {})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")
def test_kernels_are_the_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: Triton decides how kernels run when they are loaded."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    scripts = json.dumps({name: START + script for name, script in SCRIPTS.items()})
    run = subprocess.run([sys.executable, "-c", RUN_ALL], input=scripts, text=True, check=False)
    assert run.returncode == 0  # its traceback is printed
