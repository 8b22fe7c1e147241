"""Attention as kernel principal components: the values that would make it so, and an audit.

Let the features be such that `φ(x)·φ(y) = k(x, y) / (g(x) g(y))`, with `k(x, y) = exp(x·y/√D)` and
`g(x) = Σ_j k(x, k_j)`. The projection of a query's features on the principal axis `d` of the keys'
features is softmax attention with the values `v_j(d) = (a_jd − mean_j a_jd) / g(k_j)`. Here
`a_d = e_d / √λ_d`, and `(λ_d, e_d)` are eigenpairs of the keys' centered Gram matrix (Teo and
Nguyen, *Unveiling the Hidden Structure of Self-Attention via Kernel Principal Component Analysis*,
NeurIPS 2024). Whether trained values are such is a question: `audit_values` answers it for a head.

Exponentials of keys are never formed: all of it is computed from logarithms, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from rich.console import Group
from torch import Tensor, nn

from dualform.attention.inspection import as_ours
from dualform.attention.kinds import described, record_of
from dualform.attention.shapes import for_each_query_head
from dualform.attention.softmax import softmax
from dualform.errors import AttentionError
from dualform.read.display import Displayed, columns, framed

RANK = 1e-10
"""Eigenvalues below this share of the largest are rounding."""
LARGEST = 700.0
"""Up to this size, and down to minus it, exp(x) is a normal number in float64."""


@dataclass(frozen=True)
class KernelPCA:
    """The principal axes of some keys' features, as values of an attention layer.

    Long keys have features beyond what float64 holds. So the Gram matrix and its duals are those of
    features divided by the longest, and values are given up to a factor.

    >>> kernel_pca(torch.eye(3), 2).eigenvalues.shape
    torch.Size([2])
    """

    values: Tensor
    """(keys, d): v_j(d), divided by `exp(log_scale)`, which float64 may not hold."""
    log_scale: float
    duals: Tensor
    """(keys, d): a_d, with `a_dᵀ K̃ a_d = 1`."""
    eigenvalues: Tensor
    """(d,): of the centered Gram matrix, largest first."""
    gram: Tensor
    """(keys, keys): K̃, the centered Gram matrix."""
    log_g: Tensor
    """(keys,): log g(k_j)."""

    def leading(self, count: int) -> KernelPCA:
        """The same with the first `count` axes only, or with all where there are fewer.

        >>> kernel_pca(torch.eye(4)).leading(2).values.shape
        torch.Size([4, 2])
        """
        return replace(
            self,
            values=self.values[:, :count],
            duals=self.duals[:, :count],
            eigenvalues=self.eigenvalues[:count],
        )


@torch.no_grad()
def kernel_pca(k: Tensor, count: int | None = None, scale: float | None = None) -> KernelPCA:
    """The `count` leading principal axes of the features of keys (keys, width), or all of them.

    >>> _ = torch.manual_seed(0)
    >>> found = kernel_pca(torch.randn(12, 4), 3)
    >>> found.values.shape, bool((found.eigenvalues.diff() <= 0).all())
    (torch.Size([12, 3]), True)
    """
    if k.ndim != 2:
        raise AttentionError(
            f"keys have shape {tuple(k.shape)}; give those of one head, (keys, D)."
        )
    scores = _scores(k, k, scale)
    log_g = scores.logsumexp(-1)
    log_gram = scores - log_g[:, None] - log_g
    log_unit = float(log_gram.max()) if len(k) else 0.0
    gram = _centered((log_gram - log_unit).exp())
    eigenvalues, vectors = torch.linalg.eigh(gram)
    eigenvalues, vectors = eigenvalues.flip(0), vectors.flip(1)
    rounding = torch.finfo(gram.dtype).eps * len(k)  # of a matrix with entries up to 1
    rank = int((eigenvalues > (RANK * eigenvalues[:1]).clamp_min(rounding)).sum())
    if not rank:
        raise AttentionError(
            f"the features of these {len(k)} keys have no principal axes: all keys are alike; "
            "give keys that differ."
        )
    if count is not None and not 1 <= count <= rank:
        raise AttentionError(
            f"count={count}: the features of these {len(k)} keys have {rank} principal axes; "
            f"give 1 to {rank}."
        )
    kept = eigenvalues[: rank if count is None else count]
    duals = vectors[:, : len(kept)] / kept.sqrt()
    unit = float(log_g.min())
    values = (duals - duals.mean(0)) * (unit - log_g)[:, None].exp()
    return KernelPCA(values, -log_unit / 2 - unit, duals, kept, gram, log_g)


def kpca_values(k: Tensor, count: int, scale: float | None = None) -> Tensor:
    """(keys, count): the values with which attention is a projection on principal axes.

    >>> kpca_values(torch.randn(6, 2), 2).shape
    torch.Size([6, 2])
    """
    found = kernel_pca(k, count, scale)
    size = math.log(float(found.values.abs().max())) + found.log_scale
    if abs(size) > LARGEST:
        raise AttentionError(
            f"these keys are so long that their values are of size exp({size:.0f}), which float64 "
            "cannot hold; take kernel_pca(…).values, which are the same divided by exp(log_scale)."
        )
    return found.values * math.exp(found.log_scale)


@dataclass(frozen=True, repr=False)
class ValueAudit(Displayed):
    """How far a head's values are from those of kernel principal components.

    Each number stands beside the same for values whose keys were shuffled: `null`. Where trained
    values are no closer than shuffled ones, the head is no kernel PCA.

    >>> _ = torch.manual_seed(0)
    >>> audit_values(*torch.randn(3, 20, 4)).null.cosine < 0.7
    True
    """

    cosine: float
    """The mean |cos| of values' duals and principal axes, matched as well as they can be."""
    cka: float
    """Linear CKA of values' duals and as many leading axes, 0 to 1."""
    gamma_spread: float
    """The spread of `(K̃a)_j / a_j` over the keys, relative to its mean: 0 for an eigenvector."""
    kernel_cka: float
    """CKA of the values' duals and the whole Gram matrix, 0 to 1."""
    projected: float
    """The outputs' mean ‖h‖² relative to the features' mean ‖φ(q)‖²; at most 1 for projections."""
    log_features: float
    """log of the features' mean ‖φ(q)‖², which may be too small, or too large, for a float."""
    null: ValueAudit | None = None

    @property
    def log_loss(self) -> float:
        """log J of the projection loss `J = mean(‖φ(q)‖² − ‖h‖²)`; NaN where J is below 0.

        >>> q, k = torch.randn(2, 20, 4, dtype=torch.float64)
        >>> audit_values(q, k, kpca_values(k, 4)).log_loss > audit_values(q, k, kpca_values(k, 9)).log_loss
        True
        """  # noqa: E501
        left = 1 - self.projected
        return self.log_features + math.log(left) if left > 0 else math.nan

    @property
    def is_kernel_pca(self) -> bool:
        """Whether the values are kernel principal components, but for little."""
        return self.cosine > 0.9 and self.gamma_spread < 0.1

    @property
    def finding(self) -> str:
        """The result in one sentence."""
        if self.null is None:
            return ""
        if self.is_kernel_pca:
            return "These values are kernel principal components."
        better = self.cosine > 2 * self.null.cosine
        return (
            f"These values are no kernel principal components: |cos| {self.cosine:.2f} with the "
            f"axes, {'more than' if better else 'about as'} shuffled values have "
            f"({self.null.cosine:.2f})."
        )

    def __rich__(self) -> Group:
        table = columns(("", "values", "shuffled", "kernel PCA has"), {""})
        ideal = {"cosine": "1", "cka": "1", "gamma_spread": "0", "kernel_cka": "–"}
        for name, best in (ideal | {"projected": "≤ 1", "log_loss": "–"}).items():
            null = "–" if self.null is None else f"{getattr(self.null, name):.3g}"
            table.add_row(name.replace("_", " "), f"{getattr(self, name):.3g}", null, best)
        return framed("values against kernel PCA", table, self.finding)


@torch.no_grad()
def audit_values(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, seed: int = 0
) -> ValueAudit:
    """Compares a head's values (keys, m) with the leading principal axes of its keys' features.

    >>> _ = torch.manual_seed(0)
    >>> q, k = torch.randn(2, 40, 6).unbind()
    >>> print(audit_values(q, k, kpca_values(k, 4)).finding)
    These values are kernel principal components.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 2:
            raise AttentionError(f"{name} has shape {tuple(x.shape)}; give those of one head.")
    if len(k) != len(v) or q.shape[1] != k.shape[1]:
        raise AttentionError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not go together: "
            "queries and keys have one width, and each key has a value."
        )
    axes = kernel_pca(k, scale=scale).leading(v.shape[1])
    found = _audit(q, k, v.double(), axes, scale)
    order = torch.randperm(len(v), generator=torch.Generator().manual_seed(seed))
    null = _audit(q, k, v.double()[order], axes, scale)
    return replace(found, null=null)


@torch.no_grad()
def audit_layer(layer: nn.MultiheadAttention, x: Tensor, sample: int = 0) -> list[ValueAudit]:
    """Audits the values of every head of a softmax layer that attends to itself, in a sample of x.

    The layer is read without a mask: every token sees all tokens of its sample.

    >>> _ = torch.manual_seed(0)
    >>> layer = nn.MultiheadAttention(16, 2, batch_first=True)
    >>> [head.cosine < 0.5 for head in audit_layer(layer, torch.randn(1, 30, 16))]
    [True, True]
    """
    module = as_ours(layer).double().eval()
    if record_of(module.kind).layer is not softmax:
        raise AttentionError(
            f"kind={described(module.kind)} has other weights than the softmax whose features "
            "these principal axes are of; only layers of kind='softmax', torch's own too, can be "
            "audited."
        )
    if x.ndim != 3:
        raise AttentionError(
            f"x has shape {tuple(x.shape)}; give tokens of samples, (batch, tokens, width) or, as "
            "the layer takes them, (tokens, batch, width)."
        )
    rows = x.double() if module.batch_first else x.double().transpose(0, 1)
    if not -len(rows) <= sample < len(rows):
        raise AttentionError(
            f"sample={sample}: x has {len(rows)} samples; give 0 to {len(rows) - 1}."
        )
    q, k, v = module.heads(*[rows[sample][None]] * 3)
    k, v = (for_each_query_head(t, q) for t in (k, v))
    scale = module.layer.keywords.get("scale")
    return [audit_values(*head, scale) for head in zip(q[0], k[0], v[0], strict=True)]


def _audit(q: Tensor, k: Tensor, v: Tensor, axes: KernelPCA, scale: float | None) -> ValueAudit:
    log_duals = v.abs().log() + axes.log_g[:, None]  # of g ∘ v, which float64 may not hold
    duals = v.sign() * (log_duals - log_duals.max().clamp_min(-1e300)).exp()  # up to a factor
    duals = duals - duals.mean(0)
    ideal = axes.duals - axes.duals.mean(0)
    cosines = (_unit(duals).T @ _unit(ideal)).abs()
    return ValueAudit(
        _best_match(cosines),
        _cka(duals, ideal),
        _gamma_spread(axes.gram, duals),
        _kernel_cka(duals @ duals.T, axes.gram),
        *_projected(q, k, v, scale),
    )


def _gamma_spread(gram: Tensor, duals: Tensor) -> float:
    """Over keys whose dual is not small; the median over dimensions in which values differ."""
    image, spreads = gram @ duals, []
    for a, b in zip(duals.T, image.T, strict=True):
        large = a.abs() > 0.1 * a.abs().max()
        if not large.any():
            continue
        ratio = b[large] / a[large]
        spreads.append(float(ratio.std(correction=0) / ratio.mean().abs().clamp_min(1e-300)))
    return sorted(spreads)[len(spreads) // 2] if spreads else math.nan


def _projected(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[float, float]:
    """`Σ ‖h‖² / Σ ‖φ(q)‖²` over the queries, and log of the mean `‖φ(q)‖² = k(q, q) / g(q)²`."""
    scores = _scores(q, k, scale)
    log_h = (torch.softmax(scores, -1) @ v).square().sum(-1).log()
    log_features = (_own_scores(q, scale) - 2 * scores.logsumexp(-1)).logsumexp(0)
    ratio = log_h.logsumexp(0) - log_features
    return float(ratio.clamp(-700, 700).exp()), float(log_features) - math.log(len(q))


def _best_match(cosines: Tensor) -> float:
    """The mean of the best assignment of columns to rows."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise AttentionError(
            "matching values with axes needs scipy, which is not installed: "
            "pip install 'dualform[attention]'."
        ) from None
    rows, places = linear_sum_assignment(cosines.numpy(), maximize=True)
    return float(cosines[rows, places].mean())


def _cka(one: Tensor, other: Tensor) -> float:
    """Linear CKA, `‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖)`, of centered columns."""
    return _kernel_cka(one @ one.T, other @ other.T)


def _kernel_cka(one: Tensor, other: Tensor) -> float:
    """`⟨K, L⟩ / (‖K‖ ‖L‖)` of centered Gram matrices."""
    return float((one * other).sum() / (one.norm() * other.norm()).clamp_min(1e-300))


def _scores(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    factor = 1 / math.sqrt(k.shape[-1]) if scale is None else scale
    return factor * q.double() @ k.double().mT


def _own_scores(q: Tensor, scale: float | None) -> Tensor:
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return factor * q.double().square().sum(-1)


def _centered(gram: Tensor) -> Tensor:
    return gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()


def _unit(columns: Tensor) -> Tensor:
    return torch.nn.functional.normalize(columns, dim=0)
