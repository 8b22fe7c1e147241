"""How large the study is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PathsSetting:
    """How much noise chains have, and how the transformer is trained whose heads are pruned."""

    noises: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    """The standard deviation of each coordinate outside of the plane of both states."""
    widths: tuple[int, ...] = (10, 100, 1000)
    """N of the layers; the Gaussian process has none."""
    chains: int = 100
    test_chains: int = 1000
    length: int = 30
    seeds: int = 10
    images: int = 4000
    """Training images of the transformer."""
    test_images: int = 2000
    steps: int = 600
    batch: int = 64
    rate: float = 2e-3
    width: int = 32
    heads: int = 4
    layers: int = 2
    scored: int = 200
    """Training images by which heads are scored."""
    trained_seeds: int = 8


SETTINGS = {
    "tiny": PathsSetting(
        noises=(5.0,),
        widths=(10,),
        chains=40,
        test_chains=100,
        seeds=2,
        images=128,
        test_images=64,
        steps=4,
        batch=16,
        width=8,
        heads=2,
        scored=24,
        trained_seeds=2,
    ),
    "small": PathsSetting(),
    "paper": PathsSetting(
        noises=tuple(float(noise) for noise in range(11)),
        widths=(10, 30, 100, 300, 1000),
        test_chains=10_000,
        seeds=20,
        images=60_000,
        test_images=10_000,
        steps=6000,
        width=64,
        scored=600,
        trained_seeds=20,
    ),
}
