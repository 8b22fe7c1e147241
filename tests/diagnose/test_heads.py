"""Heads: their shares, their overlap and what a model loses without them, against plain loops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.diagnose.models import encoder, gpt2, vit
from torch import Tensor, nn

from dualform import attention
from dualform.diagnose import AttentionHead, Heads, heads
from dualform.diagnose.blocks import find_blocks, look
from dualform.diagnose.calls import BlockState
from dualform.errors import AttentionError


def seen_in(model: nn.Module, *inputs: Any) -> list[BlockState]:
    found: list[BlockState] = []
    look(model, find_blocks(model), found.append, inputs, {})
    return found


@pytest.mark.parametrize("kind", ["torch", "softmax", "linear", "local", "fused", "gpt2", "vit"])
def test_heads_make_up_what_their_layer_gives(kind: str) -> None:
    """`Σ_h W_h o_h + b` is the output of the attention layer, of each model that is seen."""
    torch.manual_seed(0)
    if kind in ("gpt2", "vit"):
        model, x = gpt2() if kind == "gpt2" else vit()
        name = ".attn" if kind == "gpt2" else ".attention"
        last: list[Any] = [m for n, m in model.named_modules() if n.endswith(name)]
    else:
        options = {"window": 2} if kind == "local" else {}
        model, x = encoder(), torch.randn(2, 6, 16)
        if kind == "fused":
            model = nn.Sequential(*[FusedHeads() for _ in range(3)])
        elif kind != "torch":
            model = attention.replace(model, kind, **options)
        last = list(model) if kind == "fused" else [one.self_attn for one in model.layers]
    given: list[Tensor] = []
    for module in last:
        module.register_forward_hook(
            lambda *a: given.append(a[2][0] if isinstance(a[2], tuple) else a[2])
        )
    states = seen_in(model.double(), x.double() if x.is_floating_point() else x)
    assert len(states) == len(given) == 3
    for state, y in zip(states, given, strict=True):
        (call,) = state.calls
        assert call.outputs is not None
        assert call.mix is not None
        parts = call.mix.chunk(4, -1)
        made = sum(call.outputs[:, h] @ parts[h].mT for h in range(4))
        rest = (y - made).flatten(0, -2)
        torch.testing.assert_close(rest, rest[:1].expand_as(rest), rtol=0, atol=1e-9)  # the bias


class FusedHeads(nn.Module):
    """Four heads by one fused call, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        parts = [t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.inside(x).chunk(3, -1)]
        y = nn.functional.scaled_dot_product_attention(*parts)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_numbers_are_those_of_plain_loops() -> None:
    model, x = encoder().double(), torch.randn(3, 7, 16, dtype=torch.float64)
    found = heads(model, x, ablate=True)
    with torch.no_grad():
        y = model(x)
        block: Any = model.layers[0]
        layer = block.self_attn
        _, weights = layer(x, x, x, average_attn_weights=False)
        v = (x @ layer.in_proj_weight[32:].T + layer.in_proj_bias[32:]).unflatten(-1, (4, 4))
        W = layer.out_proj.weight.unflatten(1, (4, 4))
        adds = [weights[:, h] @ v[:, :, h] @ W[:, h].T for h in range(4)]
    for h in range(4):
        one = found.heads[h]
        assert one.share == pytest.approx(float(adds[h].norm() / sum(adds).norm()), rel=1e-9)  # type: ignore[union-attr]
        overlaps = {
            g: sum(
                min(float(weights[b, h, i, j]), float(weights[b, g, i, j]))
                for b in range(3)
                for i in range(7)
                for j in range(7)
            )
            / 21
            for g in range(4)
            if g != h
        }
        assert one.twin == max(overlaps, key=lambda g: overlaps[g])
        assert one.overlap == pytest.approx(max(overlaps.values()), rel=1e-9)
        without = copy.deepcopy(model)
        with torch.no_grad():
            without.layers[0].self_attn.out_proj.weight[:, 4 * h : 4 * h + 4] = 0
            change = (without(x) - y).norm() / (y - y.flatten(0, 1).mean(0)).norm()
        assert one.damage == pytest.approx(float(change), rel=1e-9)


def test_copies_are_redundant_and_what_adds_nothing_is_prunable() -> None:
    model, x = encoder(), torch.randn(3, 7, 16)
    layer: Any = model.layers[1].self_attn
    with torch.no_grad():
        for at in (0, 16):  # queries and keys of head 2 are those of head 0
            layer.in_proj_weight[at + 8 : at + 12] = layer.in_proj_weight[at : at + 4]
            layer.in_proj_bias[at + 8 : at + 12] = layer.in_proj_bias[at : at + 4]
        layer.out_proj.weight[:, 4:8] = 0  # head 1 is not read
    for ablate in (False, True):
        found = heads(model, x, ablate=ablate)
        assert [[(h.block, h.head) for h in group] for group in found.redundant] == [
            [("layers.1", 0), ("layers.1", 2)]
        ]
        assert [one.label for one in found.prunable] == ["head 1 of layers.1"]
        assert "0, 2 of layers.1" in found.findings[0]
        assert "may be pruned: head 1 of layers.1." in found.findings[1]


@pytest.mark.parametrize("make", [gpt2, vit])
def test_the_model_and_randomness_are_left_as_they_were(make: Any) -> None:
    model, x = make()
    model.train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = heads(model, x, ablate=True)
    assert len(found.heads) == 12
    assert all(one.damage is not None and one.damage > 0 for one in found.heads)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_one_head_has_no_twin_and_many_are_counted() -> None:
    block = nn.TransformerEncoderLayer(8, 1, 16, 0.0, batch_first=True)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    found = heads(model, torch.randn(2, 5, 8))
    assert [(one.twin, one.overlap) for one in found.heads] == [(None, None)] * 2
    assert found.redundant == ()
    many = Heads(tuple(AttentionHead("h", at, share=0.001) for at in range(9)))
    assert "head 5 of h, and 3 more." in many.findings[1]


def test_a_table_a_frame_and_a_picture() -> None:
    found = heads(encoder(), torch.randn(2, 6, 16))
    assert "heads, block by block" in repr(found)
    assert found.to_pandas().shape == (12, 6)
    assert found.plot(value="overlap").images[0].get_array().shape == (3, 4)


def test_what_gives_no_tensor_cannot_be_tried_without_a_head() -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder()

        def forward(self, x: Tensor) -> Any:
            return {"y": self.inner(x)}

    with pytest.raises(AttentionError, match="the model gives a dict; trying it without a head"):
        heads(Gives(), torch.randn(2, 6, 16), ablate=True)
