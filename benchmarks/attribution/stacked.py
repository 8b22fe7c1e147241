"""The ground truth, many trainings at once: `python -m benchmarks.attribution.stacked`.

What `benchmarks.attribution.truth` trains one by one is stacked here: one call of torch moves the
models of many halves and seeds one step on. Starts, halves and orders are the same; what differs is
the order of additions. On an accelerator the five tasks take minutes in place of days.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.attribution import truth
from benchmarks.attribution.tasks import TASKS, Task, loss
from benchmarks.attribution.trained import SEED
from dualform.evaluate import GroundTruth


def trained(
    task: Task, halves: Tensor, seeds: list[int], device: torch.device
) -> NDArray[np.float64]:
    """(models, queries): what comes out of training on each half, with its own seed."""
    model = task.start(0).to(device)
    starts = {seed: dict(task.start(seed).named_parameters()) for seed in set(seeds)}
    stacked = {
        name: torch.stack([starts[seed][name].detach() for seed in seeds]).to(device)
        for name, _ in model.named_parameters()
    }
    optimizer = task.optimizer(torch.nn.Parameter(value) for value in stacked.values())
    parameters = dict(zip(stacked, optimizer.param_groups[0]["params"], strict=True))
    x, y = (part.to(device) for part in task.samples())
    orders = {seed: torch.Generator().manual_seed(seed) for seed in set(seeds)}

    def mean_loss(own: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return loss(functional_call(model, own, (images,)), labels).mean()

    gradients = vmap(grad(mean_loss))
    for _ in range(task.epochs):
        drawn = {s: torch.randperm(halves.shape[1], generator=orders[s]) for s in orders}
        order = torch.stack([drawn[seed] for seed in seeds])
        for batch in torch.split(halves.gather(1, order).to(device), task.batch, 1):
            found = gradients({n: p.detach() for n, p in parameters.items()}, x[batch], y[batch])
            for name, gradient in found.items():
                parameters[name].grad = gradient
            optimizer.step()
    asked, labels = (part.to(device) for part in task.queries())

    def output(own: dict[str, Tensor]) -> Tensor:
        return task.output(functional_call(model, own, (asked,)), labels)

    with torch.no_grad():
        outputs = vmap(output)({name: p.detach() for name, p in parameters.items()})
    measured: NDArray[np.float64] = outputs.double().cpu().numpy()
    return measured


def ground_truth(
    task: Task, members: NDArray[np.bool_], seeds: int, device: torch.device, stack: int
) -> GroundTruth:
    """Every half with every seed, so many at a time."""
    halves = torch.from_numpy(np.stack([np.flatnonzero(row) for row in members]))
    places = [(half, seed) for half in range(len(halves)) for seed in range(seeds)]
    runs = []
    for begin in range(0, len(places), stack):
        some = places[begin : begin + stack]
        chosen = halves[[half for half, _ in some]]
        runs.append(trained(task, chosen, [SEED + 1 + seed for _, seed in some], device))
    return GroundTruth(members, np.concatenate(runs).reshape(len(halves), seeds, -1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], default=[])
    parser.add_argument("--folder", type=Path, default=Path("truth"))
    parser.add_argument("--subsets", type=int, nargs=2, default=(40, 100), metavar=truth.PARTS)
    parser.add_argument("--seeds", type=int, nargs=2, default=(3, 5), metavar=truth.PARTS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stack", type=int, default=125, help="models that are trained at once")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    for name in options.tasks or TASKS:
        for part, subsets, seeds in zip(truth.PARTS, options.subsets, options.seeds, strict=True):
            began = time.perf_counter()
            work = truth.retraining(name, part, options.folder, subsets, seeds, 0)
            device = torch.device(options.device)
            found = ground_truth(TASKS[name], work.members, seeds, device, options.stack)
            path = Path(work.folder) / "truth.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path)
            took = time.perf_counter() - began
            print(f"{name}, {part}: {subsets} halves × {seeds} seeds, {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
