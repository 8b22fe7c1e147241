"""Who sees whom in a transformers model: every kind, by the masks that sdpa attention gets.

Laws: a cache of any type reads as no cache does; packed and padded documents read as each alone;
a mask that says no more than causality changes nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.attention.models import (
    BART,
    BERT,
    BY_QUERY,
    CAUSAL,
    LAST,
    LLAMA,
    NAMES,
    POOLED,
    T5,
    build,
    mistral,
    near,
    tokens,
)
from torch import Tensor, nn
from transformers import (
    BartForConditionalGeneration,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    StaticCache,
    T5ForConditionalGeneration,
)

from dualform.attention import Primal, replace
from dualform.attention.transformers import _forward, register
from dualform.errors import AttentionError

# --- caches -----------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {"use_cache": True},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "beams": {"num_beams": 3},
    "static beams": {"num_beams": 3, "cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_cache_of_any_type_reads_as_no_cache_does(name: str, way: str) -> None:
    model = build(LlamaForCausalLM, LLAMA, name)
    given = tokens(2, 11)
    padded = given.clone()
    padded[0, :3] = 0
    masks = torch.ones_like(given), (padded != 0).long()
    options = {"max_new_tokens": 9, "do_sample": False, **WAYS[way]}
    beams = {"num_beams": options.get("num_beams", 1)}
    for batch, mask in zip((given, padded), masks, strict=True):
        plain = model.generate(
            batch, attention_mask=mask, max_new_tokens=9, do_sample=False, use_cache=False, **beams
        )
        assert torch.equal(model.generate(batch, attention_mask=mask, **options), plain)


@pytest.mark.parametrize("name", CAUSAL)
def test_tokens_that_continue_a_past_read_as_the_whole_does(name: str) -> None:
    model = build(LlamaForCausalLM, LLAMA, name)
    given = tokens(2, 14)
    with torch.no_grad():
        first = model(given[:, :6], use_cache=True)
        rest = model(given[:, 6:], past_key_values=first.past_key_values)
        near(torch.cat([first.logits, rest.logits], 1), model(given, use_cache=False).logits)


@pytest.mark.parametrize("name", ["sdpa", *CAUSAL])
def test_a_sliding_window_is_the_same_with_a_cache(name: str) -> None:
    model = build(MistralForCausalLM, mistral(5), name)
    given = tokens(2, 9)
    if name in POOLED:
        with pytest.raises(AttentionError, match="takes keys together, the same for all queries"):
            model(given)
        with pytest.raises(AttentionError) as caught:
            model(given[:, :5])
        assert str(caught.value) == (
            f"kind='{name.removeprefix('dualform_')}' takes keys from the first token on, but this "
            "model forgets tokens after sliding_window=5; choose sliding_window=None in its config."
        )
        return
    options = {"max_new_tokens": 9, "do_sample": False}
    plain = model.generate(given, use_cache=False, **options)
    assert torch.equal(model.generate(given, **options), plain)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(given, **static, **options), plain)


# --- masks ------------------------------------------------------------------------------------


def causal_masks(n: int) -> dict[str, Tensor]:
    seen = torch.ones(1, 1, n, n, dtype=torch.bool).tril()
    zero = torch.zeros(1, 1, n, n).double()
    return {
        "booleans": seen,
        "-inf": zero.masked_fill(~seen, -torch.inf),
        "-1e9": zero.masked_fill(~seen, -1e9),
        "the least number": zero.masked_fill(~seen, LAST),
    }


@pytest.mark.parametrize("way", causal_masks(1))
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_of_ones_own_changes_nothing(name: str, way: str) -> None:
    model = build(LlamaForCausalLM, LLAMA, name)
    given = tokens(2, 12)
    with torch.no_grad():
        own = model(given, attention_mask=causal_masks(12)[way]).logits
        near(own, model(given).logits)


@pytest.mark.parametrize("name", BY_QUERY)
@pytest.mark.parametrize("number", [None, -torch.inf, LAST])
def test_a_prefix_that_sees_all_of_itself(name: str, number: float | None) -> None:
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    mask[..., :6, :6] = True
    if number is not None:
        mask = torch.zeros(1, 1, 12, 12).double().masked_fill(~mask, number)
    model, given = build(LlamaForCausalLM, LLAMA, name), tokens(1, 12)
    near_end, far_end = given.clone(), given.clone()
    near_end[0, 4], far_end[0, 6] = 3, 3
    with torch.no_grad():
        y, nearer, further = (
            model(x, attention_mask=mask).logits for x in (given, near_end, far_end)
        )
        if name == "dualform_softmax":
            near(y, build(LlamaForCausalLM, LLAMA, "sdpa")(given, attention_mask=mask).logits)
    assert not torch.allclose(nearer[:, 0], y[:, 0])
    near(further[:, :6], y[:, :6])


@pytest.mark.parametrize("name", BY_QUERY)
def test_packed_documents_read_as_each_alone(name: str) -> None:
    model, given = build(LlamaForCausalLM, LLAMA, name), tokens(1, 12)
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        alone = [model(given[:, part]).logits for part in (slice(5), slice(5, 12))]
        packed = model(given, position_ids=places, use_cache=False).logits
    near(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("name", POOLED)
def test_packed_documents_are_refused_where_keys_are_pooled(name: str) -> None:
    model, given = build(LlamaForCausalLM, LLAMA, name), tokens(1, 12)
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with pytest.raises(AttentionError) as caught:
        model(given, position_ids=places, use_cache=False)
    assert str(caught.value) == (
        f"kind='{name.removeprefix('dualform_')}' takes keys together, the same for all "
        "queries, but here queries see different keys (packed documents, a window, a position "
        "bias, or a mask of one's own); choose another kind, or one document a row."
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CAUSAL)
def test_padding_on_either_side_changes_nothing(name: str, side: str) -> None:
    model, given = build(LlamaForCausalLM, LLAMA, name), tokens(1, 9)
    zeros = torch.zeros(1, 5, dtype=torch.long)
    row = torch.cat([zeros, given] if side == "left" else [given, zeros], 1)
    batch = torch.cat([row, tokens(1, 14, seed=1)])
    mask = (batch != 0).long()
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(batch, attention_mask=mask, position_ids=places).logits
        near(padded[0][mask[0].bool()], model(given).logits[0])
        near(padded[1:], model(batch[1:]).logits)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_padding_of_an_encoder_changes_nothing(name: str, side: str) -> None:
    model, given = build(BertModel, BERT, name), tokens(1, 9)
    zeros = torch.zeros(1, 5, dtype=torch.long)
    row = torch.cat([zeros, given] if side == "left" else [given, zeros], 1)
    batch = torch.cat([row, tokens(1, 14, seed=1)])
    mask = (batch != 0).long()
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(batch, attention_mask=mask, position_ids=places).last_hidden_state
        near(padded[0][mask[0].bool()], model(given).last_hidden_state[0])


@pytest.mark.parametrize("name", CAUSAL)
def test_a_mask_for_all_queries_alike_is_complete(name: str) -> None:
    """As for torch's attention: queries see what it shows, also ahead."""
    model, given = build(LlamaForCausalLM, LLAMA, name), tokens(1, 8)
    keep = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    keep[..., 6:] = False
    if name == "dualform_local":
        keep = keep.expand(1, 1, 8, 8)
    with torch.no_grad():
        y = model(given, attention_mask=keep).logits
        other = given.clone()
        other[0, 5], other[0, 7] = 3, 3
        changed = model(other, attention_mask=keep).logits
    assert not torch.allclose(changed[:, 3], y[:, 3])
    other[0, 5] = given[0, 5]
    with torch.no_grad():
        near(model(other, attention_mask=keep).logits[:, :7], y[:, :7])


@pytest.mark.parametrize("name", CAUSAL)
def test_weights_are_given_where_asked_for(name: str) -> None:
    model = build(LlamaForCausalLM, LLAMA, name)
    batch = tokens(2, 9)
    batch[0, :3] = 0
    mask = (batch != 0).long()
    with torch.no_grad():
        asked = model(batch, attention_mask=mask, output_attentions=True)
        near(asked.logits, model(batch, attention_mask=mask).logits)
    assert [a.shape for a in asked.attentions] == [(2, 8, 9, 9)] * 2
    for weights in asked.attentions:
        assert torch.equal(weights, weights.tril())
        assert (weights[0, ..., :3] == 0).all()
    if name == "dualform_hyper":  # latent codes: of one size over the heads, and of either sign
        sizes = asked.attentions[0][1].square().mean(0)
        torch.testing.assert_close(sizes, torch.ones_like(sizes).tril(), rtol=0, atol=1e-2)
        assert bool((asked.attentions[0] < 0).any())
    if name == "dualform_softmax":
        eager = build(LlamaForCausalLM, LLAMA, "eager")
        with torch.no_grad():
            theirs = eager(batch, attention_mask=mask, output_attentions=True).attentions
        near(asked.attentions[0][1], theirs[0][1])


@pytest.mark.parametrize(
    "name",
    [
        "dualform_softmax",
        "dualform_batch_norm",
        pytest.param("dualform_scaled_heads", marks=pytest.mark.long),
        pytest.param("dualform_batch_norm_scaled_heads", marks=pytest.mark.long),
    ],
)
def test_a_compiled_step_with_a_static_cache(name: str) -> None:
    """In parts where a layer asks where queries stand, and else as one graph."""
    model, given = build(LlamaForCausalLM, LLAMA, name), tokens(2, 12)
    cache = StaticCache(config=model.config, max_cache_len=16)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend="eager")
    with torch.no_grad():
        model(given[:, :9], past_key_values=cache)
        steps = [compiled(given[:, t : t + 1], past_key_values=cache).logits for t in range(9, 12)]
        near(torch.cat(steps, 1), model(given).logits[:, 9:])


# --- encoders and decoders --------------------------------------------------------------------

PAIRS = {
    "t5": (T5ForConditionalGeneration, T5),
    "bart": (BartForConditionalGeneration, BART),
}


@pytest.mark.parametrize("model", PAIRS)
def test_softmax_is_sdpa_with_an_encoder(model: str) -> None:
    given = {"input_ids": tokens(2, 9), "decoder_input_ids": tokens(2, 7)}
    padded = given["input_ids"].clone()
    padded[0, 6:] = 0
    pair = [build(*PAIRS[model], name) for name in ("dualform_softmax", "sdpa")]
    with torch.no_grad():
        near(*(m(**given).logits for m in pair))
        given |= {"input_ids": padded, "attention_mask": (padded != 0).long()}
        near(*(m(**given).logits for m in pair))


READS = {
    "t5": [name for name in BY_QUERY if name not in ("dualform_local", "dualform_hyper")],
    "bart": [name for name in CAUSAL if name != "dualform_local"],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("model", "name"), [(m, n) for m, names in READS.items() for n in names])
def test_decoders_read_an_encoder(model: str, name: str) -> None:
    """With a cache as without, with beams too; and an encoder's padding changes nothing."""
    net = build(*PAIRS[model], name)
    given = tokens(2, 9)
    padded = torch.cat([given, torch.zeros(2, 4, dtype=torch.long)], 1)
    mask = (padded != 0).long()
    for options in ({}, {"num_beams": 2}):
        options = {"max_new_tokens": 7, "do_sample": False, **options}
        plain = net.generate(given, use_cache=False, **options)
        assert torch.equal(net.generate(given, **options), plain)
        assert torch.equal(net.generate(padded, attention_mask=mask, **options), plain)


def test_what_a_kind_cannot_follow_in_a_decoder_is_refused() -> None:
    given = {"input_ids": tokens(1, 9), "decoder_input_ids": tokens(1, 7)}
    with pytest.raises(AttentionError) as caught:
        build(*PAIRS["bart"], "dualform_local")(**given)
    assert str(caught.value) == (
        "kind='local' has a window around each query, but these 7 queries stand in another "
        "sequence than the 9 keys; choose another kind for cross-attention."
    )
    with pytest.raises(
        AttentionError, match="the same for all queries, but here queries see differ"
    ):
        build(*PAIRS["t5"], "dualform_scaled_heads")(**given)
    with pytest.raises(
        AttentionError, match=r"position bias of T5 .* kind='hyper' with scores='rms' only hides"
    ):
        build(*PAIRS["t5"], "dualform_hyper")(**given)
    with pytest.raises(AttentionError) as caught:
        build(LlamaForCausalLM, LLAMA, "dualform_ridge")(tokens(1, 1))
    assert str(caught.value) == (
        "kind='ridge' has no causal form, and this model is causal; choose another kind, or a "
        "model that sees all of its tokens."
    )


# --- what is not understood -------------------------------------------------------------------

X = torch.ones(1, 2, 3, 4)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "caps": (
        {"softcap": 50.0},
        "this model caps its scores (softcap=50.0) or adds sinks to them, which no kind does; "
        "choose a model without, or another attn_implementation.",
    ),
    "pages": (
        {"cache": object()},
        "this model keeps its past in pages (object), which no kind reads; generate without "
        "continuous batching, or with another attn_implementation.",
    ),
    "packing without a mask": (
        {"cu_seq_lens_q": torch.tensor([0, 2, 3])},
        "cu_seq_lens_q pack documents, but no mask says so; give position_ids that begin anew with "
        "each document, or a 4-D attention_mask.",
    ),
    "indices": (
        {"indices": torch.zeros(1), "position_ids": torch.zeros(1, 3), "block_indices": None},
        "this model passes indices to its attention, which no kind understands; choose another "
        "attn_implementation, or a model without.",
    ),
    "mask": (
        {"attention_mask": torch.ones(1, 3, dtype=torch.bool)},
        "attention_mask of shape (1, 3) does not say of 3 queries and 3 keys who sees whom; give "
        "(batch, tokens), or (batch, 1 or heads, 3, 3).",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name: str) -> None:
    given, message = REFUSED[name]
    given = {"attention_mask": None, **given}
    with pytest.raises(AttentionError) as caught:
        _forward(nn.Identity(), X, X, X, kind="softmax", options={}, **given)
    assert str(caught.value) == message


def test_a_model_that_would_ignore_the_layers_is_refused() -> None:
    config = BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)
    model = BloomForCausalLM._from_config(config, attn_implementation="dualform_softmax")
    with pytest.raises(AttentionError) as caught:
        model(tokens(1, 6))
    assert str(caught.value) == (
        "the model of BloomConfig does not read by transformers' registry of attention, so "
        "attn_implementation='dualform_softmax' would be ignored; choose 'eager', or another model."
    )
    with pytest.raises(AttentionError) as caught:
        replace(BloomForCausalLM(config), "batch_norm")
    assert str(caught.value) == (
        "BloomForCausalLM does not read by transformers' registry of attention, so its attention "
        "cannot be replaced."
    )


def test_an_option_of_ones_own_is_not_overruled_by_the_model() -> None:
    register("softmax", name="dualform_flat", scale=0.0)
    model = build(LlamaForCausalLM, LLAMA, "dualform_flat")
    given = tokens(1, 6)
    shuffled = given[:, [2, 0, 1, 4, 3, 5]]
    with torch.no_grad():
        first = model.model.layers[0].self_attn
        states = [model.model.embed_tokens(x) for x in (given, shuffled)]
        places = torch.arange(6)[None]
        ends = [
            first(s, position_embeddings=model.model.rotary_emb(s, places), attention_mask=None)[0]
            for s in states
        ]
    near(ends[0][:, -1], ends[1][:, -1])  # with scale 0, the mean of what came before


def test_names_of_problems_and_of_what_is_learned() -> None:
    with pytest.raises(AttentionError, match="has no name of its own; give one: register"):
        register(Primal())
    with pytest.raises(AttentionError) as caught:
        register("batch_norm", name="learned", beta=nn.Parameter(torch.ones(())))
    assert str(caught.value) == (
        "beta of kind='batch_norm' would be learned, but a registered function owns no parameters; "
        "use attention.replace(model, kind, …), which gives every layer its own."
    )
