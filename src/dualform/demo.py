"""The main job, on data that ships inside scikit-learn: handwritten digits, 8 × 8 pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from dualform.errors import DualformError
from dualform.explore import Exhibit, Query, write_report
from dualform.read import Reading, Run, open_run
from dualform.read.display import signed
from dualform.recording import Recorder, record

TRAIN = 1400
EPOCHS = 12
BATCH = 32
BLOCKS = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}


@dataclass(frozen=True)
class Digits:
    """Inputs of 64 numbers from 0 to 1, and what digit each is."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index].reshape(8, 8), self.y[index]


def load_digits() -> tuple[Digits, Digits]:
    """1,400 digits to train on and 397 to test.

    >>> train, test = load_digits()
    >>> len(train), len(test)
    (1400, 397)
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise DualformError(
            "the demo needs scikit-learn, which is not installed: pip install 'dualform[demo]'."
        ) from None
    data = datasets.load_digits()
    x = torch.tensor(data.data / 16, dtype=torch.float32)
    y = torch.tensor(data.target)
    return Digits(x[:TRAIN], y[:TRAIN]), Digits(x[TRAIN:], y[TRAIN:])


def make_model() -> nn.Sequential:
    """The network of the demo: 64-128-10."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def batches(count: int, epochs: int) -> Iterator[Tensor]:
    """Shuffled ids, epoch after epoch."""
    for _ in range(epochs):
        yield from torch.split(torch.randperm(count), BATCH)


def train(path: Path, epochs: int = EPOCHS, seed: int = 0) -> tuple[nn.Sequential, Digits]:
    """Trains on the digits, recording every step; returns the model and the test digits."""
    torch.manual_seed(seed)
    (digits, test), model = load_digits(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    recorder: Recorder
    with record(model, optimizer, path, dataset=digits, overwrite=True) as recorder:
        for ids in batches(len(digits), epochs):
            recorder.samples(ids)
            F.cross_entropy(model(digits.x[ids]), digits.y[ids]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return model, test


def choose_queries(model: nn.Module, test: Digits, count: int) -> Tensor:
    """Test digits worth a look: the mistakes first (at most a third), then one of each kind."""
    with torch.no_grad():
        wrong = torch.nonzero(model(test.x).argmax(1) != test.y).flatten()[: count // 3]
    kinds = [int(torch.nonzero(test.y == digit)[0]) for digit in range(10)]
    return torch.tensor([*wrong.tolist(), *kinds][:count])


@dataclass(frozen=True)
class Demo:
    """What the demo leaves: something to explore, and where it was written."""

    exhibit: Exhibit
    report: Path
    queries: Path
    """The test digits, for `dualform view --input`."""


def run_demo(folder: Path, console: Console, epochs: int = EPOCHS, count: int = 8) -> Demo:
    """Trains, audits, reads a few test digits, and writes the report."""
    console.print(f"Training a 64-128-10 network on {TRAIN:,} digits, recording every step …")
    model, test = train(folder, epochs)
    run = open_run(folder)
    chosen = choose_queries(model, test, count)
    with torch.no_grad():
        right = (model(test.x).argmax(1) == test.y).float().mean()
    console.print(f"{run.steps} steps; {right:.1%} of {len(test)} test digits are right.\n")
    console.print(run.audit(), "")
    reading = run.spotlight(model, test.x[chosen])["2"]
    aside = 3 if console.width >= 76 else 2
    for at in range(min(3, len(chosen))):
        console.print(_picture(run, reading, at, test, int(chosen[at]), aside), "")
        if at == 0:
            console.print(_aloud(run, reading, int(test.y[chosen[0]])), highlight=False)
    return _shown(run, model, test, chosen)


def _shown(run: Run, model: nn.Module, test: Digits, chosen: Tensor) -> Demo:
    """Writes the test digits, and the report about the chosen ones."""
    titles = [f"test digit {number}" for number in range(len(test))]
    labels = test.y.tolist()
    queries = run.path.with_name(f"{run.path.name}.npz")
    np.savez(queries, x=test.x.numpy(), labels=test.y.numpy(), titles=np.array(titles))
    shown = [Query(title, label) for title, label in zip(titles, labels, strict=True)]
    exhibit = Exhibit(run, model, test.x, shown)
    page = run.path.with_name(f"{run.path.name}.html")
    report = write_report(exhibit, page, list(map(str, chosen.tolist())))
    return Demo(exhibit, report, queries)


def _picture(run: Run, reading: Reading, at: int, test: Digits, number: int, aside: int) -> Table:
    """One query in the terminal: the digit, and so many training digits for and against."""
    unit, total = int(reading.directions[at].argmax()), float(reading.total[at])
    table = Table.grid(padding=(0, 2))
    words = ("for", *[""] * (aside - 1), "against")
    table.add_row("", *(Text(word, style="bold") for word in words))
    cells = [
        _cell(test.x[number].reshape(8, 8), f"a {int(test.y[number])}", f"→ {unit}: {total:.2f}")
    ]
    values = reading.samples().values[:, at]
    order = values.argsort()
    for sample in [*order[::-1][:aside], *order[:aside]]:
        name = run.ids[sample]
        preview = run.samples.preview(name)
        assert preview is not None
        cells.append(
            _cell(
                preview.data / 255, f"{run.samples.labels[name]} (#{name})", signed(values[sample])
            )
        )
    table.add_row(*cells)
    return table


def _aloud(run: Run, reading: Reading, label: int) -> str:
    """The first picture in words, for those who see such amounts for the first time."""
    unit, total = int(reading.directions[0].argmax()), float(reading.total[0])
    values = reading.samples().values[:, 0]
    labels = np.array([run.samples.labels[name] for name in run.ids])
    sums = {int(kind): float(values[labels == kind].sum()) for kind in np.unique(labels)}
    most, least = max(sums, key=sums.__getitem__), min(sums, key=sums.__getitem__)
    return (
        f"In words: the network takes this {label} for {unit}, whose output, {total:.2f}, is the "
        f"highest. Of that, {signed(float(values.sum()))} is what {len(values):,} training digits "
        f"add up to, and {signed(float(reading.initial[0]))} was there before training. Digits "
        f"labeled {most} speak for it most ({signed(sums[most])} together), those labeled {least} "
        f"against it ({signed(sums[least])}).\n"
    )


def _cell(pixels: Tensor, *captions: str) -> Text:
    """A digit in half blocks, two rows of pixels a line, with captions below."""
    ink = (pixels > 0.4).tolist()
    lines = [
        "".join(BLOCKS[upper, lower] for upper, lower in zip(*pair, strict=True))
        for pair in zip(ink[::2], ink[1::2], strict=True)
    ]
    return Text("\n".join([*lines, *captions]), no_wrap=True)
