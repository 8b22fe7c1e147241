"""Layers of families: equal to what they generalize, and descending what they should."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from dualform.errors import FamilyError
from dualform.families import (
    Empirical,
    Gaussian,
    Hypercube,
    Interval,
    LogNormalizer,
    Sphere,
    reference,
)
from dualform.families.layers import (
    Attention,
    Block,
    Boltzmann,
    Conditional,
    ConditionalRandomField,
    EnergyAttention,
    Field,
    Hopfield,
    InfoNCE,
    annealed,
    attend,
    capacity,
    contrastive_divergence,
)
from dualform.families.layers.annealing import _partition
from dualform.families.layers.attention import by_head

law = settings(deadline=None, max_examples=8)
seeds = st.integers(0, 2**31)
F64 = torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- attention --------------------------------------------------------------------------------


@given(seed=seeds, masked=st.sampled_from([None, (6,), (4, 6), (2, 1, 6)]))
@law
def test_attention_is_the_mean_of_the_family_in_values_and_gradients(
    seed: int, masked: tuple[int, ...] | None
) -> None:
    mask = None if masked is None else randn(*masked, seed=seed + 9) > -0.5

    def mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return LogNormalizer(Empirical(k, mask=mask), math.sqrt(3)).mean(q, v)

    results = []
    for layer in (partial(attend, mask=mask), mean):
        q, k, v = (randn(2, n, 3, seed=seed + n).requires_grad_() for n in (4, 6, 6))
        read = layer(q, k, v)
        results.append((read.detach(), *torch.autograd.grad((read * read).sum(), (q, k, v))))
    for fused, composed in zip(*results, strict=True):
        near(fused, composed)


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_sparse_attention_equals_the_reference(alpha: float) -> None:
    q, k, v = randn(4, 3), randn(6, 3, seed=1), randn(6, 2, seed=2)
    scores = 3 * q @ k.T
    p = torch.tensor([reference.entmax(row.tolist(), alpha) for row in scores], dtype=F64)
    near(attend(q, k, v, temperature=1 / 3, alpha=alpha), p @ v)
    assert gradcheck(lambda q: attend(q, k, v, alpha=alpha), q.requires_grad_())


def test_attention_equals_torchs_multihead_attention() -> None:
    ours = Attention(8, 2).double()
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    maps = (ours.W_Q, ours.W_K, ours.W_V)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([m.weight for m in maps]))
        theirs.in_proj_bias.copy_(torch.cat([m.bias for m in maps]))
    theirs.out_proj = ours.W_O  # type: ignore[assignment]
    x, c = randn(3, 5, 8), randn(3, 7, 8, seed=1)
    near(ours(x, c).detach(), theirs(x, c, c)[0].detach())


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_masked_attention_does_not_look_ahead(alpha: float) -> None:
    layer, x = Attention(8, 2, alpha=alpha).double().requires_grad_(False), randn(1, 6, 8)
    changed = x.clone()
    changed[:, 4:] += 1
    past = torch.ones(6, 6, dtype=torch.bool).tril()
    near(layer(x, mask=past)[:, :4], layer(changed, mask=past)[:, :4])
    assert not torch.allclose(layer(x)[:, :4], layer(changed)[:, :4])


def test_block_trains() -> None:
    torch.manual_seed(0)
    block, x = Block(8, 2, alpha=1.5), torch.randn(4, 5, 8)
    before = block(x).square().mean()
    optimizer = torch.optim.Adam(block.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = block(x).square().mean()
        loss.backward()
        optimizer.step()
    assert loss < before


# --- energies ---------------------------------------------------------------------------------


@given(seed=seeds, scale=st.sampled_from([0.1, 1.0, 20.0]), T=st.sampled_from([0.05, 1.0]))
@law
def test_energy_attention_never_raises_its_energy(seed: int, scale: float, T: float) -> None:
    torch.manual_seed(seed)
    layer = EnergyAttention(6, 2, steps=6, temperature=T).double()
    energies = layer.descend(scale * randn(3, 4, 6, seed=seed)).energies
    assert (energies.diff(dim=0) <= 0).all()
    assert energies.isfinite().all()


def test_energy_is_the_sum_over_heads_and_tokens() -> None:
    layer, x = EnergyAttention(4, 2, temperature=0.5).double().requires_grad_(False), randn(3, 4)
    keys = x * (4 / (x.square().sum(-1, keepdim=True) + 1e-6)).sqrt()  # 1e-6 keeps ‖x‖ from 0
    q, k = (by_head(W(y), 2) for W, y in ((layer.W_Q, x), (layer.W_K, keys)))
    expected = x.square().sum() / 2
    for head, token in itertools.product(range(2), range(3)):
        scores = [float(q[head, token] @ k[head, j]) / 0.5 for j in range(3)]
        expected = expected - 0.5 * math.log(sum(map(math.exp, scores)))
    near(layer.energy(x), expected)


def test_energy_attention_trains_through_its_steps() -> None:
    torch.manual_seed(0)
    layer = EnergyAttention(4, 1, steps=2).double()
    x = randn(2, 3, 4).requires_grad_()
    weight = layer.W_Q.weight
    (analytic,) = torch.autograd.grad(layer(x).sin().sum(), weight)
    step = 1e-6
    with torch.no_grad():
        weight[0, 1] += step
        up = layer(x).sin().sum()
        weight[0, 1] -= 2 * step
        down = layer(x).sin().sum()
    assert analytic[0, 1].item() == pytest.approx(float((up - down) / (2 * step)), rel=1e-5)


@given(seed=seeds, T=st.sampled_from([0.02, 0.3, 2.0]), n=st.integers(1, 8))
@law
def test_hopfield_energy_never_rises(seed: int, T: float, n: int) -> None:
    network = Hopfield(randn(n, 4, seed=seed), temperature=T)
    found = network.retrieve(3 * randn(6, 4, seed=seed + 1), tolerance=1e-9)
    slack = 1e-13 * (1 + found.energies.abs().max())
    assert (found.energies.diff(dim=0) <= slack).all()
    assert len(found.energies) == found.steps + 1


def test_hopfield_retrieves_what_is_well_separated() -> None:
    patterns = torch.eye(8, dtype=F64)
    network = Hopfield(patterns[:5], temperature=0.05).store(patterns[5:])
    assert len(network) == 8
    near(network.separation(), torch.ones(8, dtype=F64))
    noisy = patterns + 0.1 * randn(8, 8)
    near(network.retrieve(noisy).states, patterns, 1e-6)
    near(network.memory.read(noisy), Hopfield(patterns).G.mean(noisy))


def test_separation_is_the_least_over_all_others() -> None:
    x = randn(5, 3)
    expected = [
        float(x[i] @ x[i]) - max(float(x[i] @ x[j]) for j in range(5) if j != i) for i in range(5)
    ]
    near(Hopfield(x).separation(), torch.tensor(expected, dtype=F64))


def test_a_state_between_two_patterns_is_neither() -> None:
    """So hot a network retrieves the mean of both, half way from each."""
    assert capacity(8, [2], temperature=1e4, noise=0.0).rates == (0.0,)


def test_capacity_falls_as_patterns_crowd() -> None:
    generator = torch.Generator().manual_seed(0)
    measured = capacity(
        10, [4, 64, 4096], temperature=0.1, noise=0.3, queries=128, generator=generator
    )
    assert measured.rates[0] == 1
    assert measured.rates[0] >= measured.rates[1] > measured.rates[2]
    assert all(0 <= error < 0.1 for error in measured.errors)


# --- fields -----------------------------------------------------------------------------------


def corners(width: int) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=width)), dtype=F64)


def machine(seed: int = 0, scale: float = 1.0) -> Boltzmann:
    torch.manual_seed(seed)
    made = Boltzmann(Hypercube(4), Hypercube(3), scale=scale).double()
    for bias in (made.b, made.c):
        torch.nn.init.normal_(bias)
    return made


def log_joint(made: Boltzmann) -> Tensor:
    """log of the unnormalized p(v, h), corner by corner."""
    v, h = corners(4), corners(3)
    field = made.field()
    return (v @ field.b)[:, None] + (h @ field.c) + v @ field.W @ h.T


def test_free_energy_sums_over_the_hidden_corners() -> None:
    made = machine()
    near(made.field().free_energy(corners(4)), -log_joint(made).logsumexp(-1))
    p_h = log_joint(made).softmax(-1)
    near(made(corners(4)), p_h @ corners(3))


def test_gibbs_leaves_the_joint_distribution_as_it_is() -> None:
    made, generator = machine(), torch.Generator().manual_seed(0)
    p = log_joint(made).logsumexp(-1).detach().softmax(-1)
    v = corners(4)[torch.multinomial(p, 40_000, True, generator=generator)]
    after = made.field().gibbs(v, 3, generator)
    error = (p @ corners(4) * (1 - p @ corners(4)) / 40_000).sqrt()
    assert ((after.mean(0) - p @ corners(4)).abs() <= 5 * error).all()


def test_gradient_of_contrastive_divergence_is_that_of_the_likelihood_in_equilibrium() -> None:
    """With every corner as a chain, weighed by its probability, CD is maximum likelihood."""
    made, data = machine(), corners(4)[[3, 5, 6]]
    field = made.field()
    p = (-field.free_energy(corners(4))).softmax(-1).detach()
    likelihood = (-field.free_energy(data)).mean() - log_joint(made).logsumexp((0, 1))
    surrogate = field.free_energy(data).mean() - p @ field.free_energy(corners(4))
    for a, b in zip(
        torch.autograd.grad(likelihood, made.parameters(), retain_graph=True),
        torch.autograd.grad(surrogate, made.parameters()),
        strict=True,
    ):
        near(a, -b)


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_annealing_finds_the_partition_function(scale: float) -> None:
    made = machine(scale=scale)
    exact = log_joint(made).logsumexp((0, 1)).item()
    generator = torch.Generator().manual_seed(0)
    estimate = annealed(made.field(), chains=400, temperatures=200, generator=generator)
    assert estimate.low <= exact <= estimate.high
    assert estimate.high - estimate.low < 0.2


def test_the_range_of_a_partition_function_is_three_standard_errors_of_it() -> None:
    weights = torch.tensor([1.0, 2.0, 1.5, 1.5, 2.0], dtype=F64)
    found = _partition(weights.log())
    error = 3 * float(weights.std()) / math.sqrt(5)
    bounds = [math.exp(x) for x in (found.low, found.value, found.high)]
    assert bounds == pytest.approx([1.6 - error, 1.6, 1.6 + error])


def digits(count: int) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x[:count] > 7).float(), torch.tensor(y[:count])


@pytest.mark.parametrize("persistent", [False, True])
def test_machines_learn_digits(persistent: bool) -> None:
    """The likelihood, by annealing, rises above that of independent pixels."""
    torch.manual_seed(0)
    x, _ = digits(500)
    mean = x.mean(0).clamp(0.02, 0.98)
    independent = float((x @ mean.log() + (1 - x) @ (1 - mean).log()).mean())
    made = Boltzmann(Hypercube(64), Hypercube(32))
    with torch.no_grad():
        made.b.copy_(mean.logit())
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    chains = x[:50]
    for ids in (torch.randperm(500)[:50] for _ in range(400)):
        start = chains if persistent else x[ids]
        loss, chains = contrastive_divergence(made.field(), x[ids], start, steps=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    Z = annealed(made.field(), chains=64, temperatures=300)
    assert -made.field().free_energy(x).mean().item() - Z.high > independent + 3


@pytest.mark.parametrize("persistent", [False, True])
def test_conditional_random_fields_classify_digits(persistent: bool) -> None:
    torch.manual_seed(0)
    x, y = digits(800)
    train, targets = x[:600], F.one_hot(y[:600], 10).float()
    field = ConditionalRandomField(64, Empirical(torch.eye(10)), Hypercube(16))
    optimizer = torch.optim.Adam(field.parameters(), lr=0.02)
    chains = targets.clone()
    for ids in (torch.randperm(600)[:100] for _ in range(150)):
        start = chains[ids] if persistent else targets[ids]
        loss, chains[ids] = contrastive_divergence(field.field(train[ids]), targets[ids], start, 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = (field(x[600:]).argmax(-1) == y[600:]).float().mean()
    assert right > 0.85


def test_conditional_probabilities_sum_over_the_hidden_corners() -> None:
    torch.manual_seed(0)
    field = ConditionalRandomField(5, Empirical(torch.eye(3, dtype=F64)), Hypercube(2)).double()
    x, h = randn(4, 5), corners(2)
    b, c = field.b(x), field.c(x)
    joint = b[:, :, None] + (c @ h.T)[:, None] + field.W @ h.T
    near(field(x), joint.logsumexp(-1).softmax(-1))


def test_a_conditional_layer_is_a_sigmoid_or_a_softmax_layer() -> None:
    x = randn(4, 5)
    bits = Conditional(5, Hypercube(3)).double()
    near(bits(x), bits.natural(x).sigmoid())
    y = (randn(4, 3) > 0).double()
    expected = F.binary_cross_entropy_with_logits(bits.natural(x), y, reduction="none").sum(-1)
    near(bits.loss(x, y), expected)
    classes = Conditional(5, Empirical(torch.eye(3, dtype=F64))).double()
    near(classes(x), classes.natural(x).softmax(-1))
    target = torch.tensor([0, 2, 1, 1])
    near(
        classes.loss(x, F.one_hot(target, 3).double()),
        F.cross_entropy(classes.natural(x), target, reduction="none"),
    )


def test_gaussian_visible_units() -> None:
    """Real data: F(v) has the Gaussian's own term, and v given h is Gaussian around b + Wh."""
    made = Boltzmann(Gaussian(torch.zeros(2)), Hypercube(3), scale=1.0)
    v = torch.randn(5, 2)
    shape = made.c + v @ made.W
    expected = v.square().sum(-1) / 2 - (made.b * v).sum(-1) - F.softplus(shape).sum(-1)
    difference = made.field().free_energy(v) - expected
    torch.testing.assert_close(difference, difference[:1].expand(5))


def test_gray_pixels_are_learned_as_numbers_or_drawn_as_bits() -> None:
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    gray = torch.tensor(load_digits(return_X_y=True)[0][:300] / 16).float()
    bits, box = Hypercube(64), Interval(torch.zeros(64), torch.ones(64))
    with pytest.raises(FamilyError, match=r"^data has 300 of 300 rows that are no points of Hyper"):
        contrastive_divergence(Boltzmann(bits, Hypercube(8)).field(), gray, start=gray)
    chains = torch.bernoulli(gray)
    for visible, data in ((bits, chains), (box, gray)):
        made = Boltzmann(visible, Hypercube(8))
        optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
        before = float(made.field().free_energy(data).detach().mean())
        for _ in range(30):
            optimizer.zero_grad()
            loss, _ = contrastive_divergence(made.field(), data, start=data)
            loss.backward()
            optimizer.step()
        assert loss.isfinite()
        assert float(made.field().free_energy(data).detach().mean()) < before
        drawn = visible.sample(made.field().given_hidden(torch.zeros(8)).detach())
        assert (visible.log_base(drawn) == 0).all()


# --- contrasts --------------------------------------------------------------------------------


@given(seed=seeds, T=st.sampled_from([0.07, 1.0]))
@law
def test_infonce_is_cross_entropy_of_cosines(seed: int, T: float) -> None:
    q, k = randn(5, 3, seed=seed), randn(8, 3, seed=seed + 1)
    cosines = F.cosine_similarity(q[:, None], k[None], dim=-1)
    expected = F.cross_entropy(cosines / T, torch.arange(5), reduction="none")
    near(InfoNCE(T)(q, k), expected, 1e-8)


def test_infonce_tends_to_von_mises_fisher() -> None:
    q = randn(4, 6)
    errors = []
    for count in (100, 10_000):
        k = randn(count, 6, seed=count)
        gap = InfoNCE(0.4)(q, k) - InfoNCE(0.4).limit(q, k[:4], count)
        errors.append(float(gap.abs().max()))
    assert errors[1] < errors[0] / 3
    assert errors[1] < 0.1
    G = Sphere(6).log_normalizer(F.normalize(q, dim=-1) / 0.4)
    near(
        InfoNCE(0.4).limit(q, q, 1) + 1 / 0.4,
        G,
    )


# --- words ------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "heads": (
        lambda: Attention(10, 3),
        "width=10 cannot be divided among heads=3; choose a divisor.",
    ),
    "temperature": (
        lambda: attend(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), temperature=-1.0),
        "temperature=-1.0 is not a positive, finite number; ",
    ),
    "energy heads": (
        lambda: EnergyAttention(10, 0),
        "width=10 cannot be divided among heads=0; choose a divisor.",
    ),
    "listing": (
        lambda: ConditionalRandomField(2, Hypercube(2), Hypercube(2))(torch.ones(1, 2)),
        "p(y | x) can be listed over points only, and Hypercube(2) has none; use field(x).gibbs "
        "to draw from it, or Empirical(points).",
    ),
    "field": (
        lambda: Field(Hypercube(2), Hypercube(3), *(torch.ones(n) for n in ((3, 2), 2, 3))),
        "W of shape (3, 2), b of (2,) and c of (3,) do not join Hypercube(2) and Hypercube(3); "
        "give W (2, 3), b (…, 2), c (…, 3).",
    ),
    "chains": (
        lambda: annealed(machine().field(), chains=1),
        "chains=1 and temperatures=2000 give no estimate with a range; give 2 chains or more, and "
        "1 temperature or more.",
    ),
    "patterns": (
        lambda: Hopfield(torch.eye(3)).store(torch.ones(1, 2)),
        "patterns of shape (1, 2) has 2 columns, but this family has 3; ",
    ),
    "keys of queries": (
        lambda: InfoNCE()(torch.ones(4, 2), torch.ones(1, 2)),
        "4 queries have 1 keys; give each its own, in the same order, and negatives after them.",
    ),
    "contrast": (lambda: InfoNCE(0.0), "temperature=0.0 is not a positive, finite number; "),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    act, message = WRONG[case]
    with pytest.raises(FamilyError) as caught:
        act()
    assert str(caught.value).startswith(message)
