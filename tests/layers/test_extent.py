"""A view of a parameter is the block that it is said to be, in every memory format."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dualform.layers.extent import extent
from dualform.memory.blocks import as_matrix, from_matrix


@st.composite
def views(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A parameter whose elements tell their place, in some memory format, and a view of it."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    plain = torch.arange(math.prod(shape)).reshape(shape)
    parameter = (
        plain.permute(order).contiguous().permute([order.index(d) for d in range(len(shape))])
    )
    view = parameter
    for dim in reversed(range(len(shape))):
        start = draw(st.integers(0, shape[dim] - 1))
        stop = draw(st.integers(start + 1, shape[dim]))
        step = draw(st.sampled_from([1, 1, 1, 2]))
        some = draw(st.sampled_from([slice(None), slice(start, stop, step), start]))
        view = view[(slice(None),) * dim + (some,)]
    view = view.permute(draw(st.permutations(range(view.ndim))))
    if view.ndim > 1 and draw(st.booleans()):
        shapes = (math.prod(view.shape[:2]), *view.shape[2:])
        flattened = view.reshape(shapes)
        view = flattened if flattened.data_ptr() == view.data_ptr() else view
    return parameter, view


@given(views(), st.data())
def test_a_view_is_its_block(pair: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    parameter, view = pair
    part = extent(parameter, view)
    if part is None:
        return
    dims = data.draw(st.permutations(range(view.ndim)))
    cut = data.draw(st.integers(0, view.ndim))
    outputs, inputs = dims[:cut], dims[cut:]
    found = part.block(outputs, inputs)
    if found is not None:
        (name, (top, left)), height = found, math.prod(view.shape[d] for d in outputs)
        matrix = as_matrix(parameter, name)
        wanted = view.permute([*outputs, *inputs]).reshape(height, -1)
        assert torch.equal(matrix[top : top + height, left : left + wanted.shape[1]], wanted)
        assert torch.equal(from_matrix(matrix, tuple(parameter.shape), name), parameter)
    stretch = part.flat()
    if stretch is not None:
        first = stretch[1][0]
        flat = parameter.reshape(-1)[first : first + view.numel()]
        assert torch.equal(flat, view.reshape(-1))


@given(views())
def test_a_whole_parameter_is_always_a_matrix(pair: tuple[Tensor, Tensor]) -> None:
    """Also in `channels_last`, and whichever of its dimensions count outputs."""
    parameter, _ = pair
    part = extent(parameter, parameter)
    assert part is not None
    assert part.flat() == ("flat", (0, 0))
    for outputs in range(parameter.ndim):
        inputs = [dim for dim in range(parameter.ndim) if dim != outputs]
        found = part.block([outputs], inputs)
        assert found is not None
        assert found[1] == (0, 0)
