"""A quantized cache against none: `python -m tests.attention.quantized` tries hqq's.

transformers looks for hqq when it is imported, and hqq warns when it is. So it is installed in a
folder of its own, and tried in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def reads_as_no_cache(model: Any, cache: Any, given: Tensor) -> Tensor:
    """The law of lossy caches: a step reads as all tokens at once, of what the cache gave back.

    Returns the logits. Steps are of six tokens, of three, then of one.
    """
    from transformers import DynamicCache

    def watched(keys: Tensor, values: Tensor, layer: int, *others: Any, **named: Any) -> Any:
        returned[layer] = update(keys, values, layer, *others, **named)
        return returned[layer]

    returned: dict[int, tuple[Tensor, Tensor]] = {}
    update, cache.update = cache.update, watched
    logits = []
    for start, stop in ((0, 6), (6, 9), *((t, t + 1) for t in range(9, given.shape[1]))):
        logits.append(model(given[:, start:stop], past_key_values=cache).logits)
        empty: Any = DynamicCache()
        empty.update = lambda keys, values, layer, *others, **named: returned[layer]
        full = model(given[:, :stop], past_key_values=empty).logits
        torch.testing.assert_close(logits[-1], full[:, start:], rtol=1e-6, atol=1e-7)
    return torch.cat(logits, 1)


def main() -> None:
    sys.path.append(str(Path(sys.prefix) / "hqq"))
    from tests.attention.models import CAUSAL, LLAMA, build, near, tokens
    from transformers import LlamaForCausalLM, QuantizedCache

    torch.set_num_threads(1)
    options = {"nbits": 4, "axis_key": 1, "axis_value": 1, "q_group_size": 4, "residual_length": 3}
    given, logits = tokens(2, 14), {}
    for name in ["sdpa", *CAUSAL]:
        model = build(LlamaForCausalLM, LLAMA, name)
        with torch.no_grad():
            cache = QuantizedCache("hqq", model.config, **options)
            logits[name] = reads_as_no_cache(model, cache, given)
            exact = model(given, use_cache=False).logits
        assert not torch.allclose(logits[name], exact, atol=1e-3)  # 4 bits are few
        print(name)
    near(logits["dualform_softmax"], logits["sdpa"])


if __name__ == "__main__":
    main()
