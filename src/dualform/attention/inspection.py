"""What a running layer would be as a regression: its duals, its support vectors, its heads."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.attention.derivation import Problem
from dualform.attention.derived import Derived
from dualform.attention.kinds import described, options_of
from dualform.attention.multihead import MultiheadAttention
from dualform.attention.ridge import solved
from dualform.attention.shapes import for_each_query_head
from dualform.attention.shorten import shorten
from dualform.attention.transforms import BatchNorm
from dualform.attention.units import log_mean
from dualform.errors import AttentionError

REGRESSIONS = (
    "softmax",
    "linear",
    "local",
    "batch_norm",
    "scaled_heads",
    "batch_norm_scaled_heads",
    "ridge",
)
"""The kinds that are the dual of a known regression."""


@dataclass(frozen=True)
class Support:
    """How many duals are zero, within the box |α| ≤ C, or at its bound and beyond.

    >>> Support(C=1.0, zero=3, inside=5, bound=0)
    Support(C=1.0, zero=3, inside=5, bound=0)
    """

    C: float
    zero: int
    inside: int
    bound: int


@dataclass(frozen=True)
class Inspection:
    """The duals α = v·h(k) of each head, (batch, keys, m), and what the heads give.

    Duals are in units of 1/ḡ, as those of `Primal.solve` are: ḡ is the geometric mean of
    Φ(k)·Φ(k)/h(k)² over the keys of a sample.

    >>> _ = torch.manual_seed(0)
    >>> seen = inspect(MultiheadAttention(16, 4, kind="batch_norm"), torch.randn(10, 2, 16))
    >>> len(seen.alpha), seen.alpha[0].shape
    (4, torch.Size([2, 10, 4]))
    >>> 0 < seen.distance() and 0 < seen.distance(relative=True) < 2
    True
    """

    alpha: tuple[Tensor, ...]
    """One a head; heads of shortened keys have fewer rows. Infinite where float64 ends: `sizes`."""
    outputs: Tensor
    """(batch, heads, L, m), before the output projection."""
    sizes: tuple[Tensor, ...] = ()
    """log |α|, of any size; of `alpha` unless given."""

    def __post_init__(self) -> None:
        if not self.sizes:
            object.__setattr__(self, "sizes", tuple(alpha.abs().log() for alpha in self.alpha))

    def support(self, C: float, tolerance: float = 1e-6) -> list[Support]:
        """For each head, how its duals stand to a box |α| ≤ C, the C of a `Primal`."""
        found = []
        for size in self.sizes:
            zero = int((size <= math.log(tolerance * C)).sum())
            bound = int((size >= math.log(C) + math.log1p(-tolerance)).sum())
            found.append(Support(C, zero, size.numel() - zero - bound, bound))
        return found

    def distance(self, relative: bool = False) -> float:
        """Mean over pairs of heads, samples and tokens of ‖o_h − o_g‖: small where heads repeat.

        `relative` divides by the mean ‖o_h‖, so that layers of any scale can be compared.
        """
        heads = self.outputs.shape[1]
        if heads < 2:
            raise AttentionError("one head has no others to be compared with.")
        first, second = torch.triu_indices(heads, heads, 1, device=self.outputs.device)
        apart = (self.outputs[:, first] - self.outputs[:, second]).norm(dim=-1).mean()
        return float(apart / self.outputs.norm(dim=-1).mean() if relative else apart)


@torch.no_grad()
def inspect(layer: nn.MultiheadAttention, x: Tensor, context: Tensor | None = None) -> Inspection:
    """The duals α_j = v_j h(k_j) ḡ of a layer that runs on x, and its heads' outputs, in float64.

    Takes torch's module too. With `context`, keys and values come from there.

    >>> seen = inspect(torch.nn.MultiheadAttention(16, 4), torch.randn(10, 2, 16))
    >>> seen.support(C=100.0)[0].C
    100.0
    """
    module = as_ours(layer).double().eval()
    if module.kind not in REGRESSIONS and not isinstance(module.layer.func, Derived):
        raise AttentionError(
            f"kind={described(module.kind)} is not known as a regression; inspect takes a Primal "
            f"or one of {', '.join(REGRESSIONS)}."
        )
    rows = [x.double(), *[(x if context is None else context).double()] * 2]
    if not module.batch_first:
        rows = [t.transpose(0, 1) for t in rows]
    q, k, v = module.heads(*rows)
    outputs = module.layer(q, k, v)
    k, v = (for_each_query_head(t, q) for t in (k, v))
    duals = [_duals(module, k[:, h], v[:, h], h) for h in range(module.num_heads)]
    return Inspection(tuple(a for a, _ in duals), outputs, tuple(size for _, size in duals))


def as_ours(layer: nn.MultiheadAttention) -> MultiheadAttention:
    """A copy of a layer, as our module: torch's has the same weights."""
    if layer.bias_k is not None or layer.add_zero_attn:
        raise AttentionError(
            "add_bias_kv and add_zero_attn add keys that no token has, and a regression has data "
            "of the context only; inspect a module without them."
        )
    if isinstance(layer, MultiheadAttention):
        return deepcopy(layer)
    copy = MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        bias=layer.in_proj_bias is not None,
        kdim=layer.kdim,
        vdim=layer.vdim,
        batch_first=layer.batch_first,
    )
    copy.load_state_dict(layer.state_dict())
    return copy.to(layer.out_proj.weight.device)


def _duals(module: MultiheadAttention, k: Tensor, v: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """v_j h(k_j) ḡ and its size, h by the features and the data of the head's regression."""
    layer = module.layer.func
    options = options_of(module.kind, module.layer.keywords)
    if isinstance(layer, Derived):
        pairs = zip(k, v, strict=True)
        found = [_of_problem(layer.problem, *pair, options["scale"]) for pair in pairs]
        alpha, size = (torch.stack(each) for each in zip(*found, strict=True))
        return alpha, size
    if "factors" in options:
        lead, factors = options["lead"], options["factors"]
        factor = factors[head * len(factors) // module.num_heads]
        short = shorten(k[..., lead:, :], v[..., lead:, :], factor, options["pool"])
        k, v = (torch.cat([x[..., :lead, :], y], -2) for x, y in ((k, short.k), (v, short.v)))
    if "beta" in options:
        norm = BatchNorm(_of_head(options["beta"], head), options["eps"], options["variance"])
        k = norm.apply(k, k)
    if "penalty" in options:
        v = solved(k, v, None, options["scale"], options["penalty"])
    return _in_units(v, *_sizes(k, options))


def _in_units(v: Tensor, sign: Tensor, log_h: Tensor, log_own: Tensor) -> tuple[Tensor, Tensor]:
    """α_j = v_j h(k_j) ḡ and log |α_j|, of the sign of h, log |h| and log Φ(k_j)·Φ(k_j)."""
    unit = log_mean(log_own, log_h).unsqueeze(-1)
    size = v.abs().log() + log_h.unsqueeze(-1) + unit
    return v.sign() * sign.unsqueeze(-1) * size.exp(), size


def _of_head(beta: float | Tensor, head: int) -> float | Tensor:
    return beta[head] if isinstance(beta, Tensor) and beta.numel() > 1 else beta


def _of_problem(
    problem: Problem, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    if problem.sees != "all":
        raise AttentionError(
            f"inspect asks what all keys together would be as one regression, but with "
            f"sees={problem.sees!r} every query has its own; inspect the problem with sees='all'."
        )
    for step in problem.keys:
        k, v = step.shorten(k, v, open_end=False)
        k = step.apply(k, k)
    if problem.is_softmax:
        return _in_units(v, *_of_scores(problem.scores(k, k, scale)))
    products = problem.products(k, k, scale)
    h = problem.h(products).squeeze(-1)
    return _in_units(v, h.sign(), h.abs().log(), products.diagonal().log())


def _sizes(k: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The sign of h(k_j), log |h(k_j)| and log Φ(k_j)·Φ(k_j).

    h(k_j) = Σ_i Φ(k_j)·Φ(k_i) over the keys that k_j sees, and 1 where nothing is divided.
    """
    scale: float | None = options["scale"]
    if "features" in options:
        phi = options["features"].features
        asked, kept = phi(k if scale is None else k * scale), phi(k)
        own = (asked * kept).sum(-1)
        h = (asked * kept.sum(-2, keepdim=True)).sum(-1)
        h = h if options["normalized"] else torch.ones_like(h)
        return h.sign(), h.abs().log(), own.log()
    scores = (k.shape[-1] ** -0.5 if scale is None else scale) * k @ k.mT
    if "window" in options:
        j = torch.arange(k.shape[-2], device=k.device)
        scores = scores.masked_fill((j[:, None] - j).abs() > options["window"], -torch.inf)
    return _of_scores(scores)


def _of_scores(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same where h sums exponentials, which are never formed."""
    log_h = scores.logsumexp(-1)
    return torch.ones_like(log_h), log_h, scores.diagonal(dim1=-2, dim2=-1)
