"""Layer hooks take over after the first step of plain layers, and see what a function mode sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dualform
from dualform.recording.calls import CallSource, FunctionCalls, LayerHooks
from dualform.recording.keep import Keep


class Convolved(nn.Sequential):
    """Convolutions and normalizations in several settings."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, padding="valid", groups=2, bias=False),
            nn.BatchNorm2d(6, track_running_stats=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 3),
        )


def changed(model: nn.Module) -> nn.Module:
    """A hook of the user's gives another output."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda layer, given, out: 2 * out)
    return model


class Turned(nn.Conv2d):
    """Another forward pass than that of its class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": Convolved,
    "hooks": lambda: changed(Convolved()),
}
KEEPS: dict[str, Keep] = {
    "rows": "rows",
    "no norms": {"1.*": "steps", "4.*": "steps", "*": "rows"},
}


def train(model: nn.Module, path: Path, keep: Keep, sources: list[CallSource]) -> list[Tensor]:
    """Five steps, of which some have images of another size."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    with dualform.record(model, optimizer, path, keep=keep) as recorder:
        for size in (7, 7, 5, 7, 5):
            model(torch.randn(4, 2, size, size)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert recorder._steps is not None
            sources.append(recorder._steps.stages.watch._source)
        assert recorder.failure is None
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("keep", KEEPS)
def test_both_see_the_same(
    model: str, keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, source in (("hooks", LayerHooks), ("mode", FunctionCalls)):
        if source is FunctionCalls:
            monkeypatch.setattr(FunctionCalls, "narrowed", lambda self, uses, by_step: self)
        torch.manual_seed(0)
        sources = list[CallSource]()
        weights = train(MODELS[model](), tmp_path / name, KEEPS[keep], sources)
        assert {type(each) for each in sources} == {source}
        audit = dualform.open(tmp_path / name).audit()
        assert audit.remainder <= 1e-5
        assert {book.granularity for book in audit.books if book.name[0] in "037"} == {"row"}
        shards = sorted((tmp_path / name).rglob("*.safetensors"))
        found.append((weights, [load_file(shard) for shard in shards]))
    (weights, arrays), (others, expected) = found
    assert all(map(torch.equal, weights, others))
    for one, other in zip(arrays, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_layers_that_do_something_else_are_seen_by_the_mode(tmp_path: Path) -> None:
    model, sources = nn.Sequential(Turned(2, 3, 3), nn.Flatten()), list[CallSource]()
    train(model, tmp_path / "run", "rows", sources)
    assert {type(source) for source in sources} == {FunctionCalls}
    assert dualform.open(tmp_path / "run").audit().coverage == 1
