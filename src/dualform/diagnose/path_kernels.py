"""Attention paths: a network as a kernel machine over the ways that tokens take through its heads.

A path `π = (h₁ … h_L)` takes one head of each layer. Its feature of a sample is what it brings to
the token that is read, `ξ_π = Σ_t [A_L^{h_L} ⋯ A_1^{h₁}]_{t*,t} x_t`. A network with linear values
and given attention predicts, after Bayesian training, as the kernel `K = Σ U_ππ' C_ππ'` does, with
`C_ππ' = σ₀²/(N₀H) ξ_π·ξ_π'` and H paths. Where layers are very wide, `U = Πσ² I`: a Gaussian
process, in which all paths count alike. Where they are not, the order parameters U are learned:
they minimize the action below (Tiberi, Mignacco, Irie and Sompolinsky, *Dissecting the Interplay of
Attention Paths in a Statistical Mechanics Theory of Transformers*, NeurIPS 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.errors import AttentionError

MOST_STEPS = 300
"""Of L-BFGS; it ends before where nothing changes any more."""
LARGEST_TABLE = 1 << 28
"""So many products of features are held at most, in float64."""


def path_features(
    x: Tensor, attention: Sequence[Tensor], query: int | None = -1, skip: bool = False
) -> Tensor:
    """(samples, paths, width): `ξ_π`, what each path brings of x (samples, tokens, width).

    Paths are in the order of `itertools.product(heads of layer 1, heads of layer 2, …)`.

    >>> x, A = torch.randn(5, 7, 3), torch.softmax(torch.randn(2, 5, 4, 7, 7), -1)
    >>> path_features(x, list(A)).shape, path_features(x, list(A), skip=True).shape
    (torch.Size([5, 16, 3]), torch.Size([5, 25, 3]))

    Args:
        attention: the weights of each layer, first layer first, (samples, heads, tokens, tokens):
            a row for each token that attends.
        query: the token that is read; None for the mean of all.
        skip: whether each layer also has a residual connection, as one more head, the last.
    """
    _require_features(x, attention)
    samples, tokens = x.shape[:2]
    if query is None:
        rows = x.new_full((samples, 1, tokens), 1 / tokens)
    else:
        if not -tokens <= query < tokens:
            raise AttentionError(
                f"query={query}: there are {tokens} tokens; give one of them, or None for the mean."
            )
        rows = x.new_zeros(samples, 1, tokens)
        rows[:, :, query] = 1.0
    for A in reversed(attention):
        longer = rows[:, None] @ A.to(x)  # (samples, heads, paths, tokens)
        if skip:
            longer = torch.cat([longer, rows[:, None]], 1)
        rows = longer.flatten(1, 2)
    return rows @ x


def _require_features(x: Tensor, attention: Sequence[Tensor]) -> None:
    if x.ndim != 3 or not attention:
        raise AttentionError(
            f"x has shape {tuple(x.shape)} and there are {len(attention)} layers; give x (samples, "
            "tokens, width) and the weights of one layer or more."
        )
    for at, A in enumerate(attention):
        if A.ndim != 4 or len(A) != len(x) or A.shape[2:] != (x.shape[1],) * 2:
            raise AttentionError(
                f"attention[{at}] has shape {tuple(A.shape)}; x has {len(x)} samples of "
                f"{x.shape[1]} tokens, so that weights are ({len(x)}, heads, {x.shape[1]}, "
                f"{x.shape[1]}). Paths join layers of the same tokens."
            )


@dataclass(frozen=True)
class PathPrior:
    """What a network is before training: the widths of its layers, and its weights' variances.

    >>> PathPrior(heads=(2, 3), width=64).paths
    6
    """

    heads: tuple[int, ...]
    """How many each layer has, first layer first; with `skip` one more."""
    width: float | Sequence[float]
    """N of each layer and of the readout, first layer first, or one for all."""
    variance: float = 1.0
    """σ² of the weights of every layer, of the inputs' (σ₀²) and of the readout's (σ_a²)."""
    temperature: float = 0.01
    """T: how far training may stay from the targets."""

    @property
    def paths(self) -> int:
        """How many paths there are."""
        return math.prod(self.heads)

    @property
    def widths(self) -> tuple[float, ...]:
        """`N_1 … N_L` and `N_a`."""
        if isinstance(self.width, (int, float)):
            return (float(self.width),) * (len(self.heads) + 1)
        return tuple(map(float, self.width))


@dataclass(frozen=True)
class PathKernel:
    """A kernel machine over attention paths, after training.

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(40, 2, 6)
    >>> y = (x[:, 0, 0] > 0).double() * 2 - 1  # only the first path tells
    >>> found = fit_paths(x, y, PathPrior(heads=(2,), width=4))
    >>> found.order.shape, bool(found.order[0, 0] > found.order[1, 1])
    (torch.Size([2, 2]), True)
    """

    prior: PathPrior
    features: Tensor
    """(samples, paths, width), of training."""
    order: Tensor
    """(paths, paths): U."""
    weights: Tensor
    """(samples,): `(K + T)⁻¹ y`."""
    action: float
    """The least action that was found."""

    def kernel(self, one: Tensor, other: Tensor) -> Tensor:
        """`Σ U_ππ' C_ππ'` between features of some samples and of others."""
        factor = self.prior.variance / (one.shape[-1] * self.prior.paths)
        mixed = torch.einsum("pq,nqd->npd", self.order, other.double())
        return factor * one.double().flatten(1) @ mixed.flatten(1).T

    def predict(self, features: Tensor) -> Tensor:
        """(samples,): `kᵀ (K + T)⁻¹ y`, from features (samples, paths, width)."""
        return self.kernel(features, self.features) @ self.weights

    @property
    def head_scores(self) -> list[Tensor]:
        """For each layer a score of each head: the share of `Σ |U_ππ'|` whose paths use it.

        >>> x, y = torch.randn(30, 4, 6), torch.ones(30)
        >>> [len(scores) for scores in fit_paths(x, y, PathPrior((2, 2), 8)).head_scores]
        [2, 2]
        """
        return head_scores(self.order, self.prior.heads)


def head_scores(order: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """For each layer a score of each head: `Σ |U_ππ'|` over pairs of which one uses it, of all.

    >>> head_scores(torch.diag(torch.tensor([3.0, 1.0])), (2,))
    [tensor([0.7500, 0.2500])]
    """
    size = order.abs()
    grid = torch.cartesian_prod(*[torch.arange(n) for n in heads]).reshape(-1, len(heads))
    found = []
    for layer, count in enumerate(heads):
        uses = grid[:, layer].to(order.device)[:, None] == torch.arange(count, device=order.device)
        without = torch.stack([size[~own][:, ~own].sum() for own in uses.T])
        found.append(1 - without / size.sum())
    return found


def fit_paths(
    features: Tensor, y: Tensor, prior: PathPrior, renormalized: bool = True
) -> PathKernel:
    """The kernel machine of features (samples, paths, width) and targets y (samples,).

    Its order parameters minimize the action by L-BFGS, through their Cholesky factors, in float64.
    With `renormalized=False` they are those of infinitely wide layers: a Gaussian process.

    >>> _ = torch.manual_seed(0)
    >>> x, y = torch.randn(40, 2, 6), torch.randn(40).sign()
    >>> wide, gp = fit_paths(x, y, PathPrior((2,), 1e6)), fit_paths(x, y, PathPrior((2,), 1), False)
    >>> bool(torch.allclose(wide.order, gp.order, atol=1e-3))
    True
    """
    _require_targets(features, y, prior)
    y = y.to(features.device).double()
    factors = _Factors(prior, features.device)
    products = _products(features.double(), prior)
    if renormalized:
        _minimize(lambda: action(products, y, prior, *factors.order()), factors.parameters)
    with torch.no_grad():
        u, order = factors.order()
        K = _tempered(products, order[0], prior)
        least = float(action(products, y, prior, u, order))
        weights = torch.cholesky_solve(y[:, None], torch.linalg.cholesky(K))[:, 0]
    return PathKernel(prior, features.detach(), order[0].detach(), weights, least)


def action(
    products: Tensor, y: Tensor, prior: PathPrior, u: Tensor, order: Sequence[Tensor]
) -> Tensor:
    """The action of the order parameters: `u` of the readout, and `U_l` of each layer and above.

    `logdet(K+T) + yᵀ(K+T)⁻¹y + N_a(u/σ² − log u) + N_L(tr U_L/(uσ²) − logdet U_L + H_L log u) +
    Σ_{l<L} N_l(tr(U_{l+1}⁻¹ tr_{h_l} U_l)/σ² − logdet U_l + H_l logdet U_{l+1})`. Products are
    `C_ππ'`, (paths, paths, samples, samples).
    """
    L = torch.linalg.cholesky(_tempered(products, order[0], prior))
    solved = torch.linalg.solve_triangular(L, y[:, None], upper=False)
    total: Tensor = 2 * L.diagonal().log().sum() + solved.square().sum()
    *widths, readout = prior.widths
    total = total + readout * (u / prior.variance - u.log())
    above = u.reshape(1, 1)
    for width, heads, U in reversed(list(zip(widths, prior.heads, order, strict=True))):
        size = len(above)
        traced = U.view(heads, size, heads, size).diagonal(dim1=0, dim2=2).sum(-1)
        inside = torch.linalg.solve(above, traced).trace() / prior.variance
        total = total + width * (inside - _logdet(U) + heads * _logdet(above))
        above = U
    return total


class _Factors:
    """The order parameters as numbers that may have any value, and that hardly bind each other.

    `U_l = (I ⊗ B_{l+1}) M_l M_lᵀ (I ⊗ B_{l+1})ᵀ` with `U_{l+1} = B_{l+1} B_{l+1}ᵀ`: then the terms
    of the action in the widths are those of each M_l alone. M_l has its diagonal's logarithms.
    """

    def __init__(self, prior: PathPrior, device: torch.device) -> None:
        """Those of infinitely wide layers: `U_l = σ² (I ⊗ U_{l+1})`."""
        self._heads = prior.heads
        half = math.log(prior.variance) / 2
        sizes = [math.prod(prior.heads[at:]) for at in range(len(prior.heads))]
        self.parameters = [
            torch.full((1, 1), 2 * half, dtype=torch.float64, device=device),
            *(half * torch.eye(size, dtype=torch.float64, device=device) for size in sizes),
        ]
        for parameter in self.parameters:
            parameter.requires_grad_()

    def order(self) -> tuple[Tensor, list[Tensor]]:
        log_u, *relative = self.parameters
        B, found = (log_u / 2).exp(), list[Tensor]()
        for heads, M in reversed(list(zip(self._heads, relative, strict=True))):
            lower = M.tril(-1) + torch.diag_embed(M.diagonal().exp())
            B = torch.kron(torch.eye(heads).to(B), B) @ lower
            found.insert(0, B @ B.T)
        return log_u.exp()[0, 0], found


def _products(features: Tensor, prior: PathPrior) -> Tensor:
    """(paths, paths, samples, samples): `C_ππ'`."""
    samples, paths, width = features.shape
    if (samples * paths) ** 2 > LARGEST_TABLE:
        raise AttentionError(
            f"{samples} samples and {paths} paths have {(samples * paths) ** 2:,} products, more "
            f"than {LARGEST_TABLE:,}; give fewer samples, or fewer layers or heads."
        )
    flat = features.transpose(0, 1).reshape(paths * samples, width)
    products = (flat @ flat.T).view(paths, samples, paths, samples).transpose(1, 2)
    found: Tensor = products * (prior.variance / (width * paths))
    return found


def _logdet(U: Tensor) -> Tensor:
    """Of a positive matrix, also where rounding makes its determinant negative."""
    found: Tensor = torch.linalg.slogdet(U).logabsdet
    return found


def _tempered(products: Tensor, U: Tensor, prior: PathPrior) -> Tensor:
    """`K + T`, and what rounding takes from the smallest eigenvalues of a large K."""
    K = torch.einsum("pq,pqnm->nm", U, products)
    rounding = len(K) * torch.finfo(K.dtype).eps * K.diagonal().mean()
    found: Tensor = K + (prior.temperature + rounding) * torch.eye(len(K)).to(K)
    return found


def _minimize(loss: Callable[[], Tensor], parameters: Sequence[Tensor]) -> None:
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=MOST_STEPS,
        history_size=30,
        tolerance_grad=1e-5,
        tolerance_change=1e-8,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]


def _require_targets(features: Tensor, y: Tensor, prior: PathPrior) -> None:
    if features.ndim != 3 or features.shape[1] != prior.paths:
        raise AttentionError(
            f"features have shape {tuple(features.shape)}; heads={prior.heads} make {prior.paths} "
            "paths, so that features are (samples, paths, width), as path_features gives them."
        )
    if y.shape != features.shape[:1]:
        raise AttentionError(
            f"y has shape {tuple(y.shape)}; give one number for each of {len(features)} samples, "
            "such as +1 and −1 for two classes."
        )
    if len(prior.widths) != len(prior.heads) + 1:
        raise AttentionError(
            f"width has {len(prior.widths)} numbers; give one for all, or those of "
            f"{len(prior.heads)} layers and of the readout."
        )
    if min(prior.widths) <= 0 or prior.variance <= 0 or prior.temperature <= 0:
        raise AttentionError(
            f"widths {prior.widths}, variance={prior.variance} and temperature="
            f"{prior.temperature} have to be above 0."
        )
