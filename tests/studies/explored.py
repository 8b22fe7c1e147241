"""The explorer as the commands open it that a study prints at its end, and what it then shows."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from dualform.cli import cli
from dualform.explore import Explorer
from dualform.read.scores import Array


def opened(look: str, patch: pytest.MonkeyPatch) -> Explorer:
    """What `dualform view` would serve, asked in the words of a study's report."""
    words, served = shlex.split(look), list[Explorer]()
    while "=" in words[0]:
        patch.setenv(*words.pop(0).split("=", 1))
    patch.setattr("dualform.explore.server.serve", lambda every, *_: served.extend(every))
    CliRunner().invoke(cli, words[1:], catch_exceptions=False)
    (explorer,) = served
    return explorer


def drawn(preview: Mapping[str, Any]) -> Array:
    """The pixels of a picture as the page gets it."""
    assert preview["kind"] == "image"
    assert preview["crisp"]  # or small pictures would be blurred
    data = base64.b64decode(preview["source"].partition("base64,")[2])
    found: Array = np.asarray(Image.open(io.BytesIO(data)).convert("L")).astype(float)
    assert found.shape == (preview["height"], preview["width"])
    return found


def check_pictures(explorer: Explorer, pixels: Array, labels: list[str], asked: Array) -> None:
    """The explorer shows pictures, of samples and of queries, with the labels of samples.

    Args:
        pixels: (samples, height, width), whose places are their ids.
        asked: (queries, numbers), as the network takes them.
    """
    queries = explorer.view("queries", {})["queries"]
    assert len(queries) == len(asked)
    for card, x in zip(queries, asked, strict=True):
        seen = drawn(card["preview"])
        assert np.corrcoef(seen.ravel(), x)[0, 1] > 0.99
        assert card["title"].startswith("test ")
    for query in (queries[0]["query"], queries[-1]["query"]):
        sides = explorer.view("answer", {"query": query})["sides"]
        for side in ("for", "against"):
            assert sides[side]["samples"]
            for card in sides[side]["samples"]:
                np.testing.assert_array_equal(drawn(card["preview"]), pixels[card["id"]])
                assert str(card["label"]) == labels[card["id"]]
    assert str(explorer.view("sample", {"id": "3"})["label"]) == labels[3]
