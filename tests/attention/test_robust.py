"""Robust principal component attention: against loops in float64, and the pursuit it is made of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.cases import draw, near
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

from dualform import attention
from dualform.attention import clean_keys, principal_component_pursuit, reference, robust
from dualform.errors import AttentionError

law = settings(deadline=None, max_examples=10)
seeds = st.integers(0, 2**31)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"rounds": 1, "sparsity": 0.7},
    {"rounds": 4, "sparsity": 0.3, "symmetric": True},
    {"variant": "published", "sparsity": 0.4},
    {"variant": "published", "rounds": 4, "symmetric": True},
]
each = pytest.mark.parametrize("options", OPTIONS, ids=str)
WIDTH = 3


def numbers(seed: int, L: int, S: int, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return draw(seed, L, S, batch=(2, heads), D=WIDTH, M=WIDTH)


def plain(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, options: dict[str, Any]) -> Tensor:
    """(batch, heads, L, M) by loops; `sees` (batch, S, S)."""
    heads = k.shape[1]
    own = dict(options)
    own["published_heads"] = heads if own.pop("variant", "correct") == "published" else None
    rows = [
        torch.stack(
            [reference.robust(q[b, h], k[b, h], v[b, h], sees[b], **own) for h in range(heads)]
        )
        for b in range(len(q))
    ]
    return torch.stack(rows)


# --- values -----------------------------------------------------------------------------------


@each
@law
@given(seed=seeds, n=st.integers(1, 7), causal=st.booleans(), hides=st.booleans())
def test_definition(options: dict[str, Any], seed: int, n: int, causal: bool, hides: bool) -> None:
    q, k, v = numbers(seed, n, n)
    keep = torch.ones(2, 1, 1, n, dtype=torch.bool)
    if hides:
        keep = torch.rand(keep.shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    sees = keep[:, 0].expand(2, n, n)
    sees = sees.tril() if causal else sees
    found = robust(q, k, v, keep if hides else None, is_causal=causal, **options)
    near(found, plain(q, k, v, sees, options), 1e-9)


@law
@given(seed=seeds, causal=st.booleans())
def test_without_corruption_it_is_softmax_attention(seed: int, causal: bool) -> None:
    """Without rounds, and with one in which S is 0."""
    q, k, v = numbers(seed, 6, 6)
    expected = attention.softmax(q, k, v, is_causal=causal)
    for variant in ("correct", "published"):
        assert torch.equal(robust(q, k, v, is_causal=causal, rounds=0, variant=variant), expected)
        one = robust(q, k, v, is_causal=causal, rounds=1, sparsity=1e6, variant=variant)
        assert torch.equal(one, expected)


@each
@law
@given(seed=seeds)
def test_the_order_of_tokens_does_not_matter(options: dict[str, Any], seed: int) -> None:
    q, k, v = numbers(seed, 7, 7)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    moved = robust(*(x[..., order, :] for x in (q, k, v)), **options)
    near(moved, robust(q, k, v, **options)[..., order, :], 1e-9)


@each
def test_causal_layers_never_look_ahead(options: dict[str, Any]) -> None:
    q, k, v = numbers(2, 30, 30)
    y = robust(q, k, v, is_causal=True, **options)
    for position in (1, 4, 20):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[..., position:, :] = torch.randn_like(x[..., position:, :]) * 100
        changed = robust(*later, is_causal=True, **options)[..., :position, :]
        assert torch.equal(changed, y[..., :position, :])


@each
def test_hidden_keys_do_not_matter(options: dict[str, Any]) -> None:
    q, k, v = numbers(3, 9, 9)
    keep = torch.arange(9) < torch.tensor([[[[6]]], [[[0]]]])
    other = [k.clone(), v.clone()]
    for x in other:
        x[0, :, 6:] = 50
    y = robust(q, k, v, keep, **options)
    own = slice(6 if "symmetric" in options else None)  # queries that are keys change with them
    near(robust(q, *other, keep, **options)[0][:, own], y[0][:, own])
    near(y[0, :, :6], robust(*(x[:1, :, :6] for x in (q, k, v)), **options)[0])
    assert (y[1] == 0).all()
    added = torch.zeros(keep.shape).double().masked_fill(~keep, -torch.inf)
    assert torch.equal(robust(q, k, v, added, **options), y)


@each
def test_queries_at_an_offset_are_the_last_of_all(options: dict[str, Any]) -> None:
    q, k, v = numbers(4, 12, 12)
    y = robust(q, k, v, is_causal=True, **options)
    near(robust(q[..., 7:, :], k, v, is_causal=True, offset=7, **options), y[..., 7:, :])


def test_queries_of_another_sequence_read_the_clean_keys() -> None:
    q, k, v = numbers(5, 4, 9)
    near(robust(q, k, v), attention.softmax(q, clean_keys(k, v).keys, v), 1e-14)


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_queries_share_clean_keys(causal: bool) -> None:
    q, k, v = numbers(6, 5, 5, heads=4)
    few = [x[:, ::2] for x in (k, v)]
    twice = [x.repeat_interleave(2, 1) for x in few]
    for symmetric in (False, True):
        options = {"is_causal": causal, "symmetric": symmetric}
        near(robust(q, *few, **options), robust(q, *twice, **options), 1e-13)
    by_head = torch.rand(2, 4, 1, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    near(robust(q, *few, by_head), robust(q, *twice, by_head), 1e-13)


def test_one_wrong_entry_of_a_key_is_found_and_taken_out() -> None:
    _, k, v = numbers(7, 40, 40)
    k[0, 1, 3, 2] = 500
    found = clean_keys(k, v, rounds=1, sparsity=1.0)
    assert found.sparse[0, 1].nonzero().tolist() == [[3, 2]]
    assert float(found.keys[0, 1].abs().max()) < 100
    near(found.keys + found.sparse, k)


def test_the_variants_differ_by_threshold_sign_and_width() -> None:
    """λ/μ and λμ agree where μ is 1: the second round then has the other sign alone."""
    _, k, v = (x[:, :1] for x in numbers(8, 9, 9))
    k = k / (4 * k.abs().mean((-2, -1), keepdim=True))
    ours, theirs = ({"variant": n, "sparsity": 0.3} for n in ("correct", "published"))
    near(clean_keys(k, v, rounds=1, **ours).keys, clean_keys(k, v, rounds=1, **theirs).keys)
    pair = [clean_keys(k, v, rounds=2, **x) for x in (ours, theirs)]
    near(pair[0].sparse, pair[1].sparse)
    U = (pair[0].keys - pair[1].keys) / 2
    near(pair[0].keys, k - pair[0].sparse + U)
    assert float(U.abs().max()) > 0.1
    two = [x.expand(-1, 2, -1, -1) for x in (k, v)]
    wide = clean_keys(*two, rounds=1, variant="published", sparsity=0.15).keys
    near(wide[:, :1], clean_keys(k, v, rounds=1, **theirs).keys)


# --- derivatives, types -----------------------------------------------------------------------


@each
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_to_second_order(options: dict[str, Any], causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in numbers(9, 4, 4))

    def layer(*x: Tensor) -> Tensor:
        return robust(*x, is_causal=causal, **options)

    assert gradcheck(layer, (q, k, v), fast_mode=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert gradgradcheck(layer, (q, k, v), fast_mode=True)


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_keys_do_not_overflow_in_half_precision(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Entries of 1,000 add up beyond what float16 holds."""
    q, k, v = (x.to(dtype) for x in draw(0, 64, 64, batch=(2,), D=16, M=16))
    k = k * 400
    assert float(k.double().abs().sum()) > torch.finfo(torch.float16).max
    found = robust(q, k, v, **options)
    exact = robust(*(x.double() for x in (q, k, v)), **options)
    assert found.dtype == dtype
    assert found.isfinite().all()
    near(
        clean_keys(k, v, rounds=1, variant=options.get("variant", "correct")).keys.double(),
        clean_keys(
            k.double(), v.double(), rounds=1, variant=options.get("variant", "correct")
        ).keys,
        8 * torch.finfo(dtype).eps,
    )
    assert float(found.abs().max()) <= float(v.abs().max())
    assert exact.isfinite().all()


@each
def test_half_precision_and_autocast_are_near(options: dict[str, Any]) -> None:
    q, k, v = (x.float() for x in draw(11, 16, 16, D=8, M=8))
    exact = robust(q, k, v, **options)
    with torch.autocast("cpu", torch.bfloat16):
        low = robust(q, k, v, **options)
    half = robust(*(x.bfloat16() for x in (q, k, v)), **options)
    assert low.dtype == half.dtype == torch.bfloat16
    for y in (low, half):
        assert (y - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("shape", [(5, 0), (0, 4), (0, 0)])
def test_nothing_to_read_reads_zero(shape: tuple[int, int]) -> None:
    assert torch.equal(robust(*numbers(0, *shape)), torch.zeros(2, 2, shape[0], WIDTH).double())


def test_keys_of_zeros_have_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in numbers(0, 4, 4))
    for options in OPTIONS:
        y = robust(q, k * 0, v, **options)
        found = torch.autograd.grad(y.sum(), (q, k, v), allow_unused=True)
        assert all(g is None or g.isfinite().all() for g in (y, *found))


def test_vmap() -> None:
    q, k, v = draw(10, 5, 5, batch=(3, 2), D=WIDTH, M=WIDTH)
    near(
        torch.vmap(lambda *x: robust(*x, is_causal=True))(q, k, v), robust(q, k, v, is_causal=True)
    )


# --- principal component pursuit --------------------------------------------------------------


def corrupted(seed: int, rows: int = 40, columns: int = 30, rank: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    left, right, size, where = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, rank), (rank, columns), (rows, columns), (rows, columns))
    )
    return left @ right, 10 * size * (where > 1.6)


def test_low_rank_and_sparse_parts_are_recovered() -> None:
    """With high probability, as the theorem says: of such small matrices, in nine of ten draws."""

    def is_recovered(seed: int) -> bool:
        L, S = corrupted(seed)
        found = principal_component_pursuit(L + S)
        gaps = (found.low_rank - L).norm() / L.norm(), (found.sparse - S).norm() / S.norm()
        return found.error <= 1e-7 and all(gap < 1e-5 for gap in gaps)

    assert sum(map(is_recovered, range(50))) >= 45


@law
@given(seed=st.integers(0, 1000), sparsity=st.sampled_from([0.1, 0.2, 0.4]))
def test_the_solution_is_optimal(seed: int, sparsity: float) -> None:
    """For any matrix: Y is a subgradient of λ‖S‖_1 and of ‖L‖_*."""
    K = torch.randn(12, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = principal_component_pursuit(K, sparsity, rounds=20_000, tolerance=1e-11)
    L, S, Y = found.low_rank, found.sparse, found.multipliers
    near(L + S, K, 1e-9)
    assert float(Y.abs().max()) <= sparsity + 1e-7
    near(Y[S != 0], sparsity * S[S != 0].sign(), 1e-6)
    assert float(torch.linalg.matrix_norm(Y, 2)) <= 1 + 1e-7
    near((Y * L).sum(), torch.linalg.matrix_norm(L, "nuc"), 1e-6)


def test_the_published_rounds_do_not_solve_it() -> None:
    """Whatever the unit of K is, which λμ depends on and λ/μ does not."""
    L, S = corrupted(0)
    for unit in (0.01, 0.1, 1.0, 100.0):
        errors = {}
        for variant in ("correct", "published"):
            found = principal_component_pursuit(unit * (L + S), variant=variant, rounds=200)
            errors[variant] = float((found.low_rank / unit - L).norm() / L.norm())
        assert errors["correct"] < 1e-5
        assert not errors["published"] < 0.5


def test_a_matrix_of_zeros_has_two_parts_of_zeros() -> None:
    for shape in ((3, 4), (0, 4)):
        found = principal_component_pursuit(torch.zeros(shape))
        assert (found.rounds, found.error) == (0, 0.0)
        assert torch.equal(found.low_rank + found.sparse, torch.zeros(shape))


# --- as a kind --------------------------------------------------------------------------------


@each
def test_it_is_a_kind_of_module(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = attention.MultiheadAttention(16, 4, batch_first=True, kind="robust", **options).double()
    x = torch.randn(2, 6, 16).double()
    y, weights = layer(x, x, x, average_attn_weights=False)
    q, k, v = layer.heads(x, x, x)
    assert weights is not None
    near(weights @ v, robust(q, k, v, **options), 1e-12)
    near(y, layer.out_proj(robust(q, k, v, **options).transpose(1, 2).flatten(2)), 1e-12)
    causal, _ = layer(x, x, x, is_causal=True, need_weights=False)
    cache = attention.Cache("robust", **options)
    steps = [layer(t, t, t, need_weights=False, cache=cache)[0] for t in x.split(1, 1)]
    near(torch.cat(steps, 1), causal, 1e-12)


def test_an_encoder_with_padding_learns() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    encoder = attention.replace(layer, "robust", rounds=3)
    x, padding = torch.randn(2, 6, 16), torch.arange(6) >= torch.tensor([[6], [4]])
    encoder(x, src_key_padding_mask=padding)[~padding].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())


ONE = torch.ones(1, 2, 5, 4)
WRONG = {
    "variant": (
        lambda: robust(ONE, ONE, ONE, variant="right"),
        "variant='right' is unknown; choose one of 'correct', 'published'.",
    ),
    "rounds": (
        lambda: robust(ONE, ONE, ONE, rounds=-1),
        "rounds=-1 must be a whole number from 0.",
    ),
    "half rounds": (
        lambda: robust(ONE, ONE, ONE, rounds=1.5),  # type: ignore[arg-type]
        "rounds=1.5 must be a whole number from 0.",
    ),
    "sparsity": (
        lambda: robust(ONE, ONE, ONE, sparsity=math.inf),
        "sparsity=inf must be positive and finite: the larger it is, the fewer entries are taken "
        "for corrupted.",
    ),
    "width": (
        lambda: robust(ONE, ONE, ONE[..., :3]),
        "values of shape (1, 2, 5, 3) are not as wide as keys of shape (1, 2, 5, 4); robust "
        "attention takes what keys read of the values for the keys' low-rank part, so give values "
        "of width 4.",
    ),
    "mask by query": (
        lambda: robust(ONE, ONE, ONE, torch.ones(5, 5, dtype=torch.bool).tril()),
        "attn_mask of shape (5, 5) and torch.bool cannot be used by kind='robust', which takes the "
        "keys as one matrix; give a mask (…, 1, S) that only hides keys, the same for all queries, "
        "and is_causal=True for a causal one.",
    ),
    "queries of another sequence": (
        lambda: robust(ONE[..., :3, :], ONE, ONE, symmetric=True),
        "symmetric=True takes keys for queries, but there are 3 queries and 5 keys; let tokens "
        "attend to themselves, or leave it out.",
    ),
    "queries behind the keys": (
        lambda: robust(ONE, ONE, ONE, is_causal=True, offset=2, symmetric=True),
        "symmetric=True takes keys for queries, but there are 5 queries from 2 on and 5 keys; let "
        "tokens attend to themselves, or leave it out.",
    ),
    "memory": (
        lambda: attention.memory("robust", ONE, ONE),
        "kind='robust' is not linear in its values, so that no kernel of queries and keys is it; a "
        "memory can be any other kind.",
    ),
    "extra keys": (
        lambda: attention.MultiheadAttention(16, 4, add_zero_attn=True, kind="robust"),
        "add_bias_kv and add_zero_attn add a key without a place in the sequence, which "
        "kind='robust' or shared heads cannot use; leave them out.",
    ),
    "matrices": (
        lambda: principal_component_pursuit(ONE),
        "K has shape (1, 2, 5, 4); give one matrix, (rows, columns).",
    ),
    "numbers": (
        lambda: principal_component_pursuit(ONE[0, 0] / 0),
        "K has entries that are not finite; give numbers only.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    act, message = WRONG[name]
    with pytest.raises(AttentionError) as caught:
        act()
    assert str(caught.value) == message
