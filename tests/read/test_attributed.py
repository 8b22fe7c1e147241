"""The attributed share: how much of what training changed belongs to samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dualform
from dualform.read import Run
from dualform.read.weights import initial_part, sampleless_part
from dualform.recording.keep import Keep

KEEP: dict[str, Keep] = {
    "rows": "rows",
    "int8": "int8",
    "summaries": dualform.summaries(2, 4),
    "a bias by step": {"2.bias": "steps", "*": dualform.summaries(2, 4)},
}


def trained(path: Path, keep: Keep) -> tuple[Run, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5)), torch.randn(24, 6, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, path, keep=keep, strict=True) as recorder:
        for step in range(6):
            ids = (torch.arange(8) + 8 * step) % 24
            recorder.samples(ids)
            (model(x[ids]) - 0.5).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path), model.eval(), x


@pytest.mark.parametrize("name", KEEP)
def test_it_stands_beside_every_answer(name: str, tmp_path: Path) -> None:
    """Where it is below 1; and it is what the parts of the answer say."""
    run, model, x = trained(tmp_path / "run", KEEP[name])
    target = lambda out: out[0, 0, 1]  # noqa: E731
    reading, explanation = run.spotlight(model, x[:2], 1)["2"], run.explain(model, x[:2], target)
    for answer, words in ((reading, "attributed"), (explanation, "is attributed to samples")):
        check = answer.check
        assert check is not None
        nobody = np.abs(check.steps)
        share = 1 - nobody / (np.abs(check.evidence) + nobody)
        np.testing.assert_allclose(check.attributed, share, rtol=1e-12)
        assert (words in repr(answer)) == bool((share < 1).any()) == (name != "rows")
    influence = run.influence(model, x[:2], target)
    assert ("is attributed to samples" in " ".join(repr(influence).split())) == (name != "rows")
    assert influence.attributed == pytest.approx(share_of(run), abs=1e-12)


@pytest.mark.parametrize("name", KEEP)
def test_an_audit_has_it_by_book_and_for_all(name: str, tmp_path: Path) -> None:
    run, _, _ = trained(tmp_path / "run", KEEP[name])
    audit = run.audit()
    source = run.source
    for line, book in zip(audit.books, run.info.books, strict=True):
        change = source.weights[book.name].double() - initial_part(source.accounting, book)
        lost = sampleless_part(source.accounting, book)
        assert line.change == pytest.approx(float(change.norm()))
        assert line.attributed == pytest.approx(float(1 - lost.norm() / change.norm()), abs=1e-9)
    assert audit.attributed == pytest.approx(share_of(run), abs=1e-9)
    assert ("belongs to no sample" in repr(audit)) == (name != "rows")
    by_step = [line for line in audit.books if line.granularity == "step"]
    assert [line.name for line in by_step] == ["2.bias"] * ("step" in name)
    assert all(line.attributed == 0 for line in by_step)


def share_of(run: Run) -> float:
    """`1 − ‖what no sample has‖ / ‖change‖`, of all parameters as one vector."""
    source = run.source
    pairs = [
        (
            sampleless_part(source.accounting, book),
            source.weights[book.name].double() - initial_part(source.accounting, book),
        )
        for book in run.info.books
    ]
    lost, change = (
        torch.cat([part.flatten() for part in side]) for side in zip(*pairs, strict=True)
    )
    return float(1 - lost.norm() / change.norm())
