"""What a remainder is made of: `python -m benchmarks.rounding --data DIR`.

The classifier of the study `mnist` is trained and recorded. Beside it the rounding of each step is
added up: of each new weight, and of each new momentum, times what it goes on to do. If nothing
else was missed, the sum is as large as the remainder that the audit measures.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualform
from dualform.studies.classifiers import Training, whole_batches
from dualform.studies.data import data_folder, load_images


class Roundings:
    """Adds up what the steps of SGD with momentum round."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.SGD, training: Training) -> None:
        self._parameters, self._optimizer = dict(model.named_parameters()), optimizer
        self._training = training
        self.sums = {n: torch.zeros_like(p).double() for n, p in self._parameters.items()}

    def step(self) -> None:
        """Makes a step, and compares it with the same in float64."""
        before = {n: (p.detach().double(), self._buffer(p)) for n, p in self._parameters.items()}
        rate, momentum = self._training.rate, self._training.momentum
        gradients = {name: p.grad.double() for name, p in self._parameters.items()}
        self._optimizer.step()
        for name, p in self._parameters.items():
            weight, buffer = before[name]
            now = self._buffer(p)
            of_weight = p.detach().double() - (weight - rate * now)
            of_buffer = now - (momentum * buffer + gradients[name])
            self.sums[name] += of_weight - rate * of_buffer / (1 - momentum)

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self._optimizer.state.get(parameter, {})
        found = state.get("momentum_buffer")
        return torch.zeros_like(parameter).double() if found is None else found.double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--double", action="store_true", help="train in float64")
    options = parser.parse_args()
    images, _ = load_images(data_folder(options.data), "mnist")
    dtype = torch.float64 if options.double else torch.float32
    x, training = images.inputs(), Training(steps=options.steps)
    x = ((x - x.mean()) / x.std()).to(dtype)
    torch.manual_seed(0)
    model = training.make_model().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), training.rate, training.momentum)
    roundings = Roundings(model, optimizer, training)
    batches = whole_batches(torch.arange(len(images)), training.batch, torch.Generator())
    path = Path(tempfile.mkdtemp()) / "run"
    with dualform.record(model, optimizer, path, keep="rows") as recorder:
        for ids in itertools.islice(batches, training.steps):
            recorder.samples(ids)
            cross_entropy(model(x[ids]), images.y[ids]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
            roundings.step()
            optimizer.zero_grad()
    for book in dualform.open(path).audit().books:
        rounded = float(roundings.sums[book.name].norm()) / book.change
        print(f"{book.name:10s} remainder {book.remainder:.2e}, rounding added up {rounded:.2e}")
    shutil.rmtree(path.parent)


if __name__ == "__main__":
    main()
