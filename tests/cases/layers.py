"""Layers as torch has them, each in a small model: the rows of the grid."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.cases.case import LINEAR, MIXES, REFUSED, Case
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

SAMPLES = 8


def drawn(*shape: int) -> Callable[[int], Tensor]:
    """Random numbers for each sample."""
    return lambda number: torch.randn(SAMPLES, *shape)


def words(number: int) -> Tensor:
    return torch.randint(0, 7, (SAMPLES, 5))


vectors, tokens, lines = drawn(4), drawn(3, 4), drawn(2, 9)
images, volumes = drawn(2, 6, 6), drawn(2, 4, 4, 4)


class Functional(nn.Module):
    """Weights of its own, in functional calls: whole, in chunks, transposed, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(6, 4) / 2), nn.Parameter(torch.zeros(6))
        self.v = nn.Parameter(torch.randn(6, 3) / 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.w.chunk(2)
        x = torch.tanh(F.linear(x, first, self.b[:3]) + F.linear(x, second, self.b[3:]))
        x = torch.cat([x, F.linear(x, self.w[:3, :3])], -1)
        return torch.tanh(x) @ self.v + F.linear(x, self.v.t())


class FreeParameters(nn.Module):
    """A scale, an offset, a temperature, a class token and positions, as in vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4) / 2)
        self.positions = nn.Parameter(torch.randn(1, 5, 4) / 2)
        self.scale, self.offset = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = torch.tanh(x + self.positions[:, : x.shape[1]])
        return torch.tanh(x * self.scale - self.offset) * self.temperature


class ChannelScale(nn.Module):
    """Parameters in the middle dimension: layer scale of images, and PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.slope = nn.Parameter(torch.ones(2, 1, 1)), nn.PReLU(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.slope(self.gamma * x)


class Positions(nn.Module):
    """Words and positions, the latter read once for all samples; a head tied to the words."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(torch.tanh(self.words(x) + self.places(places)))


class Bag(nn.Module):
    """Bags of words, as rows and by offsets."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 4, mode=mode, padding_idx=2)

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.arange(len(x), device=x.device) * x.shape[1]
        return torch.tanh(self.bag(x)) + self.bag(x.flatten(), offsets)


class Table(nn.Module):
    """A table that is indexed, not embedded."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.table[x])


class Sequence(nn.Module):
    """A recurrent layer's outputs and last state."""

    def __init__(self, layer: nn.RNNBase, packed: bool = False) -> None:
        super().__init__()
        self.layer, self.packed = layer, packed

    def forward(self, x: Tensor) -> Tensor:
        given = x
        if self.packed:
            lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 0, 1] > 0).long()
            given = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, state = self.layer(given)
        if self.packed:
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        last = state[0] if isinstance(state, tuple) else state
        return out + last.sum() / len(x)


class Cells(nn.Module):
    """Cells, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(4, 3), nn.GRUCell(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.lstm(x[:, 0])
        h, c = self.lstm(x[:, 1], (h, c))
        return self.gru(h, c)


class CrossAttention(nn.Module):
    """Attention whose queries differ from keys and values: chunks of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attention(x.flip(1), x, x)
        return out


class Conv1D(nn.Module):
    """What transformers calls Conv1D: a linear map with its weight the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6) / 2), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], 6)


class LoRA(nn.Module):
    """A frozen layer and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class Heads(nn.Module):
    """Projections into heads and out of them, with a dimension of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(4, 2, 3) / 2)
        self.out = nn.Parameter(torch.randn(2, 3, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("btd,dhk->bthk", x, self.into))
        return torch.einsum("bthk,hkd->btd", hidden, self.out)


class Experts(nn.Module):
    """Two matrices in one parameter, and biases: each takes its own part of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(2, 4, 5) / 2), nn.Parameter(torch.zeros(2, 5))
        self.back = nn.Parameter(torch.randn(2, 4, 5) / 2)

    def forward(self, x: Tensor) -> Tensor:
        one, two = (torch.tanh(x[:, e:] @ self.w[e] + self.b[e]) for e in range(2))
        mixed = torch.stack([one.mean(1), two.mean(1)])  # (experts, samples, …)
        return torch.bmm(mixed, self.back.mT).transpose(0, 1)


class Pairs(nn.Module):
    """A bilinear layer of two parts of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(3, 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[..., :3], x[..., 2:])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def conv(**options: object) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(2, 4, 3, **options)  # type: ignore[arg-type]


def deconv(**options: object) -> Callable[[], nn.Module]:
    return lambda: nn.ConvTranspose2d(2, 4, 3, **options)  # type: ignore[arg-type]


def recurrent(layer: type[nn.RNNBase], packed: bool = False, **options: object) -> Case:
    def make() -> nn.Module:
        return Sequence(layer(4, 3, batch_first=True, **options), packed)  # type: ignore[arg-type]

    return Case(make, tokens, tags=frozenset({MIXES}))


def linear(make: Callable[[], nn.Module], inputs: Callable[[int], Tensor]) -> Case:
    return Case(make, inputs, tags=frozenset({LINEAR}))


CASES = {
    "Linear": Case(mlp, vectors),
    "Linear, no bias": linear(lambda: nn.Linear(4, 3, bias=False), vectors),
    "Linear, tokens": Case(mlp, tokens),
    "Linear, tied": Case(
        lambda: (lambda one: nn.Sequential(one, nn.Tanh(), one))(nn.Linear(4, 4)), vectors
    ),
    "Conv1d": linear(lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), lines),
    "Conv2d": linear(conv(padding="same", dilation=2), images),
    "Conv2d, stride": Case(conv(stride=(2, 1), padding=(1, 0)), images),
    "Conv2d, groups": linear(conv(groups=2, padding=1), images),
    "Conv2d, circular": linear(conv(padding=1, padding_mode="circular"), images),
    "Conv3d": Case(lambda: nn.Conv3d(2, 2, 2, bias=False), volumes),
    "ConvTranspose1d": Case(lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), lines),
    "ConvTranspose2d": linear(deconv(stride=2, padding=1, output_padding=1, dilation=2), images),
    "ConvTranspose2d, groups": Case(deconv(groups=2), images),
    "ConvTranspose3d": Case(lambda: nn.ConvTranspose3d(2, 2, 2), volumes),
    "Embedding": linear(lambda: nn.Embedding(7, 4, padding_idx=1), words),
    "Embedding, by frequency": Case(
        lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), words, tags=frozenset({MIXES})
    ),
    "Embedding, max_norm": Case(
        lambda: nn.Embedding(7, 4, max_norm=1.0),
        words,
        by_step={"": "with max_norm the table changes"},
        tags=frozenset({REFUSED}),
    ),
    "Embedding, tied head": Case(Positions, words),
    "EmbeddingBag": Case(lambda: Bag("mean"), words),
    "EmbeddingBag, sum": Case(lambda: Bag("sum"), words),
    "EmbeddingBag, max": Case(
        lambda: nn.EmbeddingBag(7, 4, mode="max"),
        words,
        by_step={"": "EmbeddingBag with mode='max'"},
    ),
    "Table": Case(Table, words),
    "LayerNorm": Case(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((3, 4))), tokens),
    "RMSNorm": linear(lambda: nn.RMSNorm(4), tokens),
    "GroupNorm": Case(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), images),
    "BatchNorm1d": Case(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), vectors, noise=r"^0\.bias$"
    ),
    "BatchNorm2d": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), images, noise=r"^0\.bias$"
    ),
    "InstanceNorm": linear(lambda: nn.InstanceNorm2d(2, affine=True), images),
    "Free parameters": Case(FreeParameters, tokens),
    "Channel scales": Case(ChannelScale, images),
    "Functional": Case(Functional, vectors),
    "RNN": recurrent(nn.RNN, nonlinearity="relu"),
    "GRU": recurrent(nn.GRU, num_layers=2, bidirectional=True),
    "LSTM": recurrent(nn.LSTM, num_layers=2, dropout=0.3),
    "LSTM, bidirectional": recurrent(nn.LSTM, bidirectional=True, bias=False),
    "LSTM, packed": recurrent(nn.LSTM, packed=True, num_layers=2, bidirectional=True),
    "LSTM, projected": recurrent(nn.LSTM, proj_size=2),
    "Cells": Case(Cells, tokens),
    "MultiheadAttention": Case(CrossAttention, tokens),
    "TransformerEncoder": Case(
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        tokens,
        noise=r"^self_attn\.in_proj_bias$",
    ),
    "Conv1D": linear(Conv1D, tokens),
    "LoRA": Case(LoRA, vectors),
    "Checkpointing": Case(lambda: Checkpointed(False), vectors),
    "Checkpointing, reentrant": Case(lambda: Checkpointed(True), vectors),
    "Weight norm": Case(
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 3)
        ),
        vectors,
    ),
    "Weight norm, Conv2d": Case(lambda: parametrizations.weight_norm(nn.Conv2d(2, 4, 3)), images),
    "Spectral norm": Case(
        lambda: parametrizations.spectral_norm(nn.Conv2d(2, 4, 3, groups=2)), images
    ),
    "Orthogonal": Case(lambda: parametrizations.orthogonal(nn.Linear(4, 3)), vectors),
    "Einsum": Case(Heads, tokens),
    "Experts": Case(Experts, tokens),
    "Bilinear": Case(Pairs, tokens),
    "Channels last": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.ConvTranspose2d(4, 2, 3)).to(
            memory_format=torch.channels_last
        ),
        images,
    ),
}
