"""A summary is `Uᵀ (Σ e ⊗ x) V`, whatever is multiplied first."""

from __future__ import annotations

import pytest
import torch

from dualform.layers.patches import patches
from dualform.ledger import Stream
from dualform.recording.contraction import errors_along, summaries_of
from dualform.recording.patch_products import patch_products

SAMPLES, HEIGHT, WIDTH = 3, 6, 10
CONV = {
    "kind": "patches",
    "kernel": [3],
    "stride": [1],
    "dilation": [1],
    "groups": 1,
    "padding": [[1, 1]],
}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("rows", [1, 2, 200])  # few: inputs along V first; many: whole inputs
@pytest.mark.parametrize(("k_o", "k_i"), [(2, 4), (None, 4), (2, None)])
def test_summaries_of_rows(rows: int, k_o: int | None, k_i: int | None) -> None:
    torch.manual_seed(rows)
    stream = Stream("fc", (WIDTH,), (HEIGHT,))
    keys, values = normal(SAMPLES * rows, WIDTH), normal(SAMPLES * rows, HEIGHT)
    U, V = k_o and normal(HEIGHT, k_o), k_i and normal(WIDTH, k_i)
    found = summaries_of(stream, keys, errors_along(stream, values, U, SAMPLES), V)
    sums = torch.einsum(
        "sro,sri->soi", values.view(SAMPLES, rows, HEIGHT), keys.view(SAMPLES, rows, WIDTH)
    )
    expected = sums if U is None else U.T @ sums
    expected = expected if V is None else expected @ V
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("places", [3, 40])
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize(("k_o", "k_i"), [(2, 4), (None, 4), (2, None)])
def test_summaries_of_patches(places: int, each: int, k_o: int | None, k_i: int | None) -> None:
    torch.manual_seed(places)
    stream = Stream("conv", (WIDTH, places), (HEIGHT, places), CONV)
    records = SAMPLES * each
    keys, values = normal(records, WIDTH * places), normal(records, HEIGHT * places)
    U, V = k_o and normal(HEIGHT, k_o), k_i and normal(WIDTH * 3, k_i)
    found = summaries_of(stream, keys, errors_along(stream, values, U, SAMPLES), V)
    sums = values.view(records, HEIGHT, places) @ patches(stream, keys)
    sums = sums.unflatten(0, (SAMPLES, each)).sum(1)
    expected = sums if U is None else U.T @ sums
    expected = expected if V is None else expected @ V
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("places", [3, 40])  # few and many: by the cheaper order of products
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 1), (3, 0)])
@pytest.mark.parametrize("wide", [False, True])  # more inputs than errors, or fewer
@pytest.mark.parametrize("whole", ["", "errors", "inputs"])
def test_convolutions_in_few_calls(
    places: int, kernel: int, stride: int, padding: int, wide: bool, whole: str
) -> None:
    torch.manual_seed(places)
    channels, outputs, k_o, k_i = (2, WIDTH, 5, 2) if wide else (WIDTH, HEIGHT, 2, 4)
    reached = kernel + (places - 1) * stride - 2 * padding
    layout = {**CONV, "kernel": [kernel], "stride": [stride], "padding": [[padding, padding]]}
    stream = Stream("conv", (channels, reached), (outputs, places), layout)
    U = None if whole == "errors" else normal(outputs, k_o)
    V = None if whole == "inputs" else normal(channels * kernel, k_i)
    keys, values = normal(SAMPLES, channels, reached), normal(SAMPLES, outputs, places)
    products = patch_products(stream, keys, values, U, V, SAMPLES)
    if V is None and (kernel > 1 or padding):
        assert products is None  # the usual way is as short
        return
    assert products is not None
    errors, found = products(keys, values)
    along = errors_along(stream, values, U, SAMPLES)
    torch.testing.assert_close(errors, along, rtol=1e-12, atol=1e-12)
    expected = along.mT @ patches(stream, keys)
    expected = expected if V is None else expected @ V
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
