"""The derivation of a layer from its primal problem, written out with the choices filled in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dualform.attention.losses import Loss
from dualform.attention.transforms import Shorten, Transform
from dualform.errors import AttentionError
from dualform.memory import Exponential, FeatureMap, Kernel

Sees = Literal["all", "causal"] | int
Normalizer = Literal["sum", "one"] | Callable[[Tensor], Tensor]
"""h(x) of the products Φ(Tx)·Φ(Tk_j), (…, n, keys that are seen): their sum, 1, or a function."""
STANDS_IN = r"\text{in a network } v_j = W_V x_j \text{ stands in for them}"


@dataclass(frozen=True)
class Problem:
    """The choices that make a primal problem; `Primal` says what each means.

    >>> print(Problem(sees=3).explain(latex=True).splitlines()[0])
    \\begin{align*}
    """

    kernel: Kernel = field(default_factory=Exponential)
    normalizer: Normalizer = "sum"
    sees: Sees = "all"
    keys: tuple[Transform, ...] = ()
    epsilon: float = 0.1
    C: float = 1.0
    loss: Loss | None = None

    def __post_init__(self) -> None:
        if isinstance(self.kernel, Exponential) and self.normalizer == "one":
            raise AttentionError(
                "Exponential with normalizer='one' would be a sum of unbounded exponentials; use "
                "normalizer='sum', or a kernel with finite features."
            )
        if self.sees not in ("all", "causal") and not (
            isinstance(self.sees, int) and self.sees >= 0
        ):
            raise AttentionError(
                f"sees={self.sees!r} says nothing; give 'all', 'causal', or how many keys on each "
                "side."
            )
        if self.normalizer not in ("sum", "one") and not callable(self.normalizer):
            raise AttentionError(
                f"normalizer={self.normalizer!r} is unknown; give 'sum', 'one', or a function of "
                "the products with the keys (…, n, keys) that gives (…, n, 1)."
            )
        if not (self.C > 0 and self.epsilon >= 0):
            raise AttentionError(
                f"C={self.C} and epsilon={self.epsilon} make no regression; C must be positive, "
                "and epsilon not negative."
            )
        if any(isinstance(step, Shorten) for step in self.keys[1:]):
            raise AttentionError("Shorten must come first in keys: it is about the data.")
        if isinstance(self.kernel, Exponential) and type(self.kernel) is not Exponential:
            raise AttentionError(
                f"kernel={self.kernel} is made from Exponential, whose weights are known without "
                "asking it; make a Kernel of your own that gives the products instead."
            )
        if not isinstance(self.kernel, (Exponential, FeatureMap)) and (
            not isinstance(self.kernel, Kernel) or self.kernel.normalized
        ):
            raise AttentionError(
                f"kernel={self.kernel} gives no products Φ(x)·Φ(y); give Exponential, a FeatureMap "
                "or a Kernel of your own that is not normalized: h is the problem's normalizer."
            )

    def products(self, x: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
        """Φ(x_i)·Φ(k_j), (…, n, keys), of rows that are transformed already.

        `scale` is that of an `Exponential` kernel without one of its own, 1/√D unless given.

        >>> Problem(kernel=Exponential(scale=1.0)).products(torch.zeros(1, 2), torch.ones(3, 2))
        tensor([[1., 1., 1.]])
        """
        if isinstance(self.kernel, FeatureMap):
            return self.kernel.features(x) @ self.kernel.features(k).mT
        if not isinstance(self.kernel, Exponential):
            return self.kernel(x, k)
        return self.scores(x, k, scale).exp()

    @property
    def is_softmax(self) -> bool:
        """Whether weights are exponentials over their sum, so that logarithms are enough.

        >>> Problem().is_softmax, Problem(normalizer=lambda p: 1 + p.sum(-1, True)).is_softmax
        (True, False)
        """
        return isinstance(self.kernel, Exponential) and self.normalizer == "sum"

    def scores(self, x: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
        """log Φ(x_i)·Φ(k_j), (…, n, keys), of an `Exponential` kernel.

        >>> Problem().scores(torch.ones(1, 4), torch.ones(3, 4))
        tensor([[2., 2., 2.]])
        """
        assert isinstance(self.kernel, Exponential)
        own = scale if self.kernel.scale is None else self.kernel.scale
        return (x.shape[-1] ** -0.5 if own is None else own) * x @ k.mT

    def h(self, products: Tensor) -> Tensor:
        """(…, n, 1): the normalizer of products (…, n, keys).

        >>> Problem(normalizer=lambda p: 1 + p.sum(-1, keepdim=True)).h(torch.ones(2, 3))
        tensor([[4.],
                [4.]])
        """
        if callable(self.normalizer):
            h = self.normalizer(products)
            if h.shape != (*products.shape[:-1], 1):
                raise AttentionError(
                    f"the normalizer made {tuple(h.shape)} of products {tuple(products.shape)}; it "
                    f"must give one number a row, {(*products.shape[:-1], 1)}."
                )
            return h
        if self.normalizer == "sum":
            return products.sum(-1, keepdim=True)
        return torch.ones_like(products[..., :1])

    def explain(self, latex: bool = False) -> str:
        """The derivation of the layer with these choices filled in, as text or as LaTeX.

        >>> print(Problem().explain().splitlines()[-1])
        y(q) = Σ_j exp(q·k_j/√D) v_j / Σ_j exp(q·k_j/√D) + b, over all keys
        """
        return _latex(self) if latex else _text(self)


def _text(primal: Problem) -> str:
    T = "T" if _maps(primal) else ""
    h = {"sum": f"Σ_j Φ({T}x)·Φ({T}k_j)", "one": "1"}.get(_named(primal), _named(primal))
    product = _product(primal, f"{T}q", f"{T}k_j")
    over = {"sum": f" / Σ_j {product}", "one": ""}.get(_named(primal), " / h(q)")
    lines = [
        f"Model     f(x) = W Φ({T}x)/h(x) + b with h(x) = {h}, {_sees(primal)}",
        f"Features  Φ(x)·Φ(y) = {_product(primal, 'x', 'y')}",
        *(f"Inputs    {step}" for step in primal.keys),
        *_fit(primal, T),
        f"y(q) = Σ_j {product} v_j{over} + b, {_sees(primal)}",
    ]
    return "\n".join(lines)


def _fit(primal: Problem, T: str) -> list[str]:
    """The lines that depend on the loss."""
    G = f"G_ij = Φ({T}k_i)·Φ({T}k_j)/(h(k_i) h(k_j))"
    C = f"C = {primal.C:g}/ḡ, ḡ the geometric mean of G_jj"
    if primal.loss is not None:
        return [
            f"Primal    min ½‖W‖² + C Σ_j ℓ(y_j − f(k_j)), ℓ of {primal.loss}, {C}",
            f"KKT       W = Σ_j α_j Φ({T}k_j)/h(k_j), α_j = C ℓ'(y_j − f(k_j))",
            f"Dual      max y·α − C Σ_j ℓ*(α_j/C) − ½ αᵀGα, {G}, Σα = 0",
            "Values    v_j = α_j/h(k_j); in a network v_j = W_V x_j stands in for them",
        ]
    return [
        "Primal    min ½‖W‖² + C Σ_j (ξ_j + ξ̃_j), |y_j − f(k_j)| ≤ ε + ξ_j, "
        f"ε = {primal.epsilon:g}, {C}",
        f"KKT       W = Σ_j (α_j − α̃_j) Φ({T}k_j)/h(k_j), 0 ≤ α, α̃ ≤ C",
        f"Dual      max y·(α − α̃) − ε Σ(α + α̃) − ½ (α − α̃)ᵀG(α − α̃), {G}, Σ(α − α̃) = 0",
        "Values    v_j = (α_j − α̃_j)/h(k_j); in a network v_j = W_V x_j stands in for them",
    ]


def _fit_latex(primal: Problem, T: str) -> list[str]:
    if primal.loss is not None:
        return _smooth_latex(primal, primal.loss, T)
    return [
        r"\min_W \ & \tfrac12\lVert W\rVert^2 + C\sum_j(\xi_j + \tilde\xi_j), \quad "
        r"\lvert y_j - f(k_j)\rvert \le \varepsilon + \xi_j, \quad "
        rf"\varepsilon = {primal.epsilon:g},\ C = {primal.C:g}/\bar g",
        rf"W &= \sum_j (\alpha_j - \tilde\alpha_j)\,\Phi({T}k_j)/h(k_j), \quad "
        r"0 \le \alpha_j, \tilde\alpha_j \le C",
        r"\max_{\alpha,\tilde\alpha} \ & y^\top(\alpha - \tilde\alpha) "
        r"- \varepsilon\textstyle\sum_j(\alpha_j + \tilde\alpha_j) "
        r"- \tfrac12(\alpha - \tilde\alpha)^\top G(\alpha - \tilde\alpha), \quad "
        r"\textstyle\sum_j(\alpha_j - \tilde\alpha_j) = 0",
        _gram_latex(T),
        rf"v_j &= (\alpha_j - \tilde\alpha_j)/h(k_j), \quad {STANDS_IN}",
    ]


def _smooth_latex(primal: Problem, loss: Loss, T: str) -> list[str]:
    return [
        r"\min_W \ & \tfrac12\lVert W\rVert^2 + C\sum_j \ell(y_j - f(k_j)), \quad "
        rf"\ell(r) = {loss.formula},\ C = {primal.C:g}/\bar g",
        rf"W &= \sum_j \alpha_j\,\Phi({T}k_j)/h(k_j), \quad \alpha_j = C\,\ell'(y_j - f(k_j))",
        r"\max_\alpha \ & y^\top\alpha - C\textstyle\sum_j \ell^*(\alpha_j/C) "
        r"- \tfrac12\alpha^\top G\alpha, \quad \textstyle\sum_j\alpha_j = 0",
        _gram_latex(T),
        rf"v_j &= \alpha_j/h(k_j), \quad {STANDS_IN}",
    ]


def _gram_latex(T: str) -> str:
    """The matrix of the dual, and the unit of its bound."""
    return (
        rf"G_{{ij}} &= \Phi({T}k_i)^\top\Phi({T}k_j)/(h(k_i)\,h(k_j)), \quad "
        r"\bar g = \textstyle\prod_j G_{jj}^{1/n}"
    )


def _latex(primal: Problem) -> str:
    T = "T" if _maps(primal) else ""
    name = _named(primal)
    h = {"sum": rf"\sum_j \Phi({T}x)^\top\Phi({T}k_j)", "one": "1"}
    h_text = h.get(name, rf"\mathrm{{{name}}}")
    product = _product_latex(primal, f"{T}q", f"{T}k_j")
    read = rf"\sum_j {product}\, v_j"
    under = {"sum": rf"\sum_j {product}", "one": ""}.get(name, "h(q)")
    read = rf"\frac{{{read}}}{{{under}}}" if under else read
    lines = [
        rf"f(x) &= W\,\Phi({T}x)/h(x) + b, \quad h(x) = {h_text}",
        *_data_latex(primal),
        *(rf"T x &= {step.formula}" for step in primal.keys if not isinstance(step, Shorten)),
        *_fit_latex(primal, T),
        rf"y(q) &= {read} + b",
    ]
    return "\n".join([r"\begin{align*}", " \\\\\n".join(lines), r"\end{align*}"])


def _named(primal: Problem) -> str:
    """The normalizer's name: sum, one, or that of the function."""
    given = primal.normalizer
    return given if isinstance(given, str) else getattr(given, "__name__", repr(given))


def _data_latex(primal: Problem) -> list[str]:
    """What the features are, and over which keys every sum goes."""
    kernel = str(primal.kernel).replace("_", r"\_")
    features = rf"\Phi &= \varphi \text{{ of {kernel}}}"
    if not isinstance(primal.kernel, FeatureMap):
        of = "" if isinstance(primal.kernel, Exponential) else rf" \text{{ of {kernel}}}"
        features = rf"\Phi(x)^\top\Phi(y) &= {_product_latex(primal, 'x', 'y')}{of}"
    return [features, rf"\textstyle\sum_j &\ \text{{{_sees(primal)}}}"]


def _maps(primal: Problem) -> bool:
    return any(not isinstance(step, Shorten) for step in primal.keys)


def _sees(primal: Problem) -> str:
    whole = "all keys" if primal.sees == "all" else "keys up to the query's position"
    seen = f"keys at most {primal.sees} away" if isinstance(primal.sees, int) else whole
    short = [step for step in primal.keys if isinstance(step, Shorten)]
    return f"over {seen}" + "".join(f", {step.pool} of every {step.factor}" for step in short)


def _product(primal: Problem, x: str, y: str) -> str:
    if isinstance(primal.kernel, Exponential):
        scale = primal.kernel.scale
        return f"exp({x}·{y}/√D)" if scale is None else f"exp({scale:g} {x}·{y})"
    of = f" of {primal.kernel}" if x == "x" else ""
    return (f"φ({x})·φ({y})" if isinstance(primal.kernel, FeatureMap) else f"κ({x}, {y})") + of


def _product_latex(primal: Problem, x: str, y: str) -> str:
    if isinstance(primal.kernel, Exponential):
        scale = primal.kernel.scale
        factor = r"/\sqrt{D}" if scale is None else rf"\cdot {scale:g}"
        return rf"\exp(({x})^\top ({y}){factor})"
    if not isinstance(primal.kernel, FeatureMap):
        return rf"\kappa({x}, {y})"
    return rf"\varphi({x})^\top\varphi({y})"
