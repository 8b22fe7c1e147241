"""Transformer encoders with each attention layer, and what a layer costs and makes of its heads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from dualform.attention import Inspection, MultiheadAttention
from dualform.errors import ReadingError

REFERENCE = "softmax"
CLIP = 4.0
"""The largest norm of a gradient."""
BLOCKS, ROUNDS = 5, 5
"""How often the steps of all layers are timed: blocks, and rounds in each."""
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    REFERENCE: ("softmax", {}),
    "linear": ("linear", {}),
    "batch_norm": ("batch_norm", {}),
    "centered": ("batch_norm", {"variance": False}),
    "scaled_heads": ("scaled_heads", {}),
    "batch_norm_scaled_heads": ("batch_norm_scaled_heads", {}),
}
"""Each layer of the studies: its kind, and its options. "centered" is Attention-BN without s."""


@dataclass(frozen=True)
class EncoderShape:
    """A stack of encoder layers."""

    width: int
    heads: int
    hidden: int
    layers: int
    dropout: float = 0.1


class Encoder(nn.Module):
    """Encoder layers, one after another, with an attention layer by its name in `LAYERS`.

    >>> encoder = Encoder(EncoderShape(width=16, heads=4, hidden=32, layers=2), "centered")
    >>> encoder(torch.randn(3, 10, 16)).shape
    torch.Size([3, 10, 16])
    """

    def __init__(self, shape: EncoderShape, attention: str, norm_first: bool = False) -> None:
        super().__init__()
        require_layers([attention])
        kind, options = LAYERS[attention]
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.width,
                shape.heads,
                shape.hidden,
                shape.dropout,
                activation="gelu",
                batch_first=True,
                norm_first=norm_first,
            )
            for _ in range(shape.layers)
        )
        for layer in self.layers:
            layer.self_attn = MultiheadAttention(
                shape.width, shape.heads, batch_first=True, kind=kind, **options
            )

    def forward(self, h: Tensor, real: Tensor | None = None) -> Tensor:
        """(batch, length, width); `real` says which steps there are."""
        padding = None if real is None or bool(real.all()) else ~real
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=padding)
        return h

    @torch.no_grad()
    def head_distance(self, h: Tensor, real: Tensor | None = None) -> float:
        """How far apart the outputs of heads are, relative to their length, mean over layers.

        It is 0 where heads repeat each other, and √2 where they are unrelated directions.
        """
        real = torch.ones_like(h[..., 0], dtype=torch.bool) if real is None else real
        found: list[float] = []

        def measure(module: nn.Module, inputs: tuple[Tensor, ...], _: Any) -> None:
            assert isinstance(module, MultiheadAttention)
            outputs = module.layer(*module.heads(*inputs[:3]), real[:, None, None])
            at_steps = outputs.transpose(1, 2)[real].unsqueeze(2)
            found.append(Inspection((), at_steps).distance(relative=True))

        self.eval()
        modules = [m for m in self.modules() if isinstance(m, MultiheadAttention)]
        hooks = [module.register_forward_hook(measure) for module in modules]
        try:
            self(h, real)
        finally:
            for hook in hooks:
                hook.remove()
        return statistics.fmean(found)


def require_layers(names: Sequence[str]) -> None:
    """Raises unless all names are in `LAYERS`.

    >>> require_layers(["softmax", "centered"])
    """
    for unknown in (name for name in names if name not in LAYERS):
        raise ReadingError(
            f"attention layer '{unknown}' is not in this study; it has {', '.join(LAYERS)}."
        )


def count_flops(forward: Callable[[], object]) -> int:
    """Floating point operations of a forward pass, by torch's counter.

    >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 4))  # 2 · 2 · 3 · 4
    48
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        forward()
    return int(counter.get_total_flops())


def kept_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass keeps for the backward pass, each tensor's storage once.

    >>> x = torch.ones(8, 3)
    >>> kept_bytes(model := nn.Linear(3, 5), lambda: model(x))  # its input, in 4 bytes a number
    96
    """
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = forward()
    del output
    return sum(size for place, size in kept.items() if place not in own)


def step_times(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of some steps, as multiples of the first one's: the median of each block.

    In every round each step runs once, so that what else a machine does slows all of them alike.
    There are BLOCKS of so many rounds, and one round before that is not counted.

    >>> step_times({"one": lambda: None}, rounds=2)
    {'one': [1.0, 1.0, 1.0, 1.0, 1.0]}
    """
    first, rows = next(iter(steps)), []
    for turn in range(BLOCKS * rounds + 1):
        row = {}
        for name in sorted(steps, reverse=bool(turn % 2)):
            began = time.perf_counter()
            steps[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            row[name] = time.perf_counter() - began
        rows.append({name: seconds / row[first] for name, seconds in row.items()})
    blocks = [rows[1 + at * rounds : 1 + (at + 1) * rounds] for at in range(BLOCKS)]
    return {
        name: [statistics.median(row[name] for row in block) for block in blocks] for name in steps
    }


def fitting(
    model: nn.Module, rate: float, half: bool = False
) -> Callable[[Sequence[Tensor], Tensor], None]:
    """A function that makes one step of AdamW on a batch: what the model takes, and its classes.

    With `half` a GPU multiplies in bfloat16 (autocast).

    >>> step = fitting(nn.Linear(3, 2), rate=0.1)
    >>> step([torch.ones(4, 3)], torch.tensor([0, 1, 1, 1]))
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def step(inputs: Sequence[Tensor], y: Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=half and y.is_cuda):
            loss = cross_entropy(model(*inputs), y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return step


def measure_costs(
    models: Mapping[str, nn.Module], inputs: Sequence[Tensor], y: Tensor
) -> dict[str, dict[str, Any]]:
    """What a step of training costs with each layer: time as multiples of the first one's, bytes
    kept for the backward pass; and the operations of one sample's forward pass.

    >>> models = {"softmax": nn.Linear(3, 2)}
    >>> measure_costs(models, [torch.ones(4, 3)], torch.tensor([0, 1, 1, 1]))["softmax"]["flops"]
    12
    """
    steps = {
        name: partial(fitting(model.train(), 1e-3), inputs, y) for name, model in models.items()
    }
    times, one = step_times(steps, ROUNDS), [x[:1] for x in inputs]
    found: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        kept = kept_bytes(model.train(), partial(model, *inputs))
        flops = count_flops(partial(model.eval(), *one))
        found[name] = {"time": times[name], "flops": flops, "kept": kept}
    return found
