"""Uses that are reduced as the one before were reduced give the same records."""

from __future__ import annotations

import pytest
import torch

from dualform.layers import Site
from dualform.ledger import Stream, Term
from dualform.recording.bases import BookBases
from dualform.recording.keep import Summaries
from dualform.recording.reduction import Reducer
from dualform.recording.repeated import Repeated

SAMPLES, EACH, HEIGHT, WIDTH = 8, 40, 9, 7


def reducer() -> Reducer:
    site = Site("fc.weight", {"fc.weight": Term("outer"), "fc.bias": Term("sum", "flat")})
    stream = Stream("fc", (WIDTH,), (HEIGHT,))
    shapes = {"fc.weight": (HEIGHT, WIDTH), "fc.bias": (HEIGHT,)}
    return Reducer(site, stream, Summaries((2, 3)), shapes, BookBases())


def rows(seed: int, each: int = EACH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(SAMPLES, each, size, generator=generator, dtype=torch.float64)
        for size in (WIDTH, HEIGHT)
    ]
    return made[0], made[1]


@pytest.mark.parametrize("each", [1, EACH])  # rows along the bases, or summaries
def test_the_second_use_is_reduced_as_the_first(each: int) -> None:
    repeating, afresh = reducer(), reducer()
    for use in range(3 if each > 1 else 9):
        x, e = rows(use, each)
        order = (SAMPLES, each)
        afresh._last.clear()
        found, expected = (r.reduce(x, e, order, is_new=False) for r in (repeating, afresh))
        if found is None or expected is None:
            assert found is expected  # no bases yet
            repeating.bases.begin_step()
            afresh.bases.begin_step()
            continue
        assert bool(repeating._last)
        for one, other in zip(found, expected, strict=True):
            assert one.keys.shape == other.keys.shape
            assert torch.allclose(one.keys, other.keys, rtol=1e-12)
            assert torch.allclose(one.values, other.values, rtol=1e-12)
            for field in ("book", "term", "order", "key_dims", "value_dims", "numbers"):
                assert getattr(one, field) == getattr(other, field)
    assert found is not None


def test_other_shapes_and_new_bases_are_looked_at_anew() -> None:
    own = reducer()
    own.reduce(*rows(0), (SAMPLES, EACH), is_new=False)
    (again,) = own._last
    x, e = rows(1)
    assert again.records(x, e, (SAMPLES, EACH), own.bases) is not None
    assert again.records(*rows(1, EACH + 1), (SAMPLES, EACH + 1), own.bases) is None
    own.bases.stale.add("fc.weight")
    assert again.records(x, e, (SAMPLES, EACH), own.bases) is None


@pytest.mark.parametrize("together", [2, 8])
def test_several_rows_at_once_are_the_same(together: int) -> None:
    """What a GPU does where rows do not begin at multiples of 16 bytes."""
    own = reducer()
    own.reduce(*rows(0), (SAMPLES, EACH), is_new=False)
    (plain,) = own._last
    wide = plain._replace(
        U=torch.block_diag(*[plain.U] * together),
        V=torch.block_diag(*[plain.V] * together),
        together=(together, together),
    )
    x, e = rows(1)
    found, expected = (r.records(x, e, (SAMPLES, EACH), own.bases) for r in (wide, plain))
    assert found is not None
    assert expected is not None
    assert torch.allclose(found[0].values, expected[0].values, rtol=1e-12)
    assert isinstance(wide, Repeated)


def test_a_convolution_that_repeats_gives_the_same_records() -> None:
    layout = {"kind": "patches", "kernel": [3], "stride": [1], "dilation": [1], "groups": 1}
    stream = Stream("conv", (4, 9), (5, 9), {**layout, "padding": [[1, 1]]})
    site = Site("conv.weight", {"conv.weight": Term("outer")})

    def made() -> Reducer:
        shapes = {"conv.weight": (5, 4, 3)}
        return Reducer(site, stream, Summaries((2, 3)), shapes, BookBases())

    repeating, afresh = made(), made()
    torch.manual_seed(0)
    for use in range(3):
        x, e = torch.randn(SAMPLES, 36).double(), torch.randn(SAMPLES, 45).double()
        afresh._last.clear()
        order = (SAMPLES, 1)
        found, expected = (r.reduce(x, e, order, is_new=False) for r in (repeating, afresh))
        assert use == 0 or repeating._last
        assert found is not None
        assert expected is not None
        torch.testing.assert_close(found[0].values, expected[0].values, rtol=1e-12, atol=1e-12)
