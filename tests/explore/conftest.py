"""Small recorded runs to look at: digits, the same through a convolution, and words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, sync_playwright
from sklearn.datasets import load_digits
from tests.explore.browser import launch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.explore import Exhibit, Query
from dualform.ledger.samples import Preview

SAMPLES = 120
WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran"]


def record(
    model: nn.Module, x: Tensor, y: Tensor, path: Path, epochs: int = 3, **shown: Any
) -> dualform.Run:
    """Trains with momentum, in batches of 30."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with dualform.record(model, optimizer, path) as recorder:
        recorder.describe(range(len(x)), **shown)
        for _ in range(epochs):
            for ids in torch.split(torch.randperm(len(x)), 30):
                recorder.samples(ids)
                F.cross_entropy(model(x[ids]), y[ids]).backward()
                optimizer.step()
                optimizer.zero_grad()
    model.eval()
    return dualform.open(path)


def digit_images() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images / 16, dtype=torch.float32), torch.tensor(data.target)


def shown_digits(labels: Tensor) -> list[Query]:
    return [Query(f"digit {at}", int(label)) for at, label in enumerate(labels)]


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    """A network of two layers, and 40 test digits."""
    torch.manual_seed(0)
    (x, y), model = digit_images(), nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    train, test = x[:SAMPLES], x[SAMPLES : SAMPLES + 40]
    path = tmp_path_factory.mktemp("runs") / "digits"
    shown = {"labels": y[:SAMPLES], "previews": train}
    parity = {"parity": ["odd" if label % 2 else "even" for label in y[:SAMPLES]]}
    run = record(model, train.flatten(1), y[:SAMPLES], path, **shown, columns=parity)
    return Exhibit(run, model, test.flatten(1), shown_digits(y[SAMPLES : SAMPLES + 40]))


@pytest.fixture(scope="session")
def patches(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    """A convolution before the last layer: its rows have a place in the picture."""
    torch.manual_seed(0)
    x, y = digit_images()
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    path = tmp_path_factory.mktemp("runs") / "patches"
    train, test = x[:60, None], x[60:70, None]
    run = record(model, train, y[:60], path, labels=y[:60], previews=train)
    return Exhibit(run, model, test, shown_digits(y[60:70]))


class Reader(nn.Module):
    """Says of a few words whether a cat is among them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(len(WORDS), 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.table(tokens)).tanh().mean(1))


def encode(text: Preview) -> Tensor:
    """A text as the numbers of its words."""
    return torch.tensor([[WORDS.index(word) for word in text.data.split()]])


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    """Five words a sample: rows have a place in the text."""
    torch.manual_seed(0)
    tokens = torch.randint(len(WORDS), (60, 5))
    labels, model = (tokens == WORDS.index("cat")).any(1).long(), Reader()
    texts = [" ".join(WORDS[token] for token in sample) for sample in tokens]
    path = tmp_path_factory.mktemp("runs") / "words"
    run = record(model, tokens[:50], labels[:50], path, labels=labels[:50], previews=texts[:50])
    queries = [Query(t, int(la), Preview("text", t)) for t, la in zip(texts, labels, strict=True)]
    return Exhibit(run, model, tokens[50:], queries[50:], encode)


class Speaker(nn.Module):
    """Says of each word which one comes next: outputs have a place in the text."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(len(WORDS), 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, len(WORDS))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.table(tokens)).tanh().cumsum(1))


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    """A language model of six words a sample."""
    torch.manual_seed(0)
    tokens = torch.randint(len(WORDS), (40, 7))
    texts = [" ".join(WORDS[token] for token in sample[:-1]) for sample in tokens]
    model, path = Speaker(), tmp_path_factory.mktemp("runs") / "speech"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dualform.record(model, optimizer, path) as recorder:
        recorder.describe(range(30), previews=texts[:30])
        for _ in range(3):
            recorder.samples(range(30))
            said = model(tokens[:30, :-1])
            F.cross_entropy(said.flatten(0, 1), tokens[:30, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    queries = [Query(text, None, Preview("text", text)) for text in texts[30:]]
    return Exhibit(dualform.open(path), model.eval(), tokens[30:, :-1], queries, encode, WORDS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The browser of this machine; without one these tests fail and say how to get it."""
    with sync_playwright() as playwright:
        opened = launch(playwright)
        yield opened
        opened.close()
