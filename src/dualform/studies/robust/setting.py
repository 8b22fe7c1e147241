"""The layers that are compared, how they are trained, and what images are contaminated with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dualform.errors import ReadingError
from dualform.studies.encoders import EncoderShape

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "robust": ("robust", {}),
    "robust_mild": ("robust", {"sparsity": 1.0}),
    "symmetric": ("robust", {"rounds": 0, "symmetric": True}),
    "robust_symmetric": ("robust", {"symmetric": True}),
    "published": ("robust", {"variant": "published", "symmetric": True}),
}
"""Each layer: its kind, and its options. "symmetric" is softmax attention with keys as queries."""
REFERENCES = {
    "robust": "softmax",
    "robust_mild": "softmax",
    "robust_symmetric": "symmetric",
    "published": "symmetric",
}
"""What a layer is without its rounds."""
TRAININGS = ("clean", "contaminated")
ATTACKS = ("tokens", "noise", "FGSM", "PGD")
"""What is done to test images; the last two know the network."""


@dataclass(frozen=True)
class RobustSetting:
    """The model, its training, and what is done to images, whose pixels are from 0 to 1."""

    shape: EncoderShape
    patch: int
    """Pixels on a side of a patch, which is a token."""
    images: int
    tests: int
    attacked: int
    """How many of the test images FGSM and PGD are tried on."""
    epochs: int
    rate: float
    seeds: int
    dataset: str = "mnist"
    batch: int = 64
    contaminated: float = 0.25
    """The share of each training image's tokens that are corrupted in contaminated training."""
    tokens: tuple[float, ...] = (0.125, 0.25, 0.5)
    """Shares of tokens that are replaced by noise."""
    noise: tuple[float, ...] = (0.1, 0.2, 0.4)
    """Standard deviations."""
    steps: tuple[float, ...] = (0.02, 0.05, 0.1)
    """How far FGSM and PGD move a pixel."""
    pgd_steps: int = 10
    layers: tuple[str, ...] = tuple(LAYERS)
    half: bool = False
    """Whether a GPU trains in bfloat16 (autocast); attacks and tests are in float32."""

    def strengths(self, attack: str) -> tuple[float, ...]:
        """The strengths of one of `ATTACKS`, weakest first.

        >>> SETTINGS["small"].strengths("noise")
        (0.1, 0.2, 0.4)
        """
        return {"tokens": self.tokens, "noise": self.noise}.get(attack, self.steps)

    def conditions(self) -> list[str]:
        """What test images are: clean, and contaminated in every way.

        >>> SETTINGS["small"].conditions()[:3]
        ['clean', 'tokens 0.125', 'tokens 0.25']
        """
        each = (f"{attack} {s:g}" for attack in ATTACKS for s in self.strengths(attack))
        return ["clean", *each]

    def pairs(self) -> list[tuple[str, str]]:
        """Each layer that has rounds, and what it is without them, where both are trained.

        >>> SETTINGS["small"].pairs()[0]
        ('robust', 'softmax')
        """
        known = self.layers
        return [(one, other) for one, other in REFERENCES.items() if {one, other} <= {*known}]


SETTINGS = {
    "small": RobustSetting(
        EncoderShape(width=32, heads=4, hidden=64, layers=2, dropout=0.0),
        patch=7,
        images=3000,
        tests=500,
        attacked=200,
        epochs=10,
        rate=4e-3,
        seeds=5,
    ),
    "paper": RobustSetting(
        EncoderShape(width=192, heads=4, hidden=768, layers=12),
        patch=2,
        images=60_000,
        tests=10_000,
        attacked=2000,
        epochs=20,
        rate=5e-4,
        seeds=5,
        dataset="fashion-mnist",
        batch=256,
        pgd_steps=20,
        half=True,
    ),
}


def require_known_layers(names: Sequence[str]) -> None:
    """Raises unless all names are in `LAYERS`.

    >>> require_known_layers(["softmax", "published"])
    """
    for unknown in (name for name in names if name not in LAYERS):
        raise ReadingError(
            f"attention layer '{unknown}' is not in this study; it has {', '.join(LAYERS)}."
        )
