"""Parameters that make no distribution are refused, with words; what cannot be seen is trusted."""

import torch
from torch import Tensor

from dualform.errors import FamilyError


def visible(x: Tensor) -> bool:
    """Whether the numbers can be looked at: not on "meta", not inside `torch.func` or a compiler.

    >>> visible(torch.ones(2)), visible(torch.ones(2, device="meta"))
    (True, False)
    """
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return False
    try:
        x.data_ptr()
    except RuntimeError:  # wrapped by a transform: there is no storage
        return False
    return True


def holds(condition: Tensor) -> bool:
    """Whether all of it is true, as far as one can see.

    >>> holds(torch.tensor([True, False]))
    False
    """
    return not visible(condition) or bool(condition.all())


def require_finite(name: str, x: Tensor) -> None:
    """Raise where x has NaN or infinity.

    >>> require_finite("eta", torch.tensor([1.0, float("nan")]))
    Traceback (most recent call last):
    dualform.errors.FamilyError: eta has 1 of 2 numbers that are not finite; ...
    """
    finite = x.isfinite()
    if not holds(finite):
        raise FamilyError(
            f"{name} has {int((~finite).sum())} of {x.numel()} numbers that are not finite; a "
            "family needs finite parameters: look for NaN or infinity in what computed them."
        )


def require_temperature(temperature: float | Tensor) -> None:
    """Raise unless 0 < temperature < ∞.

    >>> require_temperature(0.0)
    Traceback (most recent call last):
    dualform.errors.FamilyError: temperature=0.0 is not a positive, finite number; ...
    """
    given = torch.as_tensor(temperature, dtype=torch.float64)
    if not holds((given > 0) & given.isfinite()):
        shown = temperature if isinstance(temperature, float | int) else given.detach().tolist()
        raise FamilyError(
            f"temperature={shown} is not a positive, finite number; a small one such as 1e-6 "
            "gives the hard maximum, a large one the plain average."
        )


def require_width(name: str, x: Tensor, width: int) -> None:
    """Raise unless the last dimension is as wide as the family.

    >>> require_width("eta", torch.ones(5, 3), 2)
    Traceback (most recent call last):
    dualform.errors.FamilyError: eta of shape (5, 3) has 3 columns, but this family has 2; ...
    """
    if x.ndim == 0 or x.shape[-1] != width:
        columns = x.shape[-1] if x.ndim else 0
        raise FamilyError(
            f"{name} of shape {tuple(x.shape)} has {columns} columns, but this family has {width}; "
            f"give {name} of shape (…, {width})."
        )
