"""Laws of the attention layers, each against its definition by plain loops."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.cases import CASES, Case, draw, near
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

from dualform import attention
from dualform.attention.batch_norm import statistics
from dualform.errors import AttentionError

law = settings(deadline=None, max_examples=10)
each = pytest.mark.parametrize("case", CASES, ids=str)
masked = pytest.mark.parametrize("case", [case for case in CASES if case.masks], ids=str)
seeds = st.integers(0, 2**31)
SMOOTH = [case for case in CASES if "batch_norm" not in case.name or len(case.options) > 1]
"""Without the default ε = 1e-5, which is too steep for finite differences."""


# --- values -----------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("causal", [False, True])
@law
@given(seed=seeds, L=st.integers(1, 9), S=st.integers(1, 11))
def test_definition(case: Case, causal: bool, seed: int, L: int, S: int) -> None:
    q, k, v = draw(seed, L, S, batch=(4,))
    sees = torch.ones(L, S, dtype=torch.bool)
    sees = sees.tril() if causal else sees
    expected = case.reference(q, k, v, sees, causal)
    near(case.layer(q, k, v, is_causal=causal), expected, case.digits)


@law
@given(seed=seeds, beta=st.sampled_from([0.0, 0.5, 1.0]))
def test_rewritten_queries_are_normalized_queries_and_keys(seed: int, beta: float) -> None:
    q, k, v = draw(seed, 7, 9)
    variance, mean = torch.var_mean(k, -2, correction=0, keepdim=True)
    s = (variance + 1e-5).sqrt()
    normalized = attention.softmax((q - beta * mean) / s, (k - beta * mean) / s, v)
    near(attention.batch_norm(q, k, v, beta=beta), normalized, 1e-12)


@law
@given(seed=seeds, beta=st.sampled_from([0.0, 0.5, 1.0]))
def test_centering_alone_is_a_bias_of_each_key(seed: int, beta: float) -> None:
    """(q − βμ)·k differs from q·k by −βμ·k, whatever the query is."""
    q, k, v = draw(seed, 7, 9)
    bias = -beta * (k.mean(-2, keepdim=True) * k).sum(-1)[..., None, :] / k.shape[-1] ** 0.5
    expected = attention.softmax(q, k, v, bias.expand(*q.shape[:-1], 9))
    near(attention.batch_norm(q, k, v, beta=beta, variance=False), expected, 1e-12)


@masked
@law
@given(seed=seeds, causal=st.booleans(), numbers=st.booleans())
def test_masks_leave_what_is_seen(case: Case, seed: int, causal: bool, numbers: bool) -> None:
    q, k, v = draw(seed, 6, 8, batch=(2,))
    sees = torch.rand(6, 8, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask = torch.zeros(6, 8).double().masked_fill(~sees, -torch.inf) if numbers else sees
    expected = case.reference(q, k, v, sees.tril() if causal else sees, causal)
    near(case.layer(q, k, v, mask, is_causal=causal), expected, case.digits)


@each
@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_are_not_seen_do_not_matter(case: Case, causal: bool) -> None:
    q, k, v = draw(1, 15, 15)
    keep = torch.ones(2, 1, 1, 15, dtype=torch.bool)
    keep[0, ..., 10:] = False
    other_k, other_v = k.clone(), v.clone()
    other_k[0, :, 10:] = 7
    other_v[0, :, 10:] = 7
    y = case.layer(q, k, v, keep, is_causal=causal)
    near(case.layer(q, other_k, other_v, keep, is_causal=causal), y)
    numbers = torch.zeros(keep.shape).double().masked_fill(~keep, -torch.inf)
    near(case.layer(q, k, v, numbers, is_causal=causal), y)
    if not causal and case.name != "local":
        short = case.layer(q[:1], k[:1, :, :10], v[:1, :, :10])
        near(y[:1], short)


@each
def test_causal_layers_never_look_ahead(case: Case) -> None:
    q, k, v = draw(2, 70, 70)
    y = case.layer(q, k, v, is_causal=True)
    for position in (1, 4, 30, 64):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[..., position:, :] = torch.randn_like(x[..., position:, :]) * 100
        changed = case.layer(*later, is_causal=True)[..., :position, :]
        if case.name == "entmax":  # solved for all rows at once, so the last bit may differ
            near(changed, y[..., :position, :], 1e-14)
        else:
            assert torch.equal(changed, y[..., :position, :])


@each
def test_queries_at_an_offset_are_the_last_of_all(case: Case) -> None:
    q, k, v = draw(3, 20, 20)
    y = case.layer(q, k, v, is_causal=True)
    near(case.layer(q[..., 13:, :], k, v, is_causal=True, offset=13), y[..., 13:, :])
    near(case.layer(q[..., -1:, :], k, v, is_causal=True, offset=19), y[..., -1:, :])


@masked
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_query_that_sees_nothing_reads_zero(case: Case, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype).requires_grad_() for x in draw(4, 5, 6))
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[2] = False
    y = case.layer(q, k, v, mask)
    assert (y[..., 2, :] == 0).all()
    gradients = torch.autograd.grad(y.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in (y, *gradients))


@each
def test_no_key_is_seen_by_a_padded_sample(case: Case) -> None:
    q, k, v = draw(5, 6, 6)
    keep = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    keep[1] = False
    assert (case.layer(q, k, v, keep)[1] == 0).all()
    assert (case.layer(q, k, v, keep, is_causal=True)[1] == 0).all()


@each
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_queries_share_keys(case: Case, causal: bool) -> None:
    q, k, v = draw(6, 7, 7, batch=(2, 8))
    k, v = k[:, ::2], v[:, ::2]
    y = case.layer(q, k, v, is_causal=causal)
    options = {**case.options}
    if "factors" in options:
        options["factors"] = tuple(s for s in options["factors"] for _ in range(2))
    twice = attention.kind(case.name, **options)
    near(twice(q, *(x.repeat_interleave(2, 1) for x in (k, v)), is_causal=causal), y)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_batch_norm_with_a_mask_for_each_head_of_queries(rows: int, causal: bool) -> None:
    q, k, v = draw(3, 5, 7)
    mask = torch.rand(2, 4, rows, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    twice = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
    shared = attention.batch_norm(q, k[:, :2], v[:, :2], mask, is_causal=causal)
    near(shared, attention.batch_norm(q, *twice, mask, is_causal=causal))


def test_batch_norm_without_keys_reads_nothing() -> None:
    q, k, v = draw(3, 5, 0)
    assert torch.equal(attention.batch_norm(q, k, v), torch.zeros(2, 4, 5, 2).double())


@each
def test_no_queries_read_nothing(case: Case) -> None:
    q, k, v = draw(7, 0, 6)
    assert case.layer(q, k, v).shape == (2, 4, 0, 2)


@pytest.mark.parametrize("offset", [0, 1, 6, 7, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_may_lie_anywhere_before_and_behind_the_keys(offset: int, causal: bool) -> None:
    q, k, v = draw(7, 4, 6)
    i, j = torch.arange(4)[:, None] + offset, torch.arange(6)
    sees = ((i - j).abs() <= 2) & ((j <= i) | (not causal))
    near(
        attention.local(q, k, v, is_causal=causal, window=2, offset=offset),
        attention.softmax(q, k, v, sees),
    )


def test_random_and_strided_pools_take_keys_as_they_are() -> None:
    q, k, v = draw(7, 5, 10)
    y = attention.scaled_heads(q, k, v, factors=(3,), pool="stride")
    near(y, attention.softmax(q, k[..., ::3, :], v[..., ::3, :]))
    torch.manual_seed(0)
    random = attention.scaled_heads(q, k, v, factors=(1, 10), pool="random")
    single = (random[:, 2:, :1, :, None] == v[:, 2:].mT[..., None, :, :]).all(-2)
    assert single.any(-1).all()  # one block: the value of one of its keys


@each
def test_weights_times_values_are_the_output(case: Case) -> None:
    q, k, v = draw(8, 9, 9)
    y, weights = attention.with_weights(case.layer, q, k, v, is_causal=True)
    near(weights @ v, y)
    near(y, case.layer(q, k, v, is_causal=True))
    assert torch.equal(weights, weights.tril())


# --- derivatives and transforms ---------------------------------------------------------------


@pytest.mark.parametrize("case", SMOOTH, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_to_second_order(case: Case, causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in draw(9, 6, 6, batch=(4,), D=2, M=1))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return case.layer(q, k, v, is_causal=causal)

    assert gradcheck(layer, (q, k, v), fast_mode=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert gradgradcheck(layer, (q, k, v), fast_mode=True)


@each
@pytest.mark.parametrize("causal", [False, True])
def test_vmap(case: Case, causal: bool) -> None:
    q, k, v = draw(10, 6, 6, batch=(3, 4))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return case.layer(q, k, v, is_causal=causal)

    near(torch.vmap(layer)(q, k, v), layer(q, k, v))
    gradient = torch.vmap(torch.func.grad(lambda *x: layer(*x).square().sum()))(q, k, v)
    q.requires_grad_()
    near(gradient, torch.autograd.grad(layer(q, k, v).square().sum(), q)[0])


@each
def test_autocast_is_near(case: Case) -> None:
    q, k, v = (x.float() for x in draw(11, 16, 16, D=8, M=8))
    y = case.layer(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        low = case.layer(q, k, v)
    assert low.dtype == torch.bfloat16
    assert (low - y).norm() < 0.03 * y.norm()


def test_statistics_of_far_keys_do_not_cancel() -> None:
    q, k, _ = draw(12, 30, 30)
    far = (k + 1000).float()
    for options in ({"is_causal": True}, {"is_causal": False}):
        exact = statistics(q, far.double(), **options).variance
        torch.testing.assert_close(
            statistics(q.float(), far, **options).variance.double(), exact, rtol=1e-3, atol=1e-6
        )


def test_first_causal_queries_do_not_overflow_float16() -> None:
    q, k, v = (x.half() for x in draw(14, 12, 12, D=8))
    y = attention.batch_norm(10 * q, k, v, is_causal=True, eps=1e-3)
    assert y.isfinite().all()
    torch.testing.assert_close(y[..., 0, :], v[..., 0, :])


KINDS = ["softmax", "linear", "local", "batch_norm", "scaled_heads", "batch_norm_scaled_heads"]
COMPILE = """
import sys, torch
from dualform import attention
# float64, since in float32 gradients through the variance of two near keys are rounding alone
q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 4, 16, 3, dtype=torch.float64).unbind())
for name in sys.argv[2:]:
    layer = attention.kind(name)
    torch._dynamo.reset()
    causal = lambda *x: layer(*x, is_causal=True)
    compiled = torch.compile(causal, fullgraph=True, backend=sys.argv[1])
    y, expected = compiled(q, k, v), causal(q, k, v)
    torch.testing.assert_close(y, expected)
    pair = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (y, expected)]
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        ("aot_eager", ["batch_norm"]),
        pytest.param("aot_eager", KINDS, marks=pytest.mark.long),
        pytest.param("inductor", KINDS, marks=pytest.mark.long),
    ],
)
def test_compiled_whole(backend: str, kinds: list[str]) -> None:
    """In a process of its own, where what torch itself deprecates is no error."""
    subprocess.run([sys.executable, "-c", COMPILE, backend, *kinds], check=True)


# --- ridge ------------------------------------------------------------------------------------


@law
@given(seed=seeds)
def test_ridge_solves_its_regression_and_ends_as_softmax(seed: int) -> None:
    q, k, v = draw(seed, 5, 7)
    A = (k @ k.mT / 3**0.5).softmax(-1)
    values = torch.linalg.inv(A + 0.3 * torch.eye(7).double()) @ (1.3 * v)
    near(attention.ridge(q, k, v, penalty=0.3), attention.softmax(q, k, values), 1e-8)
    near(attention.ridge(q, k, v, penalty=1e12), attention.softmax(q, k, v), 1e-8)


def test_ridge_does_not_see_masked_keys() -> None:
    q, k, v = draw(1, 5, 7)
    keep = torch.arange(7) < 4
    near(attention.ridge(q, k, v, keep), attention.ridge(q, k[..., :4, :], v[..., :4, :]))


def test_ridge_reads_back_what_it_was_told_under_any_mask_of_its_keys() -> None:
    _, k, v = draw(2, 5, 7)
    mask = torch.linspace(-1, 1, 7).double()
    mask[3] = -torch.inf
    kept = torch.arange(7) != 3
    near(attention.ridge(k, k, v, mask, penalty=1e-10)[..., kept, :], v[..., kept, :], 1e-5)


def test_ridge_with_a_mask_for_each_head_of_queries() -> None:
    q, k, v = draw(3, 5, 7)
    mask = torch.rand(2, 4, 1, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    twice = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
    near(attention.ridge(q, k[:, :2], v[:, :2], mask), attention.ridge(q, *twice, mask))


# --- errors -----------------------------------------------------------------------------------

ONE = torch.ones(1, 4, 5, 8)
WRONG = {
    "unknown kind": (
        lambda: attention.kind("sparse"),
        "kind='sparse' is unknown; choose one of softmax, linear, local, batch_norm, "
        "scaled_heads, batch_norm_scaled_heads, entmax, ridge, hyper, robust.",
    ),
    "unknown option": (
        lambda: attention.kind("local", windows=3),
        "kind='local' has no option 'windows'; it has scale, window.",
    ),
    "dimensions": (
        lambda: attention.softmax(ONE, ONE[0], ONE[0]),
        "q (1, 4, 5, 8), k (4, 5, 8), v (4, 5, 8) differ in their number of dimensions; give q as "
        "(…, heads, L, D), k as (…, heads, S, D) and v as (…, heads, S, M).",
    ),
    "width": (
        lambda: attention.batch_norm(ONE, ONE[..., :6], ONE),
        "queries of shape (1, 4, 5, 8) have width 8, but keys of shape (1, 4, 5, 6) have width 6; "
        "the last dimensions must be equal.",
    ),
    "unpaired": (
        lambda: attention.linear(ONE, ONE, ONE[:, :, :3]),
        "keys of shape (1, 4, 5, 8) and values of shape (1, 4, 3, 8) do not pair up; give values "
        "of shape (1, 4, 5, 8).",
    ),
    "batch": (
        lambda: attention.local(ONE, ONE.expand(2, 4, 5, 8), ONE.expand(2, 4, 5, 8)),
        "q (1, 4, 5, 8), k (2, 4, 5, 8), v (2, 4, 5, 8): the dimensions before the heads, (1,) "
        "and (2,), must be equal.",
    ),
    "heads": (
        lambda: attention.softmax(ONE, ONE[:, :3], ONE[:, :3]),
        "q (1, 4, 5, 8), k (1, 3, 5, 8), v (1, 3, 5, 8): 4 heads of queries cannot share 3 heads "
        "of keys; the second number must divide the first.",
    ),
    "mask": (
        lambda: attention.softmax(ONE, ONE, ONE, torch.ones(5, 4, dtype=torch.bool)),
        "attn_mask of shape (5, 4) does not fit 5 queries and 5 keys; it must broadcast to "
        "(1, 4, 5, 5).",
    ),
    "mask of integers": (
        lambda: attention.softmax(ONE, ONE, ONE, torch.ones(5, 5, dtype=torch.long)),
        "attn_mask is torch.int64; give booleans, True where a query sees a key "
        "(attn_mask.bool()), or numbers to add to the logits.",
    ),
    "factors that do not divide": (
        lambda: attention.scaled_heads(ONE, ONE, ONE, factors=(1, 2, 4)),
        "3 factors (1, 2, 4) cannot share 4 heads of keys; their number must divide the heads, "
        "each factor serving as many consecutive ones.",
    ),
    "factor 0": (
        lambda: attention.scaled_heads(ONE, ONE, ONE, factors=(0, 1)),
        "factors=(0, 1) must be whole numbers from 1, at least one.",
    ),
    "pool": (
        lambda: attention.scaled_heads(ONE, ONE, ONE, pool="max"),  # type: ignore[arg-type]
        "pool='max' is unknown; choose one of mean, stride, random.",
    ),
    "mask by query": (
        lambda: attention.scaled_heads(ONE, ONE, ONE, torch.ones(5, 5, dtype=torch.bool)),
        "attn_mask of shape (5, 5) and torch.bool cannot be used where keys are pooled, since the "
        "keys of a block have one weight; give a mask (…, 1, S) that only hides keys, the same "
        "for all queries, and is_causal=True for a causal one.",
    ),
    "numbers for pooled keys": (
        lambda: attention.scaled_heads(ONE, ONE, ONE, torch.ones(1, 5)),
        "attn_mask of shape (1, 5) and torch.float32 cannot be used where keys are pooled, since "
        "the keys of a block have one weight; give a mask (…, 1, S) that only hides keys, the "
        "same for all queries, and is_causal=True for a causal one.",
    ),
    "mask by head": (
        lambda: attention.scaled_heads(
            torch.ones(1, 8, 5, 8), ONE, ONE, torch.ones(1, 8, 1, 5, dtype=torch.bool)
        ),
        "attn_mask has 8 heads, but there are 4 heads of keys; give a mask for those, or one for "
        "all.",
    ),
    "window": (
        lambda: attention.local(ONE, ONE, ONE, window=-1),
        "window=-1 is negative; give the number of keys seen on each side.",
    ),
    "causal ridge": (
        lambda: attention.ridge(ONE, ONE, ONE, is_causal=True),
        "ridge attention solves one regression for all queries, so they must see the same keys; "
        "leave is_causal out and give an attn_mask (…, 1, S).",
    ),
    "penalty": (
        lambda: attention.ridge(ONE, ONE, ONE, penalty=0.0),
        "penalty=0.0 must be positive; as it grows, this is softmax attention.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_was_given_and_what_to_do(name: str) -> None:
    act, message = WRONG[name]
    with pytest.raises(AttentionError) as caught:
        act()
    assert str(caught.value) == message
