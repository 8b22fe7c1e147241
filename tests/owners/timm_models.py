"""Attribution in models of timm: `python -m tests.owners.timm_models FOLDER`.

timm imports torchvision, of which there is no build for the CPU. Its models use nothing of it, so
an empty module stands in for it here.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Anything(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _StandIn(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return (
            ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "swin": (
        "SwinTransformer",
        {
            "img_size": 16,
            "patch_size": 2,
            "window_size": 2,
            "embed_dim": 8,
            "depths": (2, 2),
            "num_heads": (2, 2),
        },
        {"relative_position_bias_table": "its rows belong to no sample"},
    ),
    "vit": (
        "VisionTransformer",
        {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
        {},
    ),
    "convnext": ("ConvNeXt", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)}, {}),
    "mixer": (
        "MlpMixer",
        {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_blocks": 2},
        {},
    ),
}


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x)) % 3, reduction="none")


def main(folder: Path) -> None:
    sys.path.append(str(Path(sys.prefix) / "timm"))
    sys.meta_path.append(_StandIn())
    from tests.cases.case import Case
    from tests.cases.structures import numbers
    from tests.laws.attribution import attribution_holds
    from timm import models

    torch.set_num_threads(1)
    for name, (kind, options, by_step) in MODELS.items():
        size = options.get("img_size", 32)
        make = partial(getattr(models, kind), num_classes=3, drop_path_rate=0.0, **options)
        inputs = numbers(4, 3, size, size)
        case = Case(make, inputs, losses, by_step)
        attribution_holds(case, folder / name, reach=1e-8)
        print(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
