"""Every cache that transformers has, under every kind.

Laws: a cache that keeps numbers as they are reads as no cache does; a quantized one reads as
none does of the numbers that it gives back; softmax attention is sdpa over each of them.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from inspect import isabstract
from typing import Any

import pytest
import torch
from tests.attention.models import BART, CAUSAL, LLAMA, POOLED, build, mistral, near, tokens
from tests.attention.quantized import reads_as_no_cache
from torch import Tensor
from transformers import (
    BartForConditionalGeneration,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    LlamaForCausalLM,
    MistralForCausalLM,
    QuantizedCache,
    StaticCache,
    cache_utils,
)
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from dualform.errors import AttentionError

ROOM = {"max_cache_len": 16}
WINDOW = {"sliding_window": 5}
EXACT: dict[str, dict[str, int]] = {
    "DynamicLayer": {},
    "DynamicIndexedLayer": {},
    "LinearAttentionAndFullAttentionLayer": {},
    "StaticLayer": ROOM,
    "StaticIndexedLayer": ROOM,
    "LinearAttentionAndStaticFullAttentionLayer": ROOM,
    "DynamicSlidingWindowLayer": WINDOW,
    "LinearAttentionAndSlidingWindowAttentionLayer": WINDOW,
    "StaticSlidingWindowLayer": WINDOW | ROOM,
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": WINDOW | ROOM,
}
"""Layers that keep numbers as they are, and what each is made with."""
QUANTIZED = {"Fp8QuantizedLayer", "HQQQuantizedLayer", "QuantoQuantizedLayer"}
WITHOUT_KEYS = {"LinearAttentionLayer"}
"""They keep states of recurrences and convolutions. Attention never reads from them."""
CACHES: dict[str, Callable[[Any], Cache]] = {
    "DynamicCache": lambda config: DynamicCache(config=config),
    "StaticCache": lambda config: StaticCache(config, 16),
    "MtpCache": lambda config: cache_utils.MtpCache(config=config),
    "DFlashCache": lambda config: cache_utils.DFlashCache(config=config),
}
"""Caches for one decoder; they hold the layers above."""
IMPLEMENTATIONS = {
    "dynamic": "test_every_cache",
    "static": "test_every_cache",
    "quantized": "test_a_quantized_cache",
    "offloaded": "the dynamic cache, moved between a GPU and the processor",
    "offloaded_static": "the static cache, moved between a GPU and the processor",
    "sliding_window": "deprecated: static",
    "hybrid": "deprecated: static",
    "hybrid_chunked": "deprecated: static",
    "offloaded_hybrid": "deprecated: offloaded_static",
    "offloaded_hybrid_chunked": "deprecated: offloaded_static",
}
"""What may be asked for as `cache_implementation`; "paged" is refused, by `_require_plain`."""


def below(*bases: type) -> set[str]:
    """Names of the classes of `transformers.cache_utils` that can be made, below some others."""
    found, waiting = set(), list(bases)
    while waiting:
        waiting += (cls := waiting.pop()).__subclasses__()
        if cls.__module__ == cache_utils.__name__ and not isabstract(cls):
            found.add(cls.__name__)
    return found


def test_no_type_of_cache_is_left_out() -> None:
    layers = below(cache_utils.CacheLayerMixin, cache_utils.LinearAttentionCacheLayerMixin)
    assert layers == set(EXACT) | QUANTIZED | WITHOUT_KEYS
    assert below(Cache) == {*CACHES, "Cache", "QuantizedCache", "EncoderDecoderCache"}
    assert set(ALL_CACHE_IMPLEMENTATIONS) == set(IMPLEMENTATIONS)
    for name in WITHOUT_KEYS:
        assert not hasattr(getattr(cache_utils, name), "update")


@cache
def sdpa(window: int | None, steps: tuple[int, ...]) -> Tensor:
    cls, config = (MistralForCausalLM, mistral(window)) if window else (LlamaForCausalLM, LLAMA)
    return in_steps(build(cls, config, "sdpa"), DynamicCache(config=config), steps)


def in_steps(model: Any, past: Cache, steps: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        parts = tokens(2, sum(steps)).split(steps, 1)
        return torch.cat([model(part, past_key_values=past).logits for part in parts], 1)


@pytest.mark.parametrize("layer", EXACT)
@pytest.mark.parametrize("name", CAUSAL)
def test_every_layer_of_a_cache(name: str, layer: str) -> None:
    options = EXACT[layer]
    window = options.get("sliding_window")
    cls, config = (MistralForCausalLM, mistral(window)) if window else (LlamaForCausalLM, LLAMA)
    model = build(cls, config, name)
    past = Cache(layers=[getattr(cache_utils, layer)(**options) for _ in range(2)])
    if window and name in POOLED:
        with pytest.raises(
            AttentionError, match=r"takes keys together|takes keys from the first token"
        ):
            in_steps(model, past, (6,))
        return
    steps = (6, 3, 1, 1, 1)
    if window and name == "dualform_local":
        with pytest.raises(AttentionError, match=r"3 queries stand among [0-9]+ keys"):
            in_steps(model, copy.deepcopy(past), steps)
        steps = (6, 1, 1, 1, 1, 1, 1)  # one query stands at the end
    logits = in_steps(model, past, steps)
    with torch.no_grad():
        near(logits, model(tokens(2, 12), use_cache=False).logits)
    if name == "dualform_softmax":
        near(logits, sdpa(window, steps))


@pytest.mark.parametrize("kind_of_cache", CACHES)
@pytest.mark.parametrize("name", CAUSAL)
def test_every_cache(name: str, kind_of_cache: str) -> None:
    model = build(LlamaForCausalLM, LLAMA, name)
    logits = in_steps(model, CACHES[kind_of_cache](model.config), (6, 3, 1, 1, 1))
    with torch.no_grad():
        near(logits, model(tokens(2, 12), use_cache=False).logits)
    if name == "dualform_softmax":
        near(logits, sdpa(None, (6, 3, 1, 1, 1)))


@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "dualform_local"])
def test_a_cache_of_an_encoder_and_a_decoder(name: str) -> None:
    model = build(BartForConditionalGeneration, BART, name)
    given, read = tokens(2, 8), tokens(2, 9, seed=1)
    past = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.no_grad():
        told = model.get_encoder()(read)
        parts = [
            model(encoder_outputs=told, decoder_input_ids=part, past_key_values=past).logits
            for part in given.split((5, 2, 1), 1)
        ]
        near(torch.cat(parts, 1), model(read, decoder_input_ids=given, use_cache=False).logits)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_quantized_cache(name: str) -> None:
    model, given = build(LlamaForCausalLM, LLAMA, name), tokens(2, 14)
    with torch.no_grad():
        logits = reads_as_no_cache(model, QuantizedCache("fp8", model.config), given)
        exact = model(given, use_cache=False).logits
        assert not torch.allclose(logits, exact, atol=1e-3)  # 8 bits are few
        if name == "dualform_softmax":
            theirs = build(LlamaForCausalLM, LLAMA, "sdpa")
            near(logits, reads_as_no_cache(theirs, QuantizedCache("fp8", LLAMA), given))
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    for beams in (1, 3):
        made = model.generate(given, max_new_tokens=5, do_sample=False, num_beams=beams, **options)
        assert made.shape == (2, 19)


def test_a_quantized_cache_of_hqq() -> None:
    """In a process of its own. quanto's layers differ from hqq's only in how they round."""
    own = set(vars(cache_utils.QuantoQuantizedLayer)) | set(vars(cache_utils.HQQQuantizedLayer))
    assert {name for name in own if not name.startswith("__")} - {"_abc_impl"} == {
        "_quantize",
        "_dequantize",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.attention.quantized"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sdpa", *CAUSAL]
