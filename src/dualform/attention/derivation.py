"""The derivation of a layer from its primal problem, written out with the choices filled in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dualform.attention.transforms import Shorten, Transform
from dualform.errors import AttentionError
from dualform.memory import Exponential, FeatureMap, Kernel

Sees = Literal["all", "causal"] | int


@dataclass(frozen=True)
class Problem:
    """The choices that make a primal problem; `Primal` says what each means.

    >>> print(Problem(sees=3).explain(latex=True).splitlines()[0])
    \\begin{align*}
    """

    kernel: Kernel = field(default_factory=Exponential)
    normalizer: Literal["sum", "one"] = "sum"
    sees: Sees = "all"
    keys: tuple[Transform, ...] = ()
    epsilon: float = 0.1
    C: float = 1.0

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
        if self.normalizer not in ("sum", "one"):
            raise AttentionError(f"normalizer={self.normalizer!r} is unknown; give 'sum' or 'one'.")
        if not (self.C > 0 and self.epsilon >= 0):
            raise AttentionError(
                f"C={self.C} and epsilon={self.epsilon} make no regression; C must be positive, "
                "and epsilon not negative."
            )
        if any(isinstance(step, Shorten) for step in self.keys[1:]):
            raise AttentionError("Shorten must come first in keys: it is about the data.")
        if not isinstance(self.kernel, (Exponential, FeatureMap)):
            raise AttentionError(f"{self.kernel} is neither Exponential nor a FeatureMap.")

    def explain(self, latex: bool = False) -> str:
        """The derivation of the layer with these choices filled in, as text or as LaTeX.

        >>> print(Problem().explain().splitlines()[-1])
        y(q) = Σ_j exp(q·k_j/√D) v_j / Σ_j exp(q·k_j/√D) + b, over all keys
        """
        return _latex(self) if latex else _text(self)


def _text(primal: Problem) -> str:
    T = "T" if _maps(primal) else ""
    h = f"Σ_j Φ({T}x)·Φ({T}k_j)" if primal.normalizer == "sum" else "1"
    product = _product(primal, f"{T}q", f"{T}k_j")
    over = f" / Σ_j {product}" if primal.normalizer == "sum" else ""
    lines = [
        f"Model     f(x) = W Φ({T}x)/h(x) + b with h(x) = {h}, {_sees(primal)}",
        f"Features  Φ(x)·Φ(y) = {_product(primal, 'x', 'y')}",
        *(f"Inputs    {step}" for step in primal.keys),
        "Primal    min ½‖W‖² + C Σ_j (ξ_j + ξ̃_j), |y_j − f(k_j)| ≤ ε + ξ_j, "
        f"ε = {primal.epsilon:g}, C = {primal.C:g}/ḡ, ḡ the geometric mean of G_jj",
        f"KKT       W = Σ_j (α_j − α̃_j) Φ({T}k_j)/h(k_j), 0 ≤ α, α̃ ≤ C",
        "Dual      max y·(α − α̃) − ε Σ(α + α̃) − ½ (α − α̃)ᵀG(α − α̃), "
        f"G_ij = Φ({T}k_i)·Φ({T}k_j)/(h(k_i) h(k_j)), Σ(α − α̃) = 0",
        "Values    v_j = (α_j − α̃_j)/h(k_j); in a network v_j = W_V x_j stands in for them",
        f"y(q) = Σ_j {product} v_j{over} + b, {_sees(primal)}",
    ]
    return "\n".join(lines)


def _latex(primal: Problem) -> str:
    T = "T" if _maps(primal) else ""
    h = rf"\sum_j \Phi({T}x)^\top\Phi({T}k_j)" if primal.normalizer == "sum" else "1"
    product = _product_latex(primal, f"{T}q", f"{T}k_j")
    read = rf"\sum_j {product}\, v_j"
    read = rf"\frac{{{read}}}{{\sum_j {product}}}" if primal.normalizer == "sum" else read
    lines = [
        rf"f(x) &= W\,\Phi({T}x)/h(x) + b, \quad h(x) = {h}",
        *_data_latex(primal),
        *(rf"T x &= {step.formula}" for step in primal.keys if not isinstance(step, Shorten)),
        r"\min_W \ & \tfrac12\lVert W\rVert^2 + C\sum_j(\xi_j + \tilde\xi_j), \quad "
        r"\lvert y_j - f(k_j)\rvert \le \varepsilon + \xi_j, \quad "
        rf"\varepsilon = {primal.epsilon:g},\ C = {primal.C:g}/\bar g",
        rf"W &= \sum_j (\alpha_j - \tilde\alpha_j)\,\Phi({T}k_j)/h(k_j), \quad "
        r"0 \le \alpha_j, \tilde\alpha_j \le C",
        *_dual_latex(T),
        r"v_j &= (\alpha_j - \tilde\alpha_j)/h(k_j), \quad "
        r"\text{in a network } v_j = W_V x_j \text{ stands in for them}",
        rf"y(q) &= {read} + b",
    ]
    return "\n".join([r"\begin{align*}", " \\\\\n".join(lines), r"\end{align*}"])


def _data_latex(primal: Problem) -> list[str]:
    """What the features are, and over which keys every sum goes."""
    if isinstance(primal.kernel, Exponential):
        features = rf"\Phi(x)^\top\Phi(y) &= {_product_latex(primal, 'x', 'y')}"
    else:
        kernel = str(primal.kernel).replace("_", r"\_")
        features = rf"\Phi &= \varphi \text{{ of {kernel}}}"
    return [features, rf"\textstyle\sum_j &\ \text{{{_sees(primal)}}}"]


def _dual_latex(T: str) -> list[str]:
    """The dual, its matrix and the unit of its bound."""
    return [
        r"\max_{\alpha,\tilde\alpha} \ & y^\top(\alpha - \tilde\alpha) "
        r"- \varepsilon\textstyle\sum_j(\alpha_j + \tilde\alpha_j) "
        r"- \tfrac12(\alpha - \tilde\alpha)^\top G(\alpha - \tilde\alpha), \quad "
        r"\textstyle\sum_j(\alpha_j - \tilde\alpha_j) = 0",
        rf"G_{{ij}} &= \Phi({T}k_i)^\top\Phi({T}k_j)/(h(k_i)\,h(k_j)), \quad "
        r"\bar g = \textstyle\prod_j G_{jj}^{1/n}",
    ]


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
    return f"φ({x})·φ({y})" + (f" of {primal.kernel}" if x == "x" else "")


def _product_latex(primal: Problem, x: str, y: str) -> str:
    if isinstance(primal.kernel, Exponential):
        scale = primal.kernel.scale
        factor = r"/\sqrt{D}" if scale is None else rf"\cdot {scale:g}"
        return rf"\exp(({x})^\top ({y}){factor})"
    return rf"\varphi({x})^\top\varphi({y})"
