"""Networks are trained on a task: on a GPU, all of a study at once.

Networks are so small that a GPU waits for launches. So networks of one layer are stacked, and a
launch computes for all of their seeds; layers run beside each other; and a CUDA graph launches all
forward and backward passes of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector

from dualform.read.engine.devices import rounded_products
from dualform.studies.hypernetwork.checkpoint import Checkpoint
from dualform.studies.hypernetwork.problems import Task, training_batches
from dualform.studies.hypernetwork.setting import TrainingSetting

CLIP = 1.0
"""The largest norm of a network's gradient."""
WARM_UP = 0.1
"""The share of steps in which the learning rate rises; it falls to nothing in the others."""
BEFORE_CAPTURE = 3
"""So many passes are made before one is captured: in the first ones libraries choose kernels."""
ALIGNED = 64
"""Each network's weights take a multiple of so many numbers; fast kernels read several at once."""

Grid: TypeAlias = Mapping[str, Sequence[nn.Module]]
"""Networks by layer, one a seed."""


def train(
    networks: Grid,
    tasks: Sequence[Task],
    training: TrainingSetting[Any],
    device: str,
    kept: Path | None = None,
) -> dict[str, list[float]]:
    """Trains in place, by AdamW with a rate that rises and falls; mean losses of the last tenth.

    `tasks` has a task a seed. All networks of a seed are given the same problems. `kept` is a file
    for the state of an interrupted training, which goes on from there.

    >>> from dualform.studies.hypernetwork.network import RuleReader
    >>> from dualform.studies.hypernetwork.raven import Raven
    >>> training = TrainingSetting(Raven(features=1), 8, 2, 1, steps=20, batch=8)
    >>> networks = {"HYLA": [RuleReader(training.task.shape, "HYLA", 8, 2, 1)]}
    >>> train(networks, [training.task], training, "cpu")["HYLA"][0] < 2.5
    True
    """
    stacked = StackedNetworks(networks, training.task)
    on_gpu = torch.device(device).type == "cuda"
    optimizer = torch.optim.AdamW(
        [stacked.weights], lr=training.rate, weight_decay=training.decay, fused=on_gpu or None
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, training.rate, total_steps=training.steps, pct_start=WARM_UP
    )
    last = torch.zeros(stacked.weights.shape[:2], device=device)
    counted = max(1, training.steps // 10)
    names = f"{[*networks]} {[task.seed for task in tasks]}"
    state = kept and Checkpoint(kept, names, stacked.weights, last, optimizer, schedule)
    first = state.load() if state else 0
    with rounded_products() if on_gpu else nullcontext():
        passes: StackedNetworks | ReplayedPasses = stacked
        for step, (x, y) in enumerate(_batches(tasks, training, device, first), first):
            if on_gpu and step == first:
                passes = ReplayedPasses(stacked, x, y)
            losses = passes.set_gradients(x, y)
            optimizer.step()
            schedule.step()
            if step >= training.steps - counted:
                last += losses / counted
            if state:
                state.save_now_and_then(step + 1)
    stacked.give_back()
    return dict(zip(networks, last.tolist(), strict=True))


def _batches(
    tasks: Sequence[Task], training: TrainingSetting[Any], device: str, first: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """x and y of a batch of each task, (seeds, batch, …); those before the first are left out."""
    streams = [
        training_batches(task, task.seed, training.batch, training.steps, device, first)
        for task in tasks
    ]
    for given in zip(*streams, strict=True):
        yield torch.stack([one.x for one in given]), torch.stack([one.y for one in given])


Losses: TypeAlias = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]
"""What gives the losses of a layer's networks, (seeds), of parameters (seeds, …) and batches."""
Pass: TypeAlias = Callable[[], tuple[Tensor, Tensor]]
"""What gives the losses of a layer's networks, (seeds), and their gradients, (seeds, numbers)."""


class StackedNetworks:
    """Networks that have one parameter for all of their weights.

    Their layers may differ in what they do, but not in which parameters they have.
    """

    def __init__(self, networks: Grid, task: Task) -> None:
        self._networks = networks
        rows = [
            torch.stack([parameters_to_vector(model.parameters()) for model in models])
            for models in networks.values()
        ]
        weights = torch.stack(rows).detach()
        self.weights = nn.Parameter(pad(weights, (0, -weights.shape[-1] % ALIGNED)))
        """(layers, seeds, numbers of a network)."""
        self.weights.grad = torch.zeros_like(self.weights)
        firsts = [models[0].train() for models in networks.values()]
        self._parts = [
            {name: part.requires_grad_() for name, part in _by_name(model, row)}
            for model, row in zip(firsts, self.weights.data, strict=True)
        ]
        self._losses = [_losses_of(model, task) for model in firsts]

    def set_gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Gives networks their gradients on their seed's batch, clipped; losses (layers, seeds).

        x and y are (seeds, batch, …).
        """
        return self.join([one() for one in self.passes(x, y)])

    def passes(self, x: Tensor, y: Tensor) -> list[Pass]:
        """A pass a layer."""

        def passed(losses_of: Losses, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            losses = losses_of(parts, x, y)
            gradients = torch.autograd.grad(losses.sum(), list(parts.values()))
            return losses.detach(), torch.cat([one.flatten(1) for one in gradients], 1)

        layers = zip(self._losses, self._parts, strict=True)
        return [partial(passed, losses_of, parts) for losses_of, parts in layers]

    def join(self, passed: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Sets the gradients that passes gave, clipped network by network; the losses."""
        losses, gradients = (torch.stack(some) for some in zip(*passed, strict=True))
        norms = gradients.norm(dim=-1, keepdim=True)
        clipped = gradients * (CLIP / (norms + 1e-6)).clamp_max(1)
        assert self.weights.grad is not None
        self.weights.grad[..., : clipped.shape[-1]] = clipped
        return losses

    @torch.no_grad()
    def give_back(self) -> None:
        """Writes the weights into the networks."""
        models = chain.from_iterable(self._networks.values())
        for model, weights in zip(models, self.weights.data.flatten(0, 1), strict=True):
            for name, part in _by_name(model, weights):
                model.get_parameter(name).copy_(part)


def _losses_of(model: nn.Module, task: Task) -> Losses:
    def loss(parts: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return task.loss(functional_call(model, parts, (x,)), y)

    def losses(parts: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = vmap(loss)(parts, x, y)
        return found

    return losses


def _by_name(model: nn.Module, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Weights (…, numbers of a network) as the parameters that they are, (…, *shape)."""
    begin = 0
    for name, parameter in model.named_parameters():
        part = weights[..., begin : begin + parameter.numel()]
        yield name, part.reshape(*weights.shape[:-1], *parameter.shape)
        begin += parameter.numel()


class ReplayedPasses:
    """What `StackedNetworks.set_gradients` does on batches of one size, as a CUDA graph.

    Layers have a stream each, which the graph keeps: what one does needs no other.
    """

    def __init__(self, stacked: StackedNetworks, x: Tensor, y: Tensor) -> None:
        self._stacked = stacked
        self._x, self._y = x.clone(), y.clone()
        passes = stacked.passes(self._x, self._y)
        streams = [torch.cuda.Stream() for _ in passes]  # type: ignore[no-untyped-call]
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(BEFORE_CAPTURE):
                self._beside(passes, streams)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._losses = self._beside(passes, streams)

    def set_gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses on this batch; the next call overwrites them."""
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        return self._losses

    def _beside(self, passes: Sequence[Pass], streams: Sequence[torch.cuda.Stream]) -> Tensor:
        """All passes, each on its stream."""
        main, passed = torch.cuda.current_stream(), []
        for stream, one in zip(streams, passes, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                passed.append(one())
        for stream in streams:
            main.wait_stream(stream)
        return self._stacked.join(passed)
