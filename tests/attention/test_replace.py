"""Swapping the attention of models that are there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.attention.cases import near
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from dualform import attention
from dualform.attention import Primal, RmsNorm
from dualform.errors import AttentionError


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double()


X = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1)).double()
PADDING = torch.arange(7) >= torch.tensor([[7], [5], [4]])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_softmax_in_place_of_torchs_own_changes_nothing(
    training: bool, padding: Tensor | None
) -> None:
    model = encoder().train(training)
    seen = torch.ones(3, 7, dtype=torch.bool) if padding is None else ~padding
    with torch.no_grad():
        expected = model(X, src_key_padding_mask=padding)
        assert attention.replace(model, "softmax") is model
        found = model(X, src_key_padding_mask=padding)
    near(found[seen], expected[seen])


@pytest.mark.parametrize("kind", ["linear", "batch_norm", "entmax", Primal(keys=(RmsNorm(),))])
def test_every_layer_is_the_new_kind_in_training_and_out_of_it(kind: Any) -> None:
    model = encoder().eval()
    before = model(X)
    attention.replace(model, kind)
    assert [layer.self_attn.kind for layer in model.layers] == [kind] * 2
    with torch.no_grad():
        assert not torch.allclose(model(X), before)
        near(model(X, src_key_padding_mask=PADDING)[:1], model(X)[:1])
        near(model(X), model.train()(X))


def test_weights_stay_the_same_parameters_and_nothing_random_is_drawn() -> None:
    model = encoder()
    parameters, state = list(model.parameters()), torch.get_rng_state()
    attention.replace(model, "local", window=2)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_other_shapes_of_torchs_module() -> None:
    torch.manual_seed(0)
    for options in (
        {"kdim": 5, "vdim": 6},
        {"bias": False},
        {"add_bias_kv": True, "add_zero_attn": True},
    ):
        old = nn.MultiheadAttention(16, 4, dropout=0.2, **options).double().eval()
        new = attention.replace(old, "softmax")
        given = [torch.randn(7, 3, n).double() for n in (16, old.kdim, old.vdim)]
        near(new(*given)[0], old(*given)[0])
        assert new.dropout == 0.2
    shared = attention.MultiheadAttention(16, 4, num_kv_heads=2).double()
    again = attention.replace(shared, "linear")
    assert again.num_kv_heads == 2
    assert again(X, X, X)[0].shape == X.shape


def test_every_layer_learns_its_own_copy() -> None:
    model = attention.replace(encoder(), "batch_norm", beta=nn.Parameter(torch.ones(4, 1, 1)))
    betas = [p for name, p in model.named_parameters() if name.endswith("beta")]
    assert len({id(beta) for beta in betas}) == 2
    assert all(beta.dtype == torch.float64 for beta in betas)
    model(X).square().sum().backward()
    assert all((beta.grad != 0).all() for beta in betas)


def test_only_where_asked() -> None:
    torch.manual_seed(0)
    model = nn.TransformerDecoderLayer(16, 4, 32)
    attention.replace(model, "local", where=lambda name: name == "self_attn")
    assert isinstance(model.self_attn, attention.MultiheadAttention)
    assert type(model.multihead_attn) is nn.MultiheadAttention


LLAMA = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA).double().eval()


def test_models_of_transformers() -> None:
    model, tokens = llama(), torch.arange(1, 13)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        near(attention.replace(model, "softmax")(tokens).logits, expected)
        narrow = attention.replace(model, "local", window=1)(tokens).logits
        assert not torch.allclose(narrow, expected)
        near(attention.replace(model, "local", window=99)(tokens).logits, expected)
        problem = attention.replace(nn.Sequential(model), Primal(keys=(RmsNorm(),)))
        assert not torch.allclose(problem(tokens).logits, expected)


def test_what_is_learned_belongs_to_the_layers_of_a_transformer() -> None:
    model, tokens = llama(), torch.arange(1, 13)[None]
    alpha = nn.Parameter(torch.full((4, 1, 1), 1.5))
    attention.replace(model, "entmax", alpha=alpha)
    own = {name: p for name, p in model.named_parameters() if name.endswith("dualform_alpha")}
    assert list(own) == [f"model.layers.{n}.self_attn.dualform_alpha" for n in range(2)]
    model(tokens, labels=tokens).loss.backward()
    assert all((p.grad != 0).all() for p in own.values())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(own.values())).fill_(1.0)
        assert not torch.allclose(model(tokens).logits, twin(tokens).logits)
        twin.load_state_dict(model.state_dict())
        assert torch.equal(model(tokens).logits, twin(tokens).logits)


class Mine(nn.MultiheadAttention):
    """Not torch's own."""


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (
            nn.Sequential(nn.Linear(2, 2)),
            {},
            "there is no attention to replace in Sequential; it must hold nn.MultiheadAttention, "
            "or be a model of transformers (without where=).",
        ),
        (
            nn.Sequential(Mine(16, 4)),
            {},
            "'0' is a Mine, which may do more than the nn.MultiheadAttention it is made from; "
            "leave it out by where=, or replace it by hand.",
        ),
        (
            nn.MultiheadAttention(16, 4),
            {"window": 3},
            "kind='softmax' has no option 'window'; it has scale.",
        ),
    ],
)
def test_errors(model: nn.Module, given: dict[str, Any], message: str) -> None:
    with pytest.raises(AttentionError) as caught:
        attention.replace(model, "softmax", **given)
    assert str(caught.value) == message


def test_problems_that_learn_cannot_be_had_by_transformers() -> None:
    problem = Primal(keys=(attention.BatchNorm(beta=nn.Parameter(torch.ones(()))),))
    config = BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    with pytest.raises(AttentionError, match=r"holds keys_0_beta, which would be learned; a model"):
        attention.replace(BertModel(config), problem)
