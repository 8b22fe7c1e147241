"""Modified Bessel functions as the sphere needs them: smooth at 0, stable in any dimension.

With ν = d/2 − 1 and s = κ², two functions carry the von Mises–Fisher family:

    F_d(s) = log 0F1(; d/2; s/4) = log Γ(d/2) (2/κ)^ν I_ν(κ)        its log-normalizer
    R_d(s) = 2 F_d'(s) = I_{ν+1}(κ) / (κ I_ν(κ))                    its mean is R η

They obey R_d = 1 / (d + s R_{d+2}) and F_d = F_{d+2} + log(1 + s R_{d+2} / d), all terms positive.
So both start from Debye's uniform expansion `LEVELS` orders up and come down without cancellation,
and R_d' = ½ R_d (R_{d+2} − R_d) gives every derivative from the function itself.
"""

from typing import Any

import torch
from torch import Tensor

LEVELS = 64
MOST = 1e300
MOST_SCALINGS = 100
ROUNDING = 4e-16
BELOW_ONE = 1 - 2**-53
"""The greatest length of a mean, in float64."""


def log_hypergeometric(s: Tensor, d: int) -> Tensor:
    """F_d(s) = log 0F1(; d/2; s/4), for s ≥ 0.

    >>> s = torch.tensor(4.0, dtype=torch.float64)
    >>> log_hypergeometric(s, 3), torch.log(torch.sinh(s.sqrt()) / s.sqrt())
    (tensor(0.5952, dtype=torch.float64), tensor(0.5952, dtype=torch.float64))
    """
    value: Tensor = _LogHypergeometric.apply(s, d)  # type: ignore[no-untyped-call]
    return value


def ratio(s: Tensor, d: int) -> Tensor:
    """R_d(s) = I_{d/2}(√s) / (√s I_{d/2−1}(√s)), for s ≥ 0; 1/d at 0.

    >>> ratio(torch.tensor([0.0, 1e4]), 4) * torch.tensor([0.0, 1e2])
    tensor([0.0000, 0.9850])
    """
    value: Tensor = _Ratio.apply(s, d)  # type: ignore[no-untyped-call]
    return value


@torch.no_grad()
def concentration(r: Tensor, d: int) -> Tensor:
    """κ ≥ 0 with κ R_d(κ²) = r, for 0 ≤ r < 1, in float64: how concentrated a mean of length r is.

    Odds r/(1 − r) grow like κ, at both ends in proportion to it; so κ is scaled by what is missing.

    >>> kappa = concentration(torch.tensor([0.0, 0.5, 0.999]), 3)
    >>> kappa * ratio(kappa**2, 3)
    tensor([0.0000, 0.5000, 0.9990], dtype=torch.float64)
    """
    r = r.double()
    if d == 1:
        return torch.atanh(r)
    kappa = r * (d - r**2) / (1 - r**2)
    for _ in range(MOST_SCALINGS):
        found = kappa * ratio(kappa**2, d)
        if bool(((found - r).abs() <= ROUNDING * r).all()):
            break
        scale = r / found * ((1 - found) / (1 - r))
        kappa = torch.where((found > 0) & (found < 1), kappa * scale, kappa)
    return kappa


class _LogHypergeometric(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(s: Tensor, d: int) -> Tensor:
        return _value(_exact(s), d).to(s.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        _remember(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ratio(ctx.saved_tensors[0], ctx.d) / 2, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent * ratio(ctx.saved_tensors[0], ctx.d) / 2


class _Ratio(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(s: Tensor, d: int) -> Tensor:
        return _descend(_exact(s), d)[-1].to(s.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        _remember(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * _slope(ctx.saved_tensors[0], ctx.d), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent * _slope(ctx.saved_tensors[0], ctx.d)


def _remember(ctx: Any, inputs: tuple[Tensor, int]) -> None:
    s, ctx.d = inputs
    ctx.save_for_backward(s)
    ctx.save_for_forward(s)


def _slope(s: Tensor, d: int) -> Tensor:
    """R_d'(s)."""
    own = ratio(s, d)
    return own * (ratio(s, d + 2) - own) / 2


def _descend(s: Tensor, d: int) -> list[Tensor]:
    """R of dimension d + 2·LEVELS, …, d + 2, d."""
    levels = [_debye(s, d / 2 - 1 + LEVELS)[1]]
    for dimension in range(d + 2 * (LEVELS - 1), d - 1, -2):
        levels.append(1 / torch.addcmul(s.new_tensor(float(dimension)), s, levels[-1]))
    return levels


def _value(s: Tensor, d: int) -> Tensor:
    """F_d(s), in float64."""
    above = torch.stack(_descend(s, d)[:-1], dim=-1)
    dimensions = torch.arange(d + 2 * (LEVELS - 1), d - 1, -2, device=s.device)
    steps = torch.log1p(s.unsqueeze(-1) * above / dimensions)
    return _debye(s, d / 2 - 1 + LEVELS)[0] + steps.sum(-1)


def _exact(s: Tensor) -> Tensor:
    return s.double().clamp(max=MOST)


def _debye(s: Tensor, nu: float) -> tuple[Tensor, Tensor]:
    """F and R of order ν ≥ LEVELS − ½ by the uniform expansion in 1/ν, up to its fifth term."""
    rise = s / nu**2 / (1 + (1 + s / nu**2).sqrt())  # w − 1, w = √(1 + s/ν²), to all its digits
    log_w = torch.log1p(rise)
    w, t = 1 + rise, torch.exp(-log_w)
    u0, change, du = _series(log_w, nu)  # F is 0 at 0, and small beside it: only changes are taken
    F = nu * (rise - torch.log1p(rise / 2)) - log_w / 2 + torch.log1p(change / (1 + u0))
    # dt/ds = −t³ / 2ν², and R = 2 dF/ds
    R = 1 / (nu * (1 + w)) - t**2 / (2 * nu**2) - du / (1 + u0 + change) * t**3 / nu**2
    return F, R


def _series(log_w: Tensor, nu: float) -> tuple[float, Tensor, Tensor]:
    """u(1), u(t) − u(1) and u'(t), with u(t) = u_1(t)/ν + u_2(t)/ν² + … and t = 1/w."""
    start, change, slope = 0.0, torch.zeros_like(log_w), torch.zeros_like(log_w)
    for order, (coefficients, divisor) in enumerate(DEBYE, start=1):
        for step, c in enumerate(coefficients):
            power = order + 2 * step
            scale = c / divisor / nu**order
            start += scale
            change = change + scale * torch.expm1(-power * log_w)
            slope = slope + scale * power * torch.exp(-(power - 1) * log_w)
    return start, change, slope


DEBYE = (
    ((3, -5), 24),
    ((81, -462, 385), 1152),
    ((30375, -369603, 765765, -425425), 414720),
    ((4465125, -94121676, 349922430, -446185740, 185910725), 39813120),
    (
        (1519035525, -49286948607, 284499769554, -614135872350, 566098157625, -188699385875),
        6688604160,
    ),
)
"""The polynomials u_k of the expansion: coefficients of t^k, t^(k+2), … and their divisor."""
