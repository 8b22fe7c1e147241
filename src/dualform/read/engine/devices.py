"""Where rows are computed with: which devices there are, and how they multiply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dualform.errors import ReadingError


def device_named(given: torch.device | str) -> torch.device:
    """The device that was given, or an error that says which ones there are.

    >>> device_named("cpu")
    device(type='cpu')
    >>> device_named("gpu")
    Traceback (most recent call last):
    dualform.errors.ReadingError: there is no device 'gpu': ...
    """
    there = _devices()
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise _unknown(given, there) from error
    name = str(torch.device(device.type, device.index or 0)) if device.type != "cpu" else "cpu"
    if name not in there and device.type != "meta":
        raise _unknown(given, there)
    return device


def _devices() -> list[str]:
    """The devices of this machine that torch can use."""
    found = ["cpu", *(f"cuda:{at}" for at in range(torch.cuda.device_count()))]
    kinds = (("mps", torch.backends.mps.is_available()), ("xpu", torch.xpu.is_available()))
    return found + [f"{kind}:0" for kind, available in kinds if available]


def _unknown(given: torch.device | str, there: list[str]) -> ReadingError:
    names = " and ".join(f"'{name}'" for name in there)
    wants_cuda = str(given).startswith("cuda") and torch.version.cuda is None
    cure = "install a torch that was built with CUDA, or " if wants_cuda else ""
    return ReadingError(
        f"there is no device '{given}': torch {torch.__version__} finds {names} on this machine; "
        f"{cure}leave the device out to read on processors."
    )


@contextmanager
def exact_products() -> Iterator[None]:
    """A GPU multiplies float32 matrices by all of their digits, and not by those of TF32.

    >>> with exact_products():
    ...     torch.backends.cuda.matmul.fp32_precision  # from torch 2.9 on
    'ieee'
    """
    with _products("ieee", False):
        yield


@contextmanager
def rounded_products() -> Iterator[None]:
    """A GPU multiplies float32 matrices by the first 10 binary digits of each number: TF32.

    >>> with rounded_products():
    ...     torch.backends.cuda.matmul.fp32_precision  # from torch 2.9 on
    'tf32'
    """
    with _products("tf32", True):
        yield


@contextmanager
def _products(precision: str, rounded: bool) -> Iterator[None]:
    products = torch.backends.cuda.matmul
    by_name = hasattr(products, "fp32_precision")  # from torch 2.9 on; the other may then raise
    name, wanted = ("fp32_precision", precision) if by_name else ("allow_tf32", rounded)
    before = getattr(products, name)
    setattr(products, name, wanted)
    try:
        yield
    finally:
        setattr(products, name, before)
