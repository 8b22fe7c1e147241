"""Mixtures of experts, as transformers computes them: the rows that are seen make up the gradient.

Which sample a routed row belongs to is another question; here it is whether every row is seen, at
its place in its expert's matrix.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from dualform.layers import Finder, Rows, Seen, Watching, kinds, when_errors_come
from dualform.memory.blocks import from_matrix, matrix_shape
from dualform.memory.forms import form_named

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="an optional dependency")

SMALL = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
QWEN = {**SMALL, "num_experts": 4, "intermediate_size": 24, "moe_intermediate_size": 12}


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen2() -> nn.Module:
    config = transformers.Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=12)
    return transformers.Qwen2MoeForCausalLM(config)


def qwen3() -> nn.Module:
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN))


def gpt_oss() -> nn.Module:
    """Experts with inputs first and with biases."""
    config = transformers.GptOssConfig(**SMALL, intermediate_size=24, num_local_experts=4)
    return transformers.GptOssForCausalLM(config)


def rows_of(model: nn.Module, loss: Callable[[], Tensor]) -> list[Rows]:
    """What a forward and a backward pass leave behind."""
    found: list[Rows] = []

    def take(use: Seen) -> None:
        when_errors_come(use, partial(add, use))

    def add(use: Seen, errors: list[Tensor | None]) -> None:
        with torch.no_grad():
            found.extend(use.rows(errors))

    with Watching(Finder(dict(model.named_parameters())), kinds(), take):
        value = loss()
    value.backward()
    return found


def summed(rows: list[Rows], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum of all rows, for each parameter that has some."""
    totals: dict[str, Tensor] = {}
    for site, keys, values, *_ in rows:
        assert values is not None
        x, e = (
            t.detach().flatten(0, -1 - dims) for t, dims in ((keys, site.key_dims), (values, 1))
        )
        x = x if site.key_dims else keys.reshape(-1, 1)  # places in a table
        for book, term in site.terms.items():
            shape = tuple(parameters[book].shape)
            sides = form_named(term.form).rows(x, e, term.groups, term.at)
            total = sides.total(torch.ones(len(x)).double(), matrix_shape(shape, term.view))
            totals[book] = totals.get(book, 0) + from_matrix(total, shape, term.view)
    return totals


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("make", [mixtral, qwen2, qwen3, gpt_oss])
def test_rows_of_all_experts_make_up_the_gradient(
    make: Callable[[], nn.Module], implementation: str
) -> None:
    torch.manual_seed(0)
    model, words = make(), torch.randint(0, 31, (4, 6))
    if implementation != "grouped_mm":  # which does not take float64
        model.double()
    model.set_experts_implementation(implementation)  # type: ignore[operator]
    parameters = dict(model.named_parameters())
    totals = summed(rows_of(model, lambda: model(input_ids=words, labels=words).loss), parameters)
    missing = {n for n, p in parameters.items() if n not in totals and p.grad is not None}
    assert not missing
    rounding = 16 * torch.finfo(next(model.parameters()).dtype).eps
    for name, total in totals.items():
        gradient = parameters[name].grad.double()
        assert float((total - gradient).norm() / gradient.norm()) < rounding, name
