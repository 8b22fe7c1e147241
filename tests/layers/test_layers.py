"""Every layer kind, under its contract."""

import torch
from torch import Tensor, nn

from dualform.testing import LayerContract


class TestLinear(LayerContract):
    def make(self) -> nn.Module:
        return nn.Linear(5, 3)

    def inputs(self, count: int) -> Tensor:
        return torch.randn(count, 5)


class TestNoBias(LayerContract):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False))

    def inputs(self, count: int) -> Tensor:
        return torch.randn(count, 5)


class TestTokens(LayerContract):
    """Leading dimensions beyond the batch: tokens, and patches of tokens."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    def inputs(self, count: int) -> Tensor:
        return torch.randn(count, 2, 3, 5)


class Flattening(nn.Module):
    """Flattens tokens for one layer, and pools them for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        mixed = self.mix(hidden.reshape(-1, 4)).reshape(hidden.shape)
        return self.head(mixed.mean(1))


class TestFlattened(LayerContract):
    def make(self) -> nn.Module:
        return Flattening()

    def inputs(self, count: int) -> Tensor:
        return torch.randn(count, 3, 5)


class Recurrent(nn.Module):
    """Uses one weight several times in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.head(x)


class TestUsedSeveralTimes(LayerContract):
    def make(self) -> nn.Module:
        return Recurrent()

    def inputs(self, count: int) -> Tensor:
        return torch.randn(count, 5)


class Tied(nn.Module):
    """Two layers share a weight and have biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class TestTied(LayerContract):
    def make(self) -> nn.Module:
        return Tied()

    def inputs(self, count: int) -> Tensor:
        return torch.randn(count, 5)


class TestInplaceActivation(LayerContract):
    """An in-place ReLU overwrites the output whose error is recorded."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))

    def inputs(self, count: int) -> Tensor:
        return torch.randn(count, 5)
