"""Filters' gradients of each record are those of autograd, whatever is unfolded for them."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from dualform.layers.patches import filter_gradients
from dualform.ledger import Stream

RECORDS = 2
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("channels", "filters"), [(6, 1), (1, 6)])  # errors, or inputs, unfolded
def test_filters_gradients_are_those_of_autograd(dims: int, channels: int, filters: int) -> None:
    generator = torch.Generator().manual_seed(dims)
    size = tuple((9, 8, 7)[:dims])
    x = torch.randn(RECORDS, channels, *size, generator=generator, dtype=torch.float64)
    convolve = CONVOLUTIONS[dims - 1]
    for kernel, stride, dilation, padding in product((1, 2, 3), (1, 2, 3), (1, 2), (0, 1, 2)):
        weight = torch.zeros(filters, channels, *[kernel] * dims, dtype=torch.float64)
        options = {"stride": stride, "dilation": dilation, "padding": padding}
        after = convolve(x, weight, **options).shape[1:]
        errors = torch.randn(RECORDS, *after, generator=generator, dtype=torch.float64)
        layout = {
            "kind": "patches",
            "groups": 1,
            "kernel": [kernel] * dims,
            "stride": [stride] * dims,
            "dilation": [dilation] * dims,
            "padding": [[padding, padding]] * dims,
        }

        def loss(w: torch.Tensor, one: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
            return (convolve(one[None], w, **options)[0] * error).sum()  # noqa: B023

        expected = vmap(grad(loss), in_dims=(None, 0, 0))(weight, x, errors).flatten(2)
        stream = Stream("conv", tuple(x.shape[1:]), tuple(after), layout)
        found = filter_gradients(stream, x.flatten(1), errors.flatten(2))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
