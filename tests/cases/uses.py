"""Small models that use parameters in unusual ways: shared, in parts, computed from others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from tests.cases.case import Case, squares
from tests.cases.layers import drawn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune


class Using(nn.Module):
    """A model with some parameters of its own, and a head."""

    def __init__(
        self, forward: Callable[..., Tensor], width: int, **shapes: tuple[int, ...]
    ) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5))
        self.head, self._forward = nn.Linear(width, 3), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self._forward(self, x)))


def using(
    forward: Callable[..., Tensor], given: tuple[int, ...], width: int, **shapes: tuple[int, ...]
) -> Case:
    return Case(lambda: Using(forward, width, **shapes), drawn(*given))


def gentle(model: nn.Module, x: Tensor) -> Tensor:
    """Losses of models whose outputs add up much."""
    return squares(model, x) / 16


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(),
        nn.ConvTranspose2d(6, 2, 2), nn.Flatten(), nn.Linear(98, 3),
    )  # fmt: skip


def slices(self: Using, x: Tensor) -> Tensor:
    first = F.conv2d(x, self.w[:4, :2])
    return (first * F.conv2d(x, self.w[4:, 1:])).flatten(1)


def channels_last(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().to(memory_format=torch.channels_last)


CONTRACTIONS = {
    "a matrix": using(lambda s, x: torch.einsum("bd,dh->bh", x, s.w), (5,), 4, w=(5, 4)),
    "implicit, tokens": using(
        lambda s, x: torch.einsum("...d,od", x, s.w).sum(1), (3, 5), 4, w=(4, 5)
    ),
    "heads": using(
        lambda s, x: torch.einsum("bshk,hkd->bsd", torch.einsum("bsd,dhk->bshk", x, s.q), s.o),
        (3, 5), 5, q=(5, 2, 4), o=(2, 4, 5),
    ),
    "stacked, samples first": using(
        lambda s, x: torch.einsum("bgd,gdo->bgo", x, s.w).flatten(1), (3, 5), 12, w=(3, 5, 4)
    ),
    "stacked, samples second": using(
        lambda s, x: torch.einsum("gbd,god->bgo", x.transpose(0, 1), s.w).flatten(1),
        (3, 5), 12, w=(3, 4, 5),
    ),
    "vector": using(lambda s, x: torch.einsum("bsd,d->bs", x, s.w), (4, 5), 4, w=(5,)),
    "scaled": using(lambda s, x: torch.einsum("bsd,sd->bsd", x, s.w).sum(1), (3, 4), 4, w=(3, 4)),
    "spread": using(lambda s, x: torch.einsum("bs,d->bsd", x, s.w).sum(1), (3,), 4, w=(4,)),
    "summed over": using(lambda s, x: torch.einsum("bd,dhe->bh", x, s.w), (5,), 4, w=(5, 4, 2)),
    "two parameters": using(
        lambda s, x: torch.einsum("bd,dr,ro->bo", x, s.a, s.b), (5,), 4, a=(5, 2), b=(2, 4)
    ),
    "two inputs": using(
        lambda s, x: torch.einsum("bi,oij,bj->bo", x[:, :3], s.w, x[:, 3:]), (5,), 4, w=(4, 3, 2)
    ),
    "a part": using(
        lambda s, x: torch.einsum("bd,edo->beo", x, s.w[1:, 1:]).flatten(1), (4,), 8, w=(3, 5, 4)
    ),
    "numbered": using(
        lambda s, x: torch.einsum(x, [0, 1], s.w, [1, 2], [0, 2]), (5,), 4, w=(5, 4)
    ),
    "tensordot": using(lambda s, x: torch.tensordot(x, s.w, 2), (2, 3), 4, w=(2, 3, 4)),
    "tensordot of dimensions": using(
        lambda s, x: torch.tensordot(x, s.w, ([-1], [1])), (5,), 4, w=(4, 5)
    ),
}  # fmt: skip

PRODUCTS = {
    "bmm": using(
        lambda s, x: torch.bmm(x.transpose(0, 1), s.w).transpose(0, 1).flatten(1),
        (3, 5), 12, w=(3, 5, 4),
    ),
    "bmm from the left": using(
        lambda s, x: torch.bmm(s.w, x.permute(1, 2, 0)).permute(2, 0, 1).flatten(1),
        (3, 5), 12, w=(3, 4, 5),
    ),
    "baddbmm": using(
        lambda s, x: torch.baddbmm(s.b, x.transpose(0, 1), s.w).transpose(0, 1).flatten(1),
        (3, 5), 12, b=(3, 1, 4), w=(3, 5, 4),
    ),
    "matmul, stacked": using(
        lambda s, x: (x[:, :, None] @ s.w).flatten(1), (3, 5), 12, w=(3, 5, 4)
    ),
    "matmul, vector": using(lambda s, x: x @ s.w, (4, 5), 4, w=(5,)),
    "matmul, row": using(lambda s, x: torch.stack([x @ s.w[0], x @ s.w[2]], 1), (5,), 2, w=(3, 5)),
    "slices of a stack": using(
        lambda s, x: sum(F.linear(x, w) for w in s.w) + x @ s.t[1],
        (5,), 4, w=(3, 4, 5), t=(2, 5, 4),
    ),
    "a stack as one matrix": using(
        lambda s, x: F.linear(x, s.w.flatten(0, 1)), (5,), 12, w=(3, 4, 5)
    ),
    "one place of a kernel": using(
        lambda s, x: F.linear(x, s.w[:, :, 0]) + F.linear(x, s.w[..., 1]), (5,), 4, w=(4, 5, 2)
    ),
    "bilinear": Case(lambda: Pairs(), drawn(3, 5)),
}  # fmt: skip


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(3, 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[..., :3], x[..., 3:])


LAYOUTS = {
    "channels last": Case(channels_last(convolutions), drawn(3, 8, 8), gentle),
    "parts of channels last": Case(
        channels_last(lambda: Using(slices, 16, w=(8, 3, 3, 3))), drawn(2, 4, 4)
    ),
}


def old_weight_norm(layer: nn.Module, **options: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer, **options)


def fixed_length() -> nn.Module:
    layer = parametrizations.weight_norm(nn.Linear(5, 3, bias=False))
    layer.parametrizations.weight.original0.requires_grad_(False)
    return layer


def norms(normed: Callable[[nn.Module], nn.Module]) -> Case:
    """Every layer of a model with convolutions normalized."""

    def make() -> nn.Module:
        layers = convolutions()
        for at in (0, 2, 4, 6):
            layers[at] = normed(layers[at])
        return layers

    return Case(make, drawn(3, 8, 8), gentle)


def tokens_normed(normed: Callable[[nn.Module], nn.Module]) -> Case:
    def make() -> nn.Module:
        return nn.Sequential(normed(nn.Linear(5, 4)), nn.Tanh(), normed(nn.Linear(4, 3)))

    return Case(make, drawn(3, 5))


def lines_normed(dim: int | None) -> Case:
    """Convolutions in groups, there and back, with a norm for each entry of a dimension."""

    def make() -> nn.Module:
        return nn.Sequential(
            parametrizations.weight_norm(nn.Conv1d(4, 6, 3, padding=2, groups=2), dim=dim),
            nn.Tanh(),
            parametrizations.weight_norm(nn.ConvTranspose1d(6, 4, 3, stride=2), dim=dim),
            nn.Tanh(),
            parametrizations.weight_norm(nn.ConvTranspose1d(4, 4, 2, groups=2), dim=dim),
            nn.Flatten(),
        )

    return Case(make, drawn(4, 5))


class Doubled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale.exp() - weight.mean()


def parametrized() -> nn.Module:
    layer = nn.Linear(5, 3)
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


class Given(nn.Module):
    """What a layer with a computed weight gives is scaled, and is a factor of products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(5, 4, bias=False))
        self.scale, self.along = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        given = self.layer(x)
        return torch.mv(given, self.along)[:, None] + torch.tanh(given) * self.scale


def pruned(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(layer, "weight", 0.3)


NORMS = {
    "weight norm": norms(parametrizations.weight_norm),
    "weight norm of tokens": tokens_normed(parametrizations.weight_norm),
    "weight norm, one for all": tokens_normed(partial(parametrizations.weight_norm, dim=None)),
    "weight norm, by input": tokens_normed(partial(parametrizations.weight_norm, dim=1)),
    "weight norm of lines, by the first dimension": lines_normed(0),
    "weight norm of lines, by the second dimension": lines_normed(1),
    "weight norm of lines, by place": lines_normed(2),
    "weight norm of lines, one for all": lines_normed(None),
    "weight norm, of a fixed length": Case(fixed_length, drawn(5)),
    "weight norm by hooks": norms(old_weight_norm),
    "weight norm of tokens by hooks": tokens_normed(old_weight_norm),
    "spectral norm": norms(parametrizations.spectral_norm),
    "spectral norm of tokens": tokens_normed(parametrizations.spectral_norm),
    "spectral norm by hooks": norms(nn.utils.spectral_norm),
    "spectral norm of tokens by hooks": tokens_normed(nn.utils.spectral_norm),
    "spectral norm by another dimension": norms(partial(nn.utils.spectral_norm, dim=1)),
    "orthogonal": tokens_normed(parametrizations.orthogonal),
    "parametrized": Case(parametrized, drawn(5)),
    "pruned": norms(pruned),
    "given by a computed weight": Case(Given, drawn(5)),
}


class Flattening(nn.Module):
    """Flattens tokens for one layer, and pools them for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        mixed = self.mix(hidden.reshape(-1, 4)).reshape(hidden.shape)
        return self.head(mixed.mean(1))


class Repeated(nn.Module):
    """Uses one weight several times in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.head(x)


class Tied(nn.Module):
    """Two layers share a weight and have biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


def stacked(activation: nn.Module, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4, bias), activation, nn.Linear(4, 3, bias))


MODULES = {
    "alone": Case(lambda: nn.Linear(5, 3), drawn(5)),
    "no bias": Case(lambda: stacked(nn.ReLU(), bias=False), drawn(5)),
    "tokens of tokens": Case(lambda: stacked(nn.Tanh()), drawn(2, 3, 5)),
    "flattened": Case(Flattening, drawn(3, 5)),
    "several times": Case(Repeated, drawn(5)),
    "tied": Case(Tied, drawn(5)),
    "overwritten by its activation": Case(lambda: stacked(nn.ReLU(inplace=True)), drawn(5)),
}

CASES = {
    f"{family}, {name}": case
    for family, cases in (
        ("module", MODULES),
        ("einsum", CONTRACTIONS),
        ("product", PRODUCTS),
        ("layout", LAYOUTS),
        ("norm", NORMS),
    )
    for name, case in cases.items()
}
