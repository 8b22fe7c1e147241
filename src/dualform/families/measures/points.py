"""What points, weights, biases, masks, queries and values must be, in words."""

import torch
from torch import Tensor

from dualform.errors import FamilyError
from dualform.families.checks import holds, require_finite


def require_support(points: Tensor) -> None:
    """Raise where there is no point."""
    if points.shape[-2] == 0:
        raise FamilyError(
            f"points of shape {tuple(points.shape)} are an empty support, on which there is no "
            "distribution; give at least one point."
        )


def require_queries(eta: Tensor, points: Tensor) -> None:
    """Raise unless η can be multiplied with the points."""
    if eta.ndim == 1 and points.ndim > 2:
        raise FamilyError(
            f"eta of shape {tuple(eta.shape)} is one query, but points of shape "
            f"{tuple(points.shape)} are a batch of measures; give eta of shape "
            f"(…, q, {points.shape[-1]})."
        )
    if eta.dtype != points.dtype and not torch.is_autocast_enabled(eta.device.type):
        raise FamilyError(
            f"eta is {eta.dtype}, but the points are {points.dtype}; give eta as "
            f"eta.to({points.dtype})."
        )


def require_values(values: Tensor, points: Tensor) -> None:
    """Raise unless there is one row of values a point."""
    if values.ndim < 2 or values.shape[-2] != points.shape[-2]:
        raise FamilyError(
            f"values of shape {tuple(values.shape)} do not belong to {points.shape[-2]} points; "
            f"give one row for each: shape (…, {points.shape[-2]}, m)."
        )


def require_weights(points: Tensor, weights: Tensor) -> None:
    """Raise unless there is one weight a point, none negative and not all 0."""
    if weights.shape != points.shape[:-1]:
        raise FamilyError(
            f"weights of shape {tuple(weights.shape)} do not fit points of shape "
            f"{tuple(points.shape)}; give one for each point: shape {tuple(points.shape[:-1])}."
        )
    require_finite("weights", weights)
    if not holds((weights >= 0).all(-1) & (weights > 0).any(-1)):
        raise FamilyError(
            "weights must not be negative, and not all 0; to leave points out give them weight 0, "
            "to weigh them by logarithms use bias."
        )


def require_fitting(name: str, x: Tensor, points: Tensor) -> None:
    """Raise unless x broadcasts with the scores of points, and is no NaN or +∞."""
    if x.ndim == 0 or x.shape[-1] not in (1, points.shape[-2]):
        raise FamilyError(
            f"{name} of shape {tuple(x.shape)} does not fit {points.shape[-2]} points; it must "
            f"broadcast with scores of shape (…, q, {points.shape[-2]})."
        )
    if x.is_floating_point() and not holds(~x.isnan() & (x < torch.inf)):
        raise FamilyError(f"{name} has NaN or +∞; finite numbers and −∞ (no part) are meant.")


def require_offset(
    points: Tensor, weights: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> None:
    """Raise unless all that is added to the scores fits."""
    if weights is not None:
        require_weights(points, weights)
    if bias is not None:
        require_fitting("bias", bias, points)
    if mask is not None:
        require_fitting("mask", mask, points)
