"""The problem whose support vector expansion is an attention layer.

    min ½‖W‖² + C Σ_j (ξ_j + ξ̃_j)   with   |y_j − f(k_j)| ≤ ε + ξ_j,   f(x) = W Φ(Tx)/h(x) + b,

has a solution W = Σ_j (α_j − α̃_j) Φ(Tk_j)/h(k_j), so f(x) = Σ_j [Φ(Tx)·Φ(Tk_j)/h(x)] v_j + b with
v_j = (α_j − α̃_j)/h(k_j): attention. Choosing Φ, h, T and which keys are seen is choosing the
layer. In a network v_j = W_V x_j stands in for the duals; no regression is solved when it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualform.attention.derivation import Problem
from dualform.attention.derived import Derived
from dualform.attention.losses import solve_smooth
from dualform.attention.svr import Array, Duals, solve
from dualform.attention.transforms import Shorten
from dualform.attention.units import log_mean, require_comparable
from dualform.errors import AttentionError
from dualform.memory.kernels import nonzero


@dataclass(frozen=True)
class Primal(Problem):
    """f(x) = W Φ(Tx)/h(x) + b, fitted to keys and targets: choose Φ, h, T and what is seen.

    >>> from dualform.attention import BatchNorm, Primal
    >>> primal = Primal(keys=(BatchNorm(),))                 # Attention-BN
    >>> k, y, q = (torch.randn(n, 3, dtype=torch.float64) for n in (8, 8, 2))
    >>> solution = primal.solve(k, y)
    >>> solution.gap < 1e-6
    True
    >>> read = primal.attention()(q, k, solution.values) + solution.b
    >>> torch.allclose(read, solution.predict(q), rtol=0, atol=1e-10)
    True

    Args:
        kernel: Φ, by its kernel Φ(x)·Φ(y). `Exponential` gives softmax attention; a `FeatureMap`
            of your own is linear attention, any other `Kernel` is read pair by pair.
        normalizer: h(x) = Σ_j Φ(Tx)·Φ(Tk_j) over the keys that are seen ("sum"), 1 ("one"), or a
            function of those products (…, n, keys) that gives (…, n, 1).
        sees: "all" keys, the keys up to a query's position ("causal"), or a window around it.
        keys: what happens to queries and keys before Φ, in this order.
        epsilon: how far off a prediction may be at no cost.
        C: the price of being further off, in units of 1/ḡ: ḡ is the geometric mean over keys of
            G_jj = Φ(Tk_j)·Φ(Tk_j)/h(k_j)². Duals are given in the same unit.
        loss: what a residual costs instead, a `Loss`; then there is no epsilon. The layer is the
            same for all losses, since its values stand in for the duals.
    """

    def attention(self) -> Derived:
        """The derived layer: a function of q, k, v, masks, is_causal, scale, offset and dropout.

        Give it, or the problem itself, as the `kind` of `MultiheadAttention` and of a `Cache`.

        >>> from dualform.attention import Primal, Shorten
        >>> layer = Primal(keys=(Shorten(4),), sees="causal").attention()
        >>> layer(*torch.randn(3, 2, 16, 8).unbind()).shape
        torch.Size([2, 16, 8])
        """
        return Derived(self)

    def solve(self, keys: Tensor, targets: Tensor, at: int | None = None) -> Solution:
        """The regression on keys (n, d) and targets (n, m) at its optimum, each output by itself.

        Where a query sees only some keys it has a regression of its own: `at` is its position.

        >>> from dualform.attention import Primal
        >>> Primal().solve(torch.randn(8, 3), torch.randn(8, 2)).support.shape
        torch.Size([8, 2])
        """
        self._require_data(keys, targets, at)
        keys, targets = keys.detach().double(), targets.detach().double()
        seen = self._seen(len(keys), at)
        k, y = keys[seen], targets[seen]
        for step in self.keys:
            k, y = step.shorten(k, y, open_end=self.sees == "causal")
        features = _Features(self, k)
        G = features.require_solvable().numpy()
        duals = [self._duals(G, column.numpy()) for column in y.T]
        beta = torch.stack([torch.from_numpy(one.beta) for one in duals], -1)
        b = torch.tensor([one.b for one in duals], dtype=torch.float64)
        values = self._lengthened(beta * features.per_dual(), keys, seen)
        return Solution(features, beta, b, values, self.C, max(one.gap for one in duals))

    def _duals(self, G: Array, y: Array) -> Duals:
        if self.loss is not None:
            return solve_smooth(G, y, self.loss, self.C)
        return solve(G, y, self.epsilon, self.C)

    def _require_data(self, keys: Tensor, targets: Tensor, at: int | None) -> None:
        if not keys.ndim == targets.ndim == 2 or len(keys) != len(targets):
            raise AttentionError(
                f"keys of shape {tuple(keys.shape)} and targets of shape {tuple(targets.shape)} "
                "are no data of one regression; give keys (n, d) and targets (n, m), a head at a "
                "time."
            )
        if (self.sees == "all") != (at is None):
            raise AttentionError(
                f"sees={self.sees!r} and at={at}: a query that sees all keys needs no position, "
                "any other does; its regression is fitted to the keys it sees."
            )

    def _seen(self, n: int, at: int | None) -> Tensor:
        j = torch.arange(n)
        if at is None:
            return j >= 0
        return j <= at if self.sees == "causal" else (j - at).abs() <= int(self.sees)

    def _lengthened(self, values: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """Values of the keys as they were given; 0 for those that were not seen."""
        if self.keys and isinstance(self.keys[0], Shorten):
            rows = int(seen.sum())
            values = self.keys[0].lengthen(values, rows, self.sees == "causal")
        everywhere = values.new_zeros(len(keys), values.shape[-1])
        everywhere[seen] = values
        return everywhere


class _Features:
    """Φ(Tx)/h(x) by its inner products, in float64, straight from the definition, over √ḡ."""

    def __init__(self, primal: Primal, k: Tensor) -> None:
        self._primal, self._keys = primal, k
        self.k = self._transformed(k)
        self._log_h = self._log_sizes(k)
        self._log_unit = float(log_mean(self._log_own(), self._log_h.squeeze(-1)))

    def gram(self) -> Tensor:
        """(keys, keys): G_ij/ḡ, G_ij = Φ(Tk_i)·Φ(Tk_j) / (h(k_i) h(k_j))."""
        return self.against(self._keys)

    def against(self, x: Tensor) -> Tensor:
        """(n, keys): Φ(Tx)·Φ(Tk_j) / (h(x) h(k_j) ḡ)."""
        if self._primal.is_softmax:
            log_h = self._log_sizes(x)
            return (self._scores(x) - log_h - self._log_h.T - self._log_unit).exp()
        h, h_k = (nonzero(self._h(y)) for y in (x, self._keys))
        return self._products(x) / h / h_k.T * math.exp(-self._log_unit)

    def per_dual(self) -> Tensor:
        """(keys, 1): 1/(h(k_j) ḡ), what a dual makes of a value."""
        if self._primal.is_softmax:
            return (-self._log_h - self._log_unit).exp()
        return math.exp(-self._log_unit) / nonzero(self._h(self._keys))

    def require_solvable(self) -> Tensor:
        """The Gram matrix; raise where keys differ too much in length, or are too long."""
        require_comparable(self._log_own(), self._log_h.squeeze(-1))
        G = self.gram()
        if not G.isfinite().all():
            raise AttentionError(
                "Φ(k_i)·Φ(k_j)/(h(k_i) h(k_j)) is not finite for all keys: the keys are not, or "
                "their products or h leave float64. Bring keys to a smaller length "
                "(keys=(RmsNorm(),) or (UnitLength(),)), or take a smaller scale."
            )
        return G

    def _scores(self, x: Tensor) -> Tensor:
        """(n, keys): log Φ(Tx)·Φ(Tk_j), of exponentials."""
        return self._primal.scores(self._transformed(x), self.k)

    def _products(self, x: Tensor) -> Tensor:
        """(n, keys): Φ(Tx)·Φ(Tk_j)."""
        return self._primal.products(self._transformed(x), self.k)

    def _h(self, x: Tensor) -> Tensor:
        """(n, 1): h(x) of its products with the keys."""
        return self._primal.h(self._products(x))

    def _log_sizes(self, x: Tensor) -> Tensor:
        """(n, 1): log |h(x)|."""
        if self._primal.is_softmax:
            return self._scores(x).logsumexp(-1, keepdim=True)
        return nonzero(self._h(x)).abs().log()

    def _log_own(self) -> Tensor:
        """(keys,): log Φ(Tk_j)·Φ(Tk_j)."""
        if self._primal.is_softmax:
            return self._scores(self._keys).diagonal()
        return self._products(self._keys).diagonal().log()

    def _transformed(self, x: Tensor) -> Tensor:
        keys = self._keys
        for step in self._primal.keys:
            x, keys = step.apply(x, keys), step.apply(keys, keys)
        return x


@dataclass(frozen=True)
class Solution:
    """A regression at its optimum: α − α̃, b, and the values that make attention of it.

    >>> from dualform.attention import Primal
    >>> solution = Primal(C=0.01).solve(torch.randn(8, 3), torch.randn(8, 1))
    >>> bool((solution.beta.abs() <= solution.C).all())
    True
    """

    features: _Features = field(repr=False)
    beta: Tensor
    """(keys, m): α − α̃, after shortening, in units of 1/ḡ."""
    b: Tensor
    values: Tensor
    """(n, m): v_j = (α_j − α̃_j)/h(k_j), for the keys as they were given."""
    C: float
    """The bound of the duals, in the same units: the problem's C."""
    gap: float
    """The largest relative duality gap of the outputs."""

    @property
    def support(self) -> Tensor:
        """(keys, m): which keys are support vectors, |α − α̃| > 1e-6 C."""
        return self.beta.abs() > 1e-6 * self.C

    def predict(self, x: Tensor) -> Tensor:
        """f(x) = Σ_j (α_j − α̃_j) Φ(Tx)·Φ(Tk_j)/(h(x) h(k_j)) + b, the regression as such."""
        return self.features.against(x.double()) @ self.beta + self.b
