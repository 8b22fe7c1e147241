"""What a comparison of rows with gradients allows for."""

from __future__ import annotations

import torch

from dualform.layers import Site
from dualform.ledger import Stream, Term
from dualform.recording.accounts import Evidence, Feed
from dualform.recording.pages import StreamRows
from dualform.recording.streams import OpenStream


def test_gradients_may_be_rounded_more_coarsely_than_rows_tell() -> None:
    """cuDNN's recurrent layers round as TF32 does, while their rows are 32-bit floats."""
    site = Site("w", {"w": Term("outer")})
    rows = StreamRows(torch.ones(1, 2), torch.ones(1, 3), torch.zeros(1, 3), torch.ones(1))

    def rounding(of: torch.dtype | None) -> float:
        opened = OpenStream(site, Stream("w", (2,), (3,)), site.terms, 0, rounding=of)
        feed, none = Feed(opened, dict(site.terms), [rows]), torch.zeros(1, 0)
        return Evidence([feed], {}, none, none.bool(), torch.zeros(1).bool()).rounding

    assert rounding(None) == torch.finfo(torch.float32).eps
    assert rounding(torch.float16) == rounding(None) * 2**13 / 250
