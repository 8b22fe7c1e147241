"""Laws of the memory, for every kernel, on hypothesis-drawn sizes and numbers."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from dualform.errors import ReadingError
from dualform.memory import (
    Cosine,
    Dot,
    EluPlusOne,
    Exponential,
    Kernel,
    Memory,
    Polynomial,
    Relu,
    reference,
)

FINITE = [
    Dot(),
    Cosine(),
    Polynomial(),
    Polynomial(degree=3, offset=0.0),
    EluPlusOne(),
    EluPlusOne(normalized=True),
    Relu(),
    Relu(normalized=True),
]
KERNELS = [*FINITE, Exponential(), Exponential(scale=2.0)]
NORMALIZED = [kernel for kernel in KERNELS if kernel.normalized]
ADDITIVE = [kernel for kernel in KERNELS if not kernel.normalized]

law = settings(deadline=None, max_examples=15)
each = pytest.mark.parametrize("kernel", KERNELS, ids=str)


@dataclass(frozen=True)
class Draw:
    """Keys, values and queries in float64; sizes shrink, numbers come from a seed."""

    n: int
    d: int
    m: int
    q: int
    seed: int

    def __call__(self, *batch: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (self.n, self.d), (self.n, self.m), (self.q, self.d)
        k, v, q = (torch.randn(*batch, *s, generator=generator).double() for s in shapes)
        return k, v, q


def size(most: int) -> st.SearchStrategy[int]:
    return st.integers(1, most)


draws = st.builds(Draw, size(6), size(4), size(3), size(3), st.integers(0, 2**31))


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def without_shape_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users run without the shape checker of our tests, which would speak before our errors do."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# --- values -----------------------------------------------------------------------------------


@each
@given(draw=draws)
@law
def test_reads_what_the_reference_reads(kernel: Kernel, draw: Draw) -> None:
    k, v, q = draw()
    memory = Memory(k, v, kernel)
    near(memory.read(q), reference.read(memory, q))


@pytest.mark.parametrize("kernel", FINITE, ids=str)
@given(draw=draws)
@law
def test_primal_equals_dual(kernel: Kernel, draw: Draw) -> None:
    k, v, q = draw(2)
    memory = Memory(k, v, kernel)
    near(memory.primal().read(q), memory.read(q))


@given(draw=draws)
@law
def test_dot_memory_is_a_linear_layer(draw: Draw) -> None:
    k, v, q = draw()
    near(Memory(k, v).read(q), q @ Memory(k, v).primal().W.T)


@given(draw=draws)
@law
def test_exponential_memory_is_softmax_attention(draw: Draw) -> None:
    k, v, q = draw(2, 3)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    near(Memory(k, v, Exponential()).read(q), expected, 1e-12)


@given(draw=draws)
@law
def test_normalized_features_are_linear_attention(draw: Draw) -> None:
    k, v, q = draw()
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    expected = (phi_q @ (phi_k.T @ v)) / (phi_q @ phi_k.sum(0))[:, None]
    near(Memory(k, v, EluPlusOne(normalized=True)).read(q), expected)


@pytest.mark.parametrize("kernel", NORMALIZED, ids=str)
@given(draw=draws)
@law
def test_normalized_scores_sum_to_one_or_nothing_answers(kernel: Kernel, draw: Draw) -> None:
    k, v, q = draw()
    total = Memory(k, v, kernel).scores(q).sum(-1)
    near(total, (total != 0).double())


@each
@given(draw=draws)
@law
def test_order_of_pairs_changes_nothing(kernel: Kernel, draw: Draw) -> None:
    k, v, q = draw()
    order = torch.randperm(draw.n, generator=torch.Generator().manual_seed(draw.seed))
    near(Memory(k[order], v[order], kernel).read(q), Memory(k, v, kernel).read(q))


# --- splitting and adding ---------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ADDITIVE, ids=str)
@given(draw=draws, cut=st.integers(0, 6))
@law
def test_reads_add_over_a_split(kernel: Kernel, draw: Draw, cut: int) -> None:
    k, v, q = draw(2)
    first = Memory(k[:, :cut], v[:, :cut], kernel)
    second = Memory(k[:, cut:], v[:, cut:], kernel)
    assert len(first + second) == len(first) + len(second) == draw.n
    near((first + second).read(q), Memory(k, v, kernel).read(q))
    near(first.read(q) + second.read(q), Memory(k, v, kernel).read(q))


@pytest.mark.parametrize("kernel", FINITE, ids=str)
@given(draw=draws, cut=st.integers(0, 6))
@law
def test_weights_and_normalizers_add_over_a_split(kernel: Kernel, draw: Draw, cut: int) -> None:
    k, v, _ = draw()
    parts = [Memory(k[:cut], v[:cut], kernel).primal(), Memory(k[cut:], v[cut:], kernel).primal()]
    whole = Memory(k, v, kernel).primal()
    near(parts[0].W + parts[1].W, whole.W)
    if whole.z is not None:
        near(sum(part.z for part in parts), whole.z)


@given(draw=draws, cut=st.integers(0, 6))
@law
def test_normalized_sum_is_the_average_weighed_by_normalizers(draw: Draw, cut: int) -> None:
    k, v, q = draw()
    parts = [Memory(x, y, Exponential(1.0)) for x, y in [(k[:cut], v[:cut]), (k[cut:], v[cut:])]]
    z = [(q @ part.keys.T).exp().sum(-1, keepdim=True) for part in parts]
    average = (z[0] * parts[0].read(q) + z[1] * parts[1].read(q)) / (z[0] + z[1])
    near((parts[0] + parts[1]).read(q), average)


@each
def test_empty_memory_reads_zero(kernel: Kernel) -> None:
    memory = Memory(torch.empty(0, 3), torch.empty(0, 2), kernel)
    assert len(memory) == 0
    assert memory.read(torch.ones(4, 3)).equal(torch.zeros(4, 2))


# --- batches ----------------------------------------------------------------------------------


@each
@given(draw=draws)
@law
def test_batch_equals_loop_and_vmap(kernel: Kernel, draw: Draw) -> None:
    k, v, q = draw(3)

    def read(k: Tensor, v: Tensor, q: Tensor) -> Tensor:
        return Memory(k, v, kernel).read(q)

    near(read(k, v, q), torch.stack([read(*one) for one in zip(k, v, q, strict=True)]))
    near(read(k, v, q), torch.func.vmap(read)(k, v, q))


@pytest.mark.parametrize("kernel", FINITE, ids=str)
def test_primal_form_works_under_vmap(kernel: Kernel) -> None:
    k, v, q = Draw(5, 3, 2, 4, seed=0)(3)
    read = torch.func.vmap(lambda k, v, q: Memory(k, v, kernel).primal().read(q))
    near(read(k, v, q), Memory(k, v, kernel).read(q))


@each
def test_queries_broadcast_over_the_batch_and_back(kernel: Kernel) -> None:
    k, v, q = Draw(5, 3, 2, 4, seed=0)(6, 1)
    shared = Memory(k[0, 0], v[0, 0], kernel)
    near(shared.read(q), torch.stack([shared.read(one) for one in q]))
    batched = Memory(k, v, kernel)
    near(batched.read(q[0, 0]), batched.read(q[0, 0].expand(6, 7, 4, 3))[:, :1])


# --- gradients --------------------------------------------------------------------------------


@each
@given(draw=draws)
@law
def test_gradients_equal_the_reference(kernel: Kernel, draw: Draw) -> None:
    def gradients(read: Callable[[Memory, Tensor], Tensor]) -> tuple[Tensor, ...]:
        k, v, q = (x.requires_grad_() for x in draw())
        y = read(Memory(k, v, kernel), q)
        return torch.autograd.grad((y * y).sum(), (k, v, q))

    for fast, plain in zip(gradients(Memory.read), gradients(reference.read), strict=True):
        near(fast, plain)


@each
def test_gradcheck_once_and_twice(kernel: Kernel) -> None:
    inputs = tuple(x.requires_grad_() for x in Draw(3, 2, 2, 2, seed=3)())

    def read(k: Tensor, v: Tensor, q: Tensor) -> Tensor:
        return Memory(k, v, kernel).read(q)

    assert gradcheck(read, inputs)
    assert gradgradcheck(read, inputs)


@pytest.mark.parametrize("kernel", FINITE, ids=str)
def test_gradcheck_of_the_primal_form(kernel: Kernel) -> None:
    inputs = tuple(x.requires_grad_() for x in Draw(3, 2, 2, 2, seed=3)())

    def read(k: Tensor, v: Tensor, q: Tensor) -> Tensor:
        return Memory(k, v, kernel).primal().read(q)

    assert gradcheck(read, inputs)
    assert gradgradcheck(read, inputs)


@each
def test_per_query_gradients_and_hessians_by_torch_func(kernel: Kernel) -> None:
    k, v, q = Draw(4, 3, 1, 5, seed=1)()

    def energy(one: Tensor) -> Tensor:
        return Memory(k, v, kernel).read(one[None]).sum()

    gradients = torch.func.vmap(torch.func.grad(energy))(q)
    hessians = torch.func.vmap(torch.func.jacrev(torch.func.grad(energy)))(q)
    for one, gradient, hessian in zip(q, gradients, hessians, strict=True):
        near(gradient, torch.autograd.functional.jacobian(energy, one))
        near(hessian, torch.autograd.functional.hessian(energy, one))


# --- scales, types, devices -------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [Dot(), Cosine(), *NORMALIZED], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-150, 1e-20, 1e20, 1e120])
def test_extreme_scales_stay_finite(kernel: Kernel, scale: float) -> None:
    k, v, q = Draw(5, 3, 2, 4, seed=0)()
    k, q = (k * scale).requires_grad_(), (q * scale).requires_grad_()
    y = Memory(k, v, kernel).read(q)
    gradients = torch.autograd.grad(y.sum(), (k, q))
    assert all(x.isfinite().all() for x in (y, *gradients))


@pytest.mark.parametrize("scale", [1e-300, 1e-20, 1e20, 1e300])
def test_cosine_does_not_see_scale(scale: float) -> None:
    k, _, q = Draw(5, 3, 2, 4, seed=0)()
    near(Cosine()(q * scale, k), Cosine()(q, k), 1e-12)


@each
def test_values_may_be_anything_finite_to_an_unanswered_query(kernel: Kernel) -> None:
    y = Memory(-torch.ones(3, 2), torch.full((3, 1), 1e30), kernel).read(torch.zeros(4, 2))
    assert y.isfinite().all()


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_reads_in_the_type_it_was_given(kernel: Kernel, dtype: torch.dtype) -> None:
    k, v, q = Draw(5, 3, 2, 4, seed=0)()
    y = Memory(k.to(dtype), v.to(dtype), kernel).read(q.to(dtype))
    assert y.dtype == dtype
    near(y.double(), Memory(k, v, kernel).read(q), 40 * torch.finfo(dtype).eps)


@each
def test_reads_on_the_device_it_was_given(kernel: Kernel) -> None:
    k, v, q = (x.to("meta") for x in Draw(5, 3, 2, 4, seed=0)())
    memory = Memory(k, v, kernel)
    forms = [memory, memory.primal()] if kernel in FINITE else [memory]
    assert {form.read(q).device for form in forms} == {torch.device("meta")}


# --- words ------------------------------------------------------------------------------------


def test_prints_shapes_and_kernel() -> None:
    memory = Memory(torch.ones(5, 3), torch.ones(5, 2), Polynomial(degree=2, offset=0.0))
    assert repr(memory) == (
        "Memory(keys=(5, 3), values=(5, 2), kernel=Polynomial(degree=2, offset=0.0))"
    )
    assert (
        repr(memory.primal()) == "PrimalMemory(W=(2, 6), kernel=Polynomial(degree=2, offset=0.0))"
    )


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Memory(torch.ones(5, 3), torch.ones(5, 2)).kernel = Cosine()  # type: ignore[misc]


WRONG = {
    "one key": (
        lambda: Memory(torch.ones(3), torch.ones(1, 2)),
        "keys have shape (3,), but rows (…, n, d) were expected; for a single row write "
        "keys[None].",
    ),
    "one value": (
        lambda: Memory(torch.ones(1, 3), torch.ones(2)),
        "values have shape (2,), but rows (…, n, m) were expected; for a single row write "
        "values[None].",
    ),
    "unpaired": (
        lambda: Memory(torch.ones(5, 3), torch.ones(4, 2)),
        "keys of shape (5, 3) and values of shape (4, 2) do not pair up; every key needs one "
        "value: give values of shape (5, 2).",
    ),
    "one query": (
        lambda: Memory(torch.ones(5, 3), torch.ones(5, 2)).read(torch.ones(3)),
        "queries have shape (3,), but rows (…, q, d) were expected; for a single row write "
        "queries[None].",
    ),
    "query of another width": (
        lambda: Memory(torch.ones(5, 3), torch.ones(5, 2)).scores(torch.ones(7, 4)),
        "queries of shape (7, 4) have 4 columns, but keys of shape (5, 3) have 3; ask with "
        "queries of shape (…, q, 3).",
    ),
    "query of another batch": (
        lambda: Memory(torch.ones(4, 5, 3), torch.ones(4, 5, 2)).read(torch.ones(2, 7, 3)),
        "queries of shape (2, 7, 3) do not fit keys of shape (4, 5, 3); their leading dimensions "
        "(2,) and (4,) must be equal, 1 or absent.",
    ),
    "primal query of another width": (
        lambda: Memory(torch.ones(5, 3), torch.ones(5, 2)).primal().read(torch.ones(7, 4)),
        "queries of shape (7, 4) have 4 features under Dot(), but W of shape (2, 3) weighs 3; "
        "ask with queries as wide as the keys it was made of.",
    ),
    "primal query of another batch": (
        lambda: Memory(torch.ones(4, 5, 3), torch.ones(4, 5, 2)).primal().read(torch.ones(2, 7, 3)),
        "queries of shape (2, 7, 3) do not fit W of shape (4, 2, 3); their leading dimensions "
        "(2,) and (4,) must be equal, 1 or absent.",
    ),
    "other kernel": (
        lambda: (
            Memory(torch.ones(5, 3), torch.ones(5, 2))
            + Memory(torch.ones(5, 3), torch.ones(5, 2), Cosine())
        ),
        "a memory read by Dot() cannot be added to one read by Cosine(); give both the same "
        "kernel, or add what they read.",
    ),
    "other values": (
        lambda: (
            Memory(torch.ones(5, 3), torch.ones(5, 2)) + Memory(torch.ones(4, 3), torch.ones(4, 1))
        ),
        "values of shape (5, 2) and (4, 1) cannot be added; only the number of pairs, the last "
        "dimension but one, may differ.",
    ),
    "infinite features": (
        lambda: Memory(torch.ones(5, 3), torch.ones(5, 2), Exponential()).primal(),
        "Exponential(scale=None) has no finite features; read it in dual form with Memory.read, "
        "or choose a kernel that has them: Dot, Cosine, Polynomial, EluPlusOne, Relu.",
    ),
    "degree": (
        lambda: Polynomial(degree=0),
        "Polynomial(degree=0, offset=1.0) is no kernel with features; degree must be a whole "
        "number from 1 and offset must not be negative.",
    ),
    "offset": (
        lambda: Polynomial(degree=2, offset=-1.0),
        "Polynomial(degree=2, offset=-1.0) is no kernel with features; degree must be a whole "
        "number from 1 and offset must not be negative.",
    ),
}


@pytest.mark.usefixtures("without_shape_checker")
@pytest.mark.parametrize("case", WRONG)
def test_errors_say_what_was_given_what_was_expected_and_what_to_do(case: str) -> None:
    act, message = WRONG[case]
    with pytest.raises(ReadingError) as caught:
        act()
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)
