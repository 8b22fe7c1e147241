"""A small transformer that is really trained, its heads scored, and each of them left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.diagnose import heads as measured_heads
from dualform.diagnose import paths
from dualform.studies.data import Images
from dualform.studies.parts import Found
from dualform.studies.paths.setting import PathsSetting

SIDE = 4
"""So many patches a picture has in a row; each is a token."""
METHODS = ("paths, N = head", "paths, N = token", "norm", "gradient", "random")
"""By what heads are scored."""


class EncoderBlock(nn.Module):
    """Attention whose heads can be weakened, and an MLP, each after a norm and around itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inside, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, gates: Tensor | None = None) -> Tensor:
        parts = self.inside(self.norms[0](x)).view(*x.shape[:2], 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        if gates is not None:
            y = y * gates[:, :, None, None]
        x = x + self.mix(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class PatchTransformer(nn.Module):
    """Says whether a picture is of the first five classes (+1) or of the others (−1).

    >>> model = PatchTransformer(PathsSetting(width=8, heads=2))
    >>> model(torch.zeros(3, 28, 28)).shape
    torch.Size([3])
    """

    def __init__(self, setting: PathsSetting, pixels: int = 28) -> None:
        super().__init__()
        self.patch = pixels // SIDE
        self.embed = nn.Linear(self.patch**2, setting.width)
        self.place = nn.Parameter(0.1 * torch.randn(SIDE * SIDE, setting.width))
        self.blocks = nn.ModuleList(
            EncoderBlock(setting.width, setting.heads) for _ in range(setting.layers)
        )
        self.out = nn.Linear(setting.width, 1)

    def forward(self, pictures: Tensor, gates: Tensor | None = None) -> Tensor:
        """(samples,); gates (samples, layers, heads) multiply what heads give."""
        patches = pictures.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        x = self.embed(patches.reshape(len(pictures), SIDE * SIDE, -1)) + self.place
        for at, block in enumerate(self.blocks):
            x = block(x, None if gates is None else gates[:, at])
        return self.out(x.mean(1))[:, 0]  # type: ignore[no-any-return]


def measure_pruning(
    setting: PathsSetting, images: tuple[Images, Images], device: str, seed: int
) -> Found:
    """Trains, scores each head by every method, leaves out each head, and prunes by each order."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = (_inputs(one, device) for one in images)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order[: setting.images]], y[order[: setting.images]]
    test_x, test_y = test_x[: setting.test_images], test_y[: setting.test_images]
    model = PatchTransformer(setting, x.shape[-1]).to(device)
    _train(model, x, y, setting, seed)
    scores = _scores(model, x[: setting.scored], y[: setting.scored], setting, seed)
    count = setting.layers * setting.heads
    full, right = _tested(model, test_x, test_y, setting, ())
    ablations = [_tested(model, test_x, test_y, setting, (head,)) for head in range(count)]
    pruned = {
        name: [
            _tested(model, test_x, test_y, setting, _lowest(values, n))[1] for n in range(count + 1)
        ]
        for name, values in scores.items()
    }
    return {
        "loss": full,
        "accuracy": right,
        "scores": scores,
        "ablation": [loss - full for loss, _ in ablations],
        "fall": [right - accuracy for _, accuracy in ablations],
        "pruned": pruned,
    }


def _inputs(images: Images, device: str) -> tuple[Tensor, Tensor]:
    x = (images.pixels.float() - images.center) / images.spread
    return x.to(device), torch.where(images.y < 5, 1.0, -1.0).to(device)


def _train(model: PatchTransformer, x: Tensor, y: Tensor, setting: PathsSetting, seed: int) -> None:
    """By Adam, with a rate that falls to nothing."""
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, setting.steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(setting.steps):
        rows = torch.randint(len(x), (setting.batch,), generator=generator)
        loss = _losses(model(x[rows]), y[rows]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()


def _losses(out: Tensor, y: Tensor) -> Tensor:
    return F.softplus(-y * out)


def _scores(
    model: PatchTransformer, x: Tensor, y: Tensor, setting: PathsSetting, seed: int
) -> dict[str, list[float]]:
    """Each method's score of each head, layer by layer."""
    gates = torch.ones(len(x), setting.layers, setting.heads, device=x.device, requires_grad=True)
    _losses(model(x, gates), y).sum().backward()  # type: ignore[no-untyped-call]
    assert gates.grad is not None
    generator = torch.Generator().manual_seed(seed)
    widths = (setting.width // setting.heads, setting.width)
    by_paths: list[Any] = [
        paths(model, x, targets=y.cpu(), layers="blocks.*", width=n).each for n in widths
    ]
    found = [[score for score, _ in each] for each in by_paths]
    found.append([one.share for one in measured_heads(model, x, layers="blocks.*").heads])
    found.append(gates.grad.abs().mean(0).flatten().tolist())
    found.append(torch.rand(setting.layers * setting.heads, generator=generator).tolist())
    return dict(zip(METHODS, found, strict=True))


def _lowest(scores: list[float], count: int) -> tuple[int, ...]:
    order = sorted(range(len(scores)), key=lambda head: scores[head])
    return tuple(order[:count])


@torch.no_grad()
def _tested(
    model: PatchTransformer, x: Tensor, y: Tensor, setting: PathsSetting, without: tuple[int, ...]
) -> tuple[float, float]:
    """Loss and accuracy, without some heads."""
    gates = torch.ones(setting.layers * setting.heads, device=x.device)
    gates[list(without)] = 0.0
    out = model(x, gates.view(1, setting.layers, setting.heads).expand(len(x), -1, -1))
    return float(_losses(out, y).mean()), float((out.sign() == y).double().mean())
