"""Functions of torch without a public name that layers call all the same.

`F.grouped_mm` and `nn.utils.parametrizations.weight_norm` hand their whole work to these, so they
are what is seen. A torch that does not have them has no such calls either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _existing(name: str) -> tuple[Callable[..., Any], ...]:
    return (getattr(torch, name),) if hasattr(torch, name) else ()


GROUPED_PRODUCT = _existing("_grouped_mm")
WEIGHT_NORM = _existing("_weight_norm")
