"""What can be said of a fixed point: that it is one, that nothing rose, and that it stays."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.families.fixed_points.solve import Step, solve
from dualform.families.fixed_points.steps import AttentionStep
from dualform.families.normalizer import LogNormalizer

POWER = 50


@dataclass(frozen=True, eq=False)
class Certificate:
    """Evidence for convergence: (steps + 1, states) energies, residuals and Lipschitz estimates.

    >>> from dualform.families import Empirical
    >>> from dualform.families.fixed_points import Decay
    >>> step = AttentionStep(LogNormalizer(Empirical(torch.eye(3)), 0.2), Decay(0.5))
    >>> certify(step, torch.eye(3), steps=200)
    Certificate(energy never rose, residual 0.0e+00, contracts by 0.555)
    """

    x: Tensor
    energies: Tensor
    residual: Tensor
    lipschitz: Tensor
    """‖J‖ at x, estimated: below 1 the step contracts there, and the fixed point attracts."""

    @property
    def descends(self) -> bool:
        """Whether the energy never rose, but for rounding."""
        slack = 16 * torch.finfo(self.energies.dtype).eps * (1 + self.energies.abs())
        return bool((self.energies.diff(dim=0) <= slack[1:]).all())

    @property
    def contracts(self) -> bool:
        """Whether the step contracts at every state."""
        return bool((self.lipschitz < 1).all())

    def __repr__(self) -> str:
        verdict = "never rose" if self.descends else "rose"
        worst = float(self.lipschitz.max())
        far = float(self.residual.max())
        rate = f"contracts by {worst:.3g}" if self.contracts else f"‖J‖ up to {worst:.3g}"
        return f"Certificate(energy {verdict}, residual {far:.1e}, {rate})"


def certify(step: AttentionStep, x: Float[Tensor, "n d"], *, steps: int) -> Certificate:
    """Iterates, keeping the energy, and estimates the Lipschitz constant where it ends.

    >>> from dualform.families import Hypercube
    >>> from dualform.families.fixed_points import Decay
    >>> step = AttentionStep(LogNormalizer(Hypercube(2)), Decay(0.5))
    >>> certify(step, torch.ones(1, 2), steps=99).descends
    True
    """
    with torch.no_grad():
        energies = [step.energy(x)]
        for _ in range(steps):
            x = step(x)
            energies.append(step.energy(x))
        residual = (step(x) - x).norm(dim=-1)
    return Certificate(x, torch.stack(energies), residual, lipschitz(step, x))


def lipschitz(step: Step, x: Float[Tensor, "n d"], iterations: int = POWER) -> Float[Tensor, " n"]:
    """‖J‖ of the step at each state, by power iteration on JᵀJ: from below, and nearly so.

    >>> A = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    >>> lipschitz(lambda x: x @ A, torch.ones(1, 2))
    tensor([3.])
    """
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        y = step(at)
        dual = torch.ones_like(y, requires_grad=True)
        (pulled,) = torch.autograd.grad(y, at, dual, create_graph=True)
    # a direction that no symmetry of the step or of x makes orthogonal to the one that is sought
    u = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    size = torch.ones_like(x[..., 0])
    for _ in range(iterations):
        (pushed,) = torch.autograd.grad(pulled, dual, u, retain_graph=True)  # J u
        size = pushed.norm(dim=-1)
        (u,) = torch.autograd.grad(y, at, pushed, retain_graph=True)  # Jᵀ J u
        u = torch.nn.functional.normalize(u, dim=-1)
    return size


def stability(G: LogNormalizer, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """The largest eigenvalue of ∇²G(x) = Cov/T: x ← ∇G(x) is stable at x where it is below 1.

    Retrieval fails where the patterns that answer to x vary by more than the temperature.

    >>> from dualform.families import Gaussian
    >>> stability(LogNormalizer(Gaussian(torch.zeros(2)), 0.5), torch.zeros(2))
    tensor(2.)
    """
    largest: Tensor = torch.linalg.eigvalsh(G.jacobian(x))[..., -1]
    return largest


@dataclass(frozen=True, eq=False)
class Basins:
    """The distinct limits, and which of them each start was drawn to.

    >>> from dualform.families import Empirical
    >>> from dualform.families.fixed_points import Decay
    >>> G = LogNormalizer(Empirical(torch.tensor([[-1.0], [1.0]])), 0.1)
    >>> step = AttentionStep(G, Decay(1.0), residual=False)
    >>> basins(step, torch.linspace(-1, 1, 10).unsqueeze(-1))
    Basins(2 limits; shares 0.50, 0.50)
    """

    limits: Tensor
    labels: Tensor
    converged: bool

    @property
    def shares(self) -> Tensor:
        """How many of the starts each limit drew, as a share."""
        return torch.bincount(self.labels, minlength=len(self.limits)) / len(self.labels)

    def __repr__(self) -> str:
        shown = ", ".join(f"{share:.2f}" for share in self.shares.tolist()[:8])
        more = ", …" if len(self.limits) > 8 else ""
        found = "limits" if self.converged else "places, not converged"
        return f"Basins({len(self.limits)} {found}; shares {shown}{more})"


def basins(
    step: Step, starts: Float[Tensor, "n d"], *, tolerance: float = 1e-3, steps: int = 1000
) -> Basins:
    """Follows every start to its limit; limits nearer than the tolerance are the same one.

    Starts are followed by plain iteration: a solver that leaps may land in another basin.

    >>> basins(lambda x: x / 2, torch.randn(7, 2)).limits.shape
    torch.Size([1, 2])
    """
    found = solve(step, starts, method="plain", tolerance=tolerance / 100, steps=steps)
    labels = torch.full((len(starts),), -1, dtype=torch.long, device=starts.device)
    limits: list[Tensor] = []
    for i, x in enumerate(found.x):
        if labels[i] < 0:
            same = ((found.x - x).norm(dim=-1) <= tolerance) & (labels < 0)
            labels[same] = len(limits)
            limits.append(x)
    return Basins(torch.stack(limits), labels, found.converged)
