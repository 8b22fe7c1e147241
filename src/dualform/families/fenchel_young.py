"""Sparse relatives of softmax: ŷ = ∇Ω*(θ), where Ω is a negative entropy of Tsallis.

Softmax is the α = 1 member, sparsemax α = 2. With ε = α − 1 all of them read

    p_i = [1 + ε (θ_i − c)]₊^{1/ε},     c such that Σ p_i = 1

which tends to exp(θ_i − c) as ε → 0 without losing digits. For α ≤ 2 the norm of order 1/ε of
[1 + ε(θ − c)]₊ is convex in c, so Newton's method on it climbs to the root from c = max θ and never
passes it; for α = 2 it ends exactly, after finitely many steps. (Martins and Astudillo, ICML 2016;
Peters, Niculae and Martins, ACL 2019; Blondel, Martins and Niculae, JMLR 2020.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.checks import visible

NEWTON = 50
WORTHWHILE = 256
"""Rows shorter than this are not narrowed first."""
BISECTIONS = 80


def entmax(
    theta: Float[Tensor, "*shape"], alpha: float = 1.5, dim: int = -1
) -> Float[Tensor, "*shape"]:
    """p = argmax_p θ·p − Ω_α(p) over probabilities: softmax at α = 1, sparse above it.

    −∞ takes no part; where all of a row is −∞, p is 0.

    >>> theta = torch.tensor([2.0, 1.0, -1.0])
    >>> entmax(theta, alpha=1.5), entmax(theta, alpha=1.0)
    (tensor([0.8307, 0.1693, 0.0000]), tensor([0.7054, 0.2595, 0.0351]))
    """
    _require_alpha(alpha)
    rows = theta.movedim(dim, -1)
    nothing = (rows == -torch.inf).all(-1, keepdim=True)
    filled = rows.masked_fill(nothing, 0)
    p: Tensor = filled.softmax(-1) if alpha == 1 else _Entmax.apply(filled, alpha)  # type: ignore[no-untyped-call]
    return p.masked_fill(nothing, 0).movedim(-1, dim)


def sparsemax(theta: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
    """The nearest probabilities: argmin_p ‖p − θ‖, which is entmax at α = 2.

    >>> sparsemax(torch.tensor([2.0, 1.5, -1.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    return entmax(theta, 2.0, dim)


@dataclass(frozen=True)
class Tsallis:
    """Ω_α(p) = (Σ p_i^α − 1) / (α(α − 1)), and what follows from it by duality.

    At α = 1 it is Shannon's negative entropy, Ω* is log-sum-exp and the loss is cross-entropy.

    >>> theta, y = torch.tensor([2.0, 1.0, -1.0]), torch.tensor([1.0, 0.0, 0.0])
    >>> Tsallis(1.0).loss(theta, y), torch.nn.functional.cross_entropy(theta, y)
    (tensor(0.3490), tensor(0.3490))
    >>> Tsallis(2.0).loss(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 0.0]))  # a margin of 1
    tensor(0.)
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        _require_alpha(self.alpha)

    def omega(self, p: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
        """Ω_α(p).

        >>> Tsallis(2.0).omega(torch.tensor([0.5, 0.5]))  # ½ (‖p‖² − 1)
        tensor(-0.2500)
        """
        epsilon = self.alpha - 1
        positive = torch.where(p > 0, p, 1)
        log = positive.log()
        gain = torch.expm1(epsilon * log) / epsilon if epsilon else log
        return (p * gain).sum(-1) / self.alpha

    def prediction(self, theta: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """∇Ω*(θ) = entmax(θ).

        >>> Tsallis(2.0).prediction(torch.tensor([3.0, 1.0]))
        tensor([1., 0.])
        """
        return entmax(theta, self.alpha)

    def conjugate(self, theta: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
        """Ω*(θ) = max_p θ·p − Ω(p): the soft maximum whose gradient is the prediction.

        >>> theta = torch.tensor([1.0, 2.0])
        >>> Tsallis(1.0).conjugate(theta), theta.logsumexp(-1)
        (tensor(2.3133), tensor(2.3133))
        """
        p = self.prediction(theta)
        return _product(theta, p) - self.omega(p)

    def jacobian(self, theta: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n n"]:
        """∇²Ω*(θ) = diag(s) − s sᵀ / Σs with s = p^{2−α} on the support: a covariance, sparse.

        >>> Tsallis(1.0).jacobian(torch.zeros(2))
        tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]])
        """
        s = _sensitivity(self.prediction(theta), self.alpha)
        total = s.sum(-1, keepdim=True)
        share = s / torch.where(total > 0, total, 1)
        across = share.unsqueeze(-1) * s.unsqueeze(-2)
        across = across - across.diagonal(dim1=-2, dim2=-1).diag_embed()
        return across.sum(-1).diag_embed() - across  # rows sum to 0

    def loss(
        self, theta: Float[Tensor, "*batch n"], y: Float[Tensor, "*batch n"]
    ) -> Float[Tensor, "*batch"]:
        """Ω*(θ) + Ω(y) − θ·y ≥ 0, and 0 only where the prediction is y.

        >>> theta = torch.randn(3)
        >>> abs(Tsallis().loss(theta, Tsallis().prediction(theta)).item()) < 1e-6
        True
        """
        return self.conjugate(theta) + self.omega(y) - _product(theta, y)


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(theta: Tensor, alpha: float) -> Tensor:
        exact = theta.double() if theta.dtype.itemsize < 4 or alpha > 2 else theta
        return (_newton(exact, alpha) if alpha <= 2 else _halved(exact, alpha)).to(theta.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.alpha = inputs[1]
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _along(ctx.saved_tensors[0], ctx.alpha, gradient), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _along(ctx.saved_tensors[0], ctx.alpha, tangent)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None], theta: Tensor, alpha: float
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        p: Tensor = _Entmax.apply(theta.movedim(in_dims[0], 0), alpha)  # type: ignore[no-untyped-call]
        return p, 0


def _product(theta: Tensor, p: Tensor) -> Tensor:
    """θ·p, where −∞ · 0 is 0."""
    return (torch.where((theta == -torch.inf) & (p == 0), 0, theta) * p).sum(-1)


def _sensitivity(p: Tensor, alpha: float) -> Tensor:
    """s = p^{2−α} on the support, 0 off it."""
    return torch.where(p > 0, torch.where(p > 0, p, 1) ** (2 - alpha), 0)


def _along(p: Tensor, alpha: float, t: Tensor) -> Tensor:
    """The Jacobian times t; it is symmetric, so this serves both directions."""
    wide = p.double() if alpha > 2 else p  # small p have large s
    s = _sensitivity(wide, alpha)
    # measured from the t of the largest s, where t and its average would cancel
    apart = t.to(s.dtype) - t.to(s.dtype).gather(-1, s.argmax(-1, keepdim=True))
    share = s / s.sum(-1, keepdim=True)
    return (s * apart - share * (s * apart).sum(-1, keepdim=True)).to(p.dtype)


def _power(theta: Tensor, c: Tensor, epsilon: float) -> Tensor:
    """[1 + ε (θ − c)]₊^{1/ε}."""
    x = (epsilon * (theta - c)).clamp(min=-1)
    if epsilon in (0.5, 1):  # exact, and much faster
        return x + 1 if epsilon == 1 else (x + 1).square()
    return torch.exp(torch.log1p(x) / epsilon)


def _newton(theta: Tensor, alpha: float) -> Tensor:
    p = _power(theta, _threshold(_candidates(theta, alpha - 1), alpha), alpha - 1)
    return p / p.sum(-1, keepdim=True)


def _candidates(theta: Tensor, epsilon: float) -> Tensor:
    """The scores that can have weight, as c ≥ max θ: those above max θ − 1/ε; few, if many."""
    if not visible(theta) or theta.shape[-1] < WORTHWHILE:
        return theta
    above = theta > theta.amax(-1, keepdim=True) - 1 / epsilon
    most = int(above.sum(-1).max())
    return theta.topk(most, sorted=False).values if 4 * most < theta.shape[-1] else theta


def _threshold(theta: Tensor, alpha: float) -> Tensor:
    """c, by Newton's method from max θ: it climbs until it stops."""
    epsilon = alpha - 1
    c = theta.amax(-1, keepdim=True)
    enough = torch.finfo(theta.dtype).eps * max(4.0, theta.shape[-1] ** 0.5)
    for _ in range(NEWTON):
        p = _power(theta, c, epsilon)
        total = p.sum(-1, keepdim=True)
        excess = torch.expm1(epsilon * total.log()) / epsilon
        slope = _sensitivity(p, alpha).sum(-1, keepdim=True)
        c = c + excess * total ** (1 - epsilon) / slope
        if visible(c) and bool((total - 1 <= enough).all()):
            break
    return c


def _halved(theta: Tensor, alpha: float) -> Tensor:
    """Where the power is concave Newton's method may leave the support; halving does not.

    There p has an infinite slope where it begins, so c itself would not do: the unknown is the
    least probability of the support, x, and p_i = [x^ε + ε(θ_i − θ_m)]^{1/ε} with m its element.
    """
    epsilon = alpha - 1
    far = epsilon * (theta.amax(-1, keepdim=True) - theta)
    least = _last(far, epsilon)
    above, inside = (least - far).clamp(min=0), far <= least
    low, high = torch.zeros_like(least), torch.ones_like(least)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        p = torch.where(inside, (middle**epsilon + above) ** (1 / epsilon), 0)
        over = p.sum(-1, keepdim=True) >= 1
        low, high = torch.where(over, low, middle), torch.where(over, middle, high)
    p = torch.where(inside, (low**epsilon + above) ** (1 / epsilon), 0)
    return p / p.sum(-1, keepdim=True)


def _last(far: Tensor, epsilon: float) -> Tensor:
    """The largest distance from the maximum at which weight begins before all weight is given."""
    ordered = far.sort(-1).values
    low = torch.zeros_like(far[..., :1], dtype=torch.long)
    high = torch.full_like(low, far.shape[-1] - 1)
    for _ in range(far.shape[-1].bit_length()):
        middle = (low + high + 1) // 2
        height = ordered.gather(-1, middle)
        power = (height - far).nan_to_num(nan=0.0).clamp(min=0) ** (1 / epsilon)
        begins = power.sum(-1, keepdim=True) < 1
        low, high = torch.where(begins, middle, low), torch.where(begins, high, middle - 1)
    return ordered.gather(-1, low)


def _require_alpha(alpha: float) -> None:
    if not 1 <= alpha < float("inf"):
        raise FamilyError(
            f"alpha={alpha} is no entmax; 1 is softmax, 1.5 usual, 2 sparsemax, and larger ones "
            "are sparser still."
        )
