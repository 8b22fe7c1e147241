"""Families against their peers: `OMP_NUM_THREADS=1 python -m benchmarks.families [PART]`.

Parts: attention, entmax, fixed_points, boltzmann. Needs `entmax`, `torchdeq` and scikit-learn.
Times are those of the process on one thread: other work on the machine adds little to them.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import timing
from benchmarks.timing import seconds
from dualform.errors import FamilyError
from dualform.families import Empirical, Hypercube, LogNormalizer, entmax
from dualform.families.fixed_points import AttentionStep, Decay, implicit, solve
from dualform.families.layers import Boltzmann, annealed, attend, contrastive_divergence

PICTURE = Path(__file__).parents[1] / "docs/images/boltzmann.png"
compare = partial(timing.compare, clock=time.process_time)
HIDDEN, EPOCHS, BATCH, RATE, SEEDS = 64, 40, 20, 0.05, 5


def attention() -> None:
    """The mean of an empirical measure against `scaled_dot_product_attention`."""
    for n, d in ((256, 64), (1024, 64), (4096, 64)):
        q, k, v = (torch.randn(1, 8, n, d) for _ in range(3))
        G = LogNormalizer(Empirical(k), d**0.5)
        sdpa = partial(F.scaled_dot_product_attention, q, k, v)
        with torch.no_grad():
            ratio = compare(partial(G.mean, q, v), sdpa, turns=_turns(n))
        trained = compare(
            partial(_gradients, attend, q, k, v),
            partial(_gradients, F.scaled_dot_product_attention, q, k, v),
            turns=_turns(n),
        )
        print(f"8 heads of {n} × {d}: mean × {ratio}; layer with its gradient × {trained}")


def _turns(n: int) -> int:
    return max(11, 50_000 // n)


def _gradients(read: Callable[..., Tensor], *inputs: Tensor) -> None:
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.autograd.grad(read(*leaves).sum(), leaves)


def sparse() -> None:
    """entmax against the `entmax` package, forward and backward."""
    import entmax as package

    for shape in ((512, 64), (512, 1024), (64, 32_000)):
        theta = torch.randn(shape)
        peers: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
            "sparsemax": (2.0, package.sparsemax),
            "entmax15": (1.5, package.entmax15),
            "entmax_bisect 1.5": (1.5, lambda x: package.entmax_bisect(x, 1.5)),
            "entmax_bisect 1.25": (1.25, lambda x: package.entmax_bisect(x, 1.25)),
        }
        for name, (alpha, peer) in peers.items():
            ratio = compare(
                partial(_gradients, partial(entmax, alpha=alpha), theta),
                partial(_gradients, peer, theta),
                turns=21,
            )
            apart = float((entmax(theta, alpha) - peer(theta)).abs().max())
            print(f"{shape[0]} × {shape[1]}, {name}: × {ratio}, apart by {apart:.0e}")


def fixed_points() -> None:
    """Solvers to a residual of 1e-6, by calls of the step and by time; gradients of the root."""
    torch.manual_seed(0)
    points = torch.randn(64, 32, dtype=torch.float64) / 32**0.5
    start = torch.randn(128, 32, dtype=torch.float64)
    G = LogNormalizer(Empirical(points), 0.2)
    cases = {
        "s + 0.5 ∇G(x)": AttentionStep(G, Decay(0.5), residual=False),
        "s + 0.9 ∇G(x)": AttentionStep(G, Decay(0.9), residual=False),
        "s + 0.95 (x + ∇G(x))": AttentionStep(G, Decay(0.95)),
    }
    for equation, step in cases.items():
        shifted = _shifted(step, start)
        print(f"x = {equation}:")
        for name, run in _solvers(shifted, start).items():
            try:
                steps, x = run()
            except FamilyError:
                print(f"  {name}: left the finite numbers")
                continue
            took = statistics.median(seconds(run, time.process_time) for _ in range(5))
            residual = float((shifted(x) - x).norm(dim=-1).max())
            print(f"  {name}: {steps} calls, {1e3 * took:.0f} ms, residual {residual:.0e}")
    _training(start)


def _shifted(step: AttentionStep, start: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: 0.1 * start + step(x)


def _solvers(
    step: Callable[[Tensor], Tensor], start: Tensor
) -> dict[str, Callable[[], tuple[int, Tensor]]]:
    def own(method: str) -> tuple[int, Tensor]:
        found = solve(step, start, method=method, tolerance=1e-6, steps=3000)
        return found.steps, found.x

    def peer(method: str) -> tuple[int, Tensor]:
        from torchdeq import get_deq

        deq = get_deq(f_solver=method, f_max_iter=3000, f_tol=1e-6, f_stop_mode="abs").eval()
        with torch.no_grad():
            found, info = deq(step, start)
        return int(info["nstep"].max()), found[-1]

    solvers = {f"dualform {m}": (lambda m=m: own(m)) for m in ("plain", "anderson")}
    names = ("fixed_point_iter", "anderson", "broyden")
    return solvers | {f"torchdeq {m}": (lambda m=m: peer(m)) for m in names}


def _training(start: Tensor) -> None:
    """A step of training: the root and the gradient of the patterns."""
    from torchdeq import get_deq

    points = (torch.randn(64, 32, dtype=torch.float64) / 32**0.5).requires_grad_()

    def step(x: Tensor) -> Tensor:
        return 0.1 * start + 0.5 * LogNormalizer(Empirical(points), 0.2).mean(x)

    def own(symmetric: bool) -> Tensor:
        root = implicit(step, start, symmetric=symmetric, tolerance=1e-6)
        return torch.autograd.grad(root.square().sum(), points)[0]

    deq = get_deq(
        f_solver="anderson", b_solver="anderson", f_max_iter=500, b_max_iter=500, f_tol=1e-6,
        b_tol=1e-6, ift=True,
    )  # fmt: skip
    deq.train()

    def peer() -> Tensor:
        return torch.autograd.grad(deq(step, start)[0][-1].square().sum(), points)[0]

    exact = own(True)
    for name, symmetric in (("conjugate gradients", True), ("anderson", False)):
        ratio = compare(lambda symmetric=symmetric: own(symmetric), peer, turns=9)
        print(f"  a training step by {name} against torchdeq's (ift, anderson): × {ratio}")
    apart = float((peer() - exact).norm() / exact.norm())
    print(f"  torchdeq's gradient differs from ours by {apart:.0e}")


def boltzmann() -> None:
    """Digits: scikit-learn's BernoulliRBM and ours, with as many updates of as many units."""
    from sklearn.datasets import load_digits

    pixels = torch.tensor(load_digits().data > 7).float()
    pixels = pixels[torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))]
    train, test = pixels[:1400], pixels[1400:]
    makers: dict[str, Callable[[int], tuple[Boltzmann, float]]] = {
        "scikit-learn, PCD-1": lambda seed: _theirs(train, seed),
        "dualform, PCD-1": lambda seed: _ours(train, seed, persistent=True),
        "dualform, CD-1": lambda seed: _ours(train, seed, persistent=False),
        "dualform, PCD-1, rate falling to 0": lambda seed: _ours(train, seed, True, falling=True),
    }
    first = {}
    for name, make in makers.items():
        made = [make(seed) for seed in range(SEEDS)]
        found = [_likelihood(machine, test) for machine, _ in made]
        first[name] = made[0][0]
        values, widths = zip(*found, strict=True)
        took = statistics.median(one for _, one in made)
        print(
            f"{name}: {statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f} over {SEEDS} "
            f"seeds, each known to ± {max(widths):.2f}; trained in {took:.2f} s"
        )
    _picture(test, first)


def _likelihood(machine: Boltzmann, test: Tensor) -> tuple[float, float]:
    """The mean log-likelihood, and half the width of its range."""
    Z = annealed(machine.field(), chains=512, temperatures=2000)
    free = -machine.field().free_energy(test).mean().item()
    return free - Z.value, (Z.high - Z.low) / 2


def _theirs(train: Tensor, seed: int) -> tuple[Boltzmann, float]:
    from sklearn.neural_network import BernoulliRBM

    peer = BernoulliRBM(
        HIDDEN, learning_rate=RATE, batch_size=BATCH, n_iter=EPOCHS, random_state=seed
    )
    took = seconds(partial(peer.fit, train.numpy()), time.process_time)
    machine = Boltzmann(Hypercube(64), Hypercube(HIDDEN))
    with torch.no_grad():
        machine.W.copy_(torch.from_numpy(peer.components_.T))
        machine.b.copy_(torch.from_numpy(peer.intercept_visible_))
        machine.c.copy_(torch.from_numpy(peer.intercept_hidden_))
    return machine, took


def _ours(
    train: Tensor, seed: int, persistent: bool, falling: bool = False
) -> tuple[Boltzmann, float]:
    torch.manual_seed(seed)
    machine = Boltzmann(Hypercube(64), Hypercube(HIDDEN))
    optimizer = torch.optim.SGD(machine.parameters(), lr=RATE)
    chains = torch.zeros(BATCH, 64)
    began = time.process_time()
    total = EPOCHS * len(train) // BATCH
    for step, ids in enumerate(_batches(len(train))):
        if falling:
            optimizer.param_groups[0]["lr"] = RATE * (1 - step / total)
        start = chains if persistent else train[ids]
        loss, chains = contrastive_divergence(machine.field(), train[ids], start)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return machine, time.process_time() - began


def _batches(count: int) -> Iterator[Tensor]:
    for _ in range(EPOCHS):
        yield from torch.randperm(count).split(BATCH)


def _picture(test: Tensor, machines: dict[str, Boltzmann]) -> None:
    """Test digits, and what each machine dreams: mean pixels after 2,000 Gibbs steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    torch.manual_seed(1)
    rows = {"test digits": test[:16]}
    for name, machine in machines.items():
        field = machine.field()
        v = field.gibbs(test[torch.randperm(len(test))[:16]], 2000)
        h = machine.hidden.mean(field.given_visible(v))
        rows[name] = machine.visible.mean(field.given_hidden(h)).detach()
    figure, grid = plt.subplots(len(rows), 16, figsize=(9.6, 0.9 * len(rows)), layout="constrained")
    for line, (name, pictures) in zip(grid, rows.items(), strict=True):
        for axes, picture in zip(line, pictures, strict=True):
            axes.imshow(picture.reshape(8, 8), cmap="Greys", vmin=0, vmax=1)
            axes.axis("off")
        line[0].text(-0.5, -1.2, name, fontsize=9).set_in_layout(False)
    figure.savefig(PICTURE, dpi=130, facecolor="white")
    plt.close(figure)
    print(f"samples are in {PICTURE.relative_to(PICTURE.parents[2])}")


PARTS = {
    "attention": attention,
    "entmax": sparse,
    "fixed_points": fixed_points,
    "boltzmann": boltzmann,
}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="torchdeq")
    torch.set_num_threads(1)
    for part in sys.argv[1:] or PARTS:
        print(f"— {part}", flush=True)
        PARTS[part]()
