"""Trainings with known answers, as worker processes can import them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dualform.read.scores import Array

SAMPLES, QUERIES, PENALTY = 60, 7, 40.0
chance = np.random.default_rng(3)
X, Y = chance.normal(size=(SAMPLES, 4)), chance.normal(size=SAMPLES)
Q = chance.normal(size=(QUERIES, 4))

Ids = NDArray[np.int64]


def ridge(ids: Ids, seed: int, noise: float = 0.0) -> Array:
    """Ridge regression on some samples: its predictions for the queries."""
    A = X[ids].T @ X[ids] + PENALTY * np.eye(4)
    found: Array = Q @ np.linalg.solve(A, X[ids].T @ Y[ids])
    return found + noise * np.random.default_rng([seed, *ids]).normal(size=QUERIES)


def left_out() -> Array:
    """(samples, queries): what each sample changes in the ridge regression on all, in closed form.

    `q A⁻¹ x (y − ŷ) / (1 − h)` with `h = x A⁻¹ x`, by Sherman and Morrison.
    """
    A = np.linalg.inv(X.T @ X + PENALTY * np.eye(4))
    residual = Y - X @ A @ X.T @ Y
    leverage = np.einsum("ni,ij,nj->n", X, A, X)
    found: Array = (Q @ A @ X.T).T * (residual / (1 - leverage))[:, None]
    return found


def slow_ridge(ids: Ids, seed: int) -> Array:
    time.sleep(0.1)
    return ridge(ids, seed)


def counted_ridge(ids: Ids, seed: int, log: Path) -> Array:
    """Leaves a line for every training."""
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{seed} {ids.sum()}\n")
    return ridge(ids, seed)


class StackedRidge:
    """Ridge regressions some at a time; it notes how many."""

    at_once = 3

    def __init__(self) -> None:
        self.stacks: list[int] = []

    def __call__(self, ids: Ids, seed: int) -> Array:
        raise AssertionError("one by one")

    def stacked(self, ids: Sequence[Ids], seeds: Sequence[int]) -> list[Array]:
        assert len({len(one) for one in ids}) == 1
        self.stacks.append(len(ids))
        if seeds[-1] == 2:
            raise Awkward(4, 5)
        return [ridge(*one) for one in zip(ids, seeds, strict=True)]


class Awkward(Exception):
    """An exception that cannot travel between processes."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fails_with_seed_1(ids: Ids, seed: int) -> Array:
    if seed == 1:
        raise Awkward(one=4, two=5)
    return ridge(ids, seed)


def dies(ids: Ids, seed: int) -> Array:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def growing(ids: Ids, seed: int) -> Array:
    """More numbers with each seed, which is not allowed."""
    return np.zeros(seed + 1)


def total(ids: Ids, seed: int) -> Array:
    """The sum of the positions, and of their squares; seeds shift it."""
    return np.array([ids.sum(), (ids**2).sum()]) + 100.0 * seed
