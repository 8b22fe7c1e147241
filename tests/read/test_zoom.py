"""`run.zoom`: the rows of a few samples, found by running their visits again."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import dualform
from dualform.errors import (
    ModelMismatchError,
    ReadingError,
    UnknownLayerError,
    UnknownSampleError,
    UnknownStepError,
)
from dualform.ledger import Ledger
from dualform.memory.summary import SummarySides
from dualform.read import Run
from dualform.read import zoom as zooming
from dualform.read.engine import ShardRange
from dualform.read.scan import chunks
from dualform.recording.keep import Keep

SAMPLES, BATCH, STEPS = 8, 4, 5
EXACT = dualform.summaries(3, 6, "rows")


class Words(nn.Module):
    """A table, and a projection of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 7), nn.Linear(7, 20)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words).tanh())


class Tied(nn.Module):
    """A table that is also the head, a recurrent cell that is called for each token, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.norm = nn.Embedding(20, 7), nn.GRUCell(7, 7), nn.LayerNorm(7)

    def forward(self, words: Tensor) -> Tensor:
        state, found = torch.zeros(len(words), 7).to(self.embed.weight), []
        for token in self.embed(words).unbind(1):
            state = self.cell(token, state)
            found.append(state)
        return F.linear(self.norm(torch.stack(found, 1)), self.embed.weight)


def text(seed: int = 0) -> Tensor:
    return torch.randint(20, (SAMPLES, 6), generator=torch.Generator().manual_seed(seed))


def image() -> Tensor:
    return torch.randn(SAMPLES, 2, 6, 6, generator=torch.Generator().manual_seed(0))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3)),
        lambda: torch.randn(SAMPLES, 12, 9, generator=torch.Generator().manual_seed(0)),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(1)
        ),
        image,
    ),
    "words": (Words, text),
    "tied": (Tied, text),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@dataclass(frozen=True)
class Trained:
    """A run, its model and its data."""

    run: Run
    model: nn.Module
    x: Tensor

    def loss(self, model: nn.Module, ids: list[Any]) -> Tensor:
        """That of training."""
        return loss_of(model, self.x[ids])


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over samples, as usual."""
    out = model(x)
    if x.is_floating_point():
        return (out.flatten(1) - 0.5).square().sum(1).mean()
    return F.cross_entropy(out[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def train(
    path: Path,
    model: nn.Module,
    x: Tensor,
    optimizer: str = "sgd",
    keep: Keep = "rows",
    every: int = STEPS,
) -> Trained:
    """A few steps with clipping; the weights are kept after every so many."""
    made = OPTIMIZERS[optimizer](model.parameters())
    order = torch.Generator().manual_seed(3)
    with dualform.record(model, made, path, keep=keep, strict=True) as recorder:
        for step in range(STEPS):
            ids = torch.randperm(SAMPLES, generator=order)[:BATCH]
            recorder.samples(ids)
            loss_of(model, x[ids]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            made.step()
            made.zero_grad()
            if (step + 1) % every == 0:
                recorder.checkpoint()
    return Trained(dualform.open(path), model, x)


Make = Callable[..., Trained]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Each run once for all tests."""
    folder = tmp_path_factory.mktemp("zoomed")

    @cache
    def make(name: str, optimizer: str, keep: Keep, every: int) -> Trained:
        torch.manual_seed(0)
        new, inputs = MODELS[name]
        x, model = inputs(), new().double()
        x = x.double() if x.is_floating_point() else x
        path = folder / f"{name}-{optimizer}-{keep}-{every}".replace("/", "")
        return train(path, model, x, optimizer, keep, every)

    return lambda name, optimizer="sgd", keep="rows", every=STEPS: make(
        name, optimizer, keep, every
    )


def stored_rows(run: Run, layer: str, sample: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and errors of a sample's rows as the ledger has them, call by call backward."""
    ledger, found = Ledger(run.path), []
    for shard in ShardRange.of(ledger, step, step):
        for chunk in chunks(shard, ledger.info.stream(layer)):
            for _, _, rows in chunk.by_use():
                own = chunk.samples[rows] == sample
                found.append((chunk.keys[rows][own].clone(), chunk.values[rows][own].clone()))
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_the_ledger(name: str, optimizer: str, trained: Make) -> None:
    """At every visit, where the run has all rows: the weights before any step are known."""
    given = trained(name, optimizer)
    zoom = given.run.zoom([1, 6], given.model, given.loss)
    assert {visit.id for visit in zoom.visits} == {1, 6}
    for visit in zoom.visits:
        assert visit.distance == 0
        assert abs(visit.agreement.cosine - 1) < 1e-9
        assert abs(visit.scale * BATCH - 1) < 1e-6  # the mean over a batch
        assert list(visit.layers) == given.run.layers
        for layer, rows in visit.layers.items():
            stored = stored_rows(given.run, layer, int(visit.id), visit.step)[::-1]
            for side, mine in enumerate((rows.keys, rows.errors)):
                expected = torch.cat([pair[side] for pair in stored])
                torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-9)
            assert abs(rows.agreement.cosine - 1) < 1e-9
    assert not zoom.warning


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_in_the_bases_are_the_summaries(name: str, optimizer: str, trained: Make) -> None:
    """Where the weights of the step before were kept."""
    given = trained(name, optimizer, EXACT, 1)
    zoom = given.run.zoom([1, 6], given.model, given.loss)
    summaries = 0
    for visit in zoom.visits:
        assert visit.distance == 0
        assert visit.agreement.cosine > 1 - 1e-6
        for rows in visit.layers.values():
            for book, entries in rows.entries.items():
                for entry in entries:
                    if not isinstance(entry.rows, SummarySides) or entry.rows.bases.is_whole:
                        continue
                    summaries += 1
                    kept, size = entry.rows.kept, entry.rows.bases.size(shape_of(given.run, book))
                    total = kept.total(torch.ones(len(kept)), size)
                    blocks = [
                        b.total(torch.ones(len(b)), shape_of(given.run, book))
                        for b in rows.blocks(book)
                    ]
                    mine = entry.rows.bases.project(sum(blocks[1:], blocks[0]))
                    assert (mine - total).norm() < 1e-5 * total.norm()
    assert summaries


def shape_of(run: Run, book: str) -> tuple[int, int]:
    shape = next(b.shape for b in run.info.books if b.name == book)
    return shape[0], int(np.prod(shape[1:]))


@pytest.mark.parametrize("keep", ["rows", EXACT], ids=["rows", "summaries"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["linear", "conv", "tied"])
def test_contributions_by_row_add_up(name: str, optimizer: str, keep: Keep, trained: Make) -> None:
    """To what each sample contributed, in a spotlight and in an explanation."""
    given = trained(name, optimizer, keep, STEPS if keep == "rows" else 1)
    run, model, ids = given.run, copy.deepcopy(given.model).eval(), [1, 6]
    target = None if name == "conv" else lambda out: out[0, -1, 2]
    explanation = run.explain(model, given.x[:2], target)
    reading = run.spotlight(model, given.x[:2], 2).last
    zoom = run.zoom(ids, model, given.loss)
    for answer, scores in ((explanation, explanation), (reading, reading.samples())):
        found = zoom.contributions(answer)
        whose = np.array([place.id for place in found.places])
        for sample in ids:
            mine = found.values[whose == sample].sum(0)
            np.testing.assert_allclose(
                mine, scores.values[list(scores.ids).index(sample)], rtol=1e-4, atol=1e-7
            )
        size = np.abs(found.check.stored).max()
        assert np.abs(found.check.difference).max() < 1e-4 * size
        assert bool(found.beyond.any()) == (keep != "rows" and found.check.beyond.any())
        if answer is reading and keep == "rows" and name == "conv":
            largest = reading.rows(10**6)
            by_place = {(r.id, r.step, r.position, r.query): r.value for r in largest}
            for place, values in zip(found.places, found.values, strict=True):
                for query, value in zip(found.queries, values, strict=True):
                    known = by_place.get((place.id, place.step, place.position, query), 0.0)
                    assert abs(value - known) < 1e-6 * (1 + abs(known))


def test_beyond_the_bases_is_what_the_rows_add_in_full(trained: Make) -> None:
    """Contributions in the bases and beyond are those of the same visits in a run of all rows."""
    exact, given = trained("linear", "sgd"), trained("linear", "sgd", EXACT, 1)
    model = given.model.eval()
    found, full = (
        some.run.zoom([1], model, some.loss).contributions(
            some.run.spotlight(model, some.x[:2], 2)["2"]
        )
        for some in (given, exact)
    )
    assert found.beyond.any()
    assert not full.beyond.any()
    np.testing.assert_allclose(found.values + found.beyond, full.values, rtol=1e-4, atol=1e-7)


def test_it_takes_weights_between_those_kept_and_says_how_near(trained: Make) -> None:
    given = trained("words", "adamw", EXACT, 2)
    assert given.run.kept_steps == [0, 2, 4, 5]
    zoom = given.run.zoom([1, 6], given.model, given.loss)
    wanted = {1: (0,), 2: (0, 2), 3: (2,), 4: (2, 4), 5: (4,)}
    assert all(visit.weights_after == wanted[visit.step] for visit in zoom.visits)
    assert all(visit.distance == len(wanted[visit.step]) - 1 for visit in zoom.visits)
    near = [visit.agreement.cosine for visit in zoom.visits if not visit.distance]
    away = [visit.agreement.cosine for visit in zoom.visits if visit.distance]
    assert min(near) > 1 - 1e-6
    assert 0.999 < min(away) < min(near)
    frame = zoom.to_pandas()
    assert list(frame["distance"]) == [v.distance for v in zoom.visits for _ in v.layers]
    assert set(frame["layer"]) == {"embed", "head"}


def test_low_agreement_is_said_in_words(trained: Make) -> None:
    given = trained("words", "sgd", EXACT, 1)
    zoom = given.run.zoom([1], given.model, lambda model, ids: loss_of(model, text(5)[ids]))
    assert zoom.agreement < 0.9
    assert "are not those of training (agreement below 0.9)" in repr(zoom)
    assert "so the loss or its data is another one" in zoom.warning
    found = zoom.contributions(given.run.spotlight(given.model, given.x[:1], 2).last)
    assert zoom.warning.split(":")[0] in repr(found).replace("\n", " ")


@pytest.mark.parametrize("training", [True, False])
def test_model_and_random_numbers_stay_as_they_are(training: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    x = torch.randn(SAMPLES, 4, 9).mean(1)
    given = train(tmp_path / "run", model, x, keep="steps")
    given = train(tmp_path / "rows", model, x)
    model.train(training)
    model[3].weight.grad = torch.ones_like(model[3].weight)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    def loss(copied: nn.Module, ids: list[Any]) -> Tensor:
        assert copied is not model
        assert copied.training == training
        return loss_of(copied, x[ids * 2])

    given.run.zoom([1], model, loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training == training
    assert all(torch.equal(old, model.state_dict()[name]) for name, old in before.items())
    assert model[0].weight.grad is None
    assert bool((model[3].weight.grad == 1).all())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:the model runs without torch.compile")
def test_a_compiled_model_is_run_as_it_was_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.compile(Words(), backend="aot_eager")
    given = train(tmp_path / "run", model, text(), keep=EXACT, every=1)
    zoom = given.run.zoom([1, 6], model, given.loss)
    assert all(visit.distance == 0 for visit in zoom.visits)
    assert zoom.agreement > 1 - 1e-5


def test_steps_and_layers_choose(trained: Make) -> None:
    given = trained("words")
    every = given.run.zoom([1], given.model, given.loss)
    last = every.visits[-1].step
    some = given.run.zoom([1], given.model, given.loss, steps=[last], layers=["head"])
    (visit,) = some.visits
    assert visit.step == last
    assert list(visit.layers) == ["head"]
    found = some.contributions(given.run.spotlight(given.model, given.x[:1], 2)["head"])
    assert {place.layer for place in found.places} == {"head"}
    steps = {
        visit.id: visit.step for visit in given.run.zoom([1, 6], given.model, given.loss).visits
    }
    each = {name: [step] for name, step in steps.items()}
    both = given.run.zoom([1, 6], given.model, given.loss, steps=each)
    assert {visit.id: visit.step for visit in both.visits} == steps
    assert len(both.visits) == 2


def test_results_are_shown(trained: Make) -> None:
    given = trained("words", "sgd", EXACT, 1)
    zoom = given.run.zoom([1, 6], given.model, given.loss)
    answer = given.run.explain(given.model, given.x[:2], lambda out: out[0, -1, 3])
    found = zoom.contributions(answer)
    best = found.top(3)
    assert [row.value for row in best][:3] == sorted(found.values[:, 0])[::-1][:3]
    assert best[0].layer in ("embed", "head")
    assert best[0].position is not None
    assert found.bottom(1)[0].value == found.values[:, 0].min()
    assert list(found.to_pandas().columns)[:5] == ["id", "step", "layer", "call", "position"]
    by_token = found.positions("head")
    assert by_token.ids[:2] == ["6[0]", "6[1]"]  # in the order of their first visits
    assert len(by_token) == 12
    np.testing.assert_allclose(found.positions().values.sum(0), found.values.sum(0))
    assert len(found.plot().get_lines()) == 3
    assert "first query: rows" in repr(found)
    assert "in no sample's share" in repr(found)
    assert re.search(r"agreement: of the rows", repr(zoom))


BAD: dict[str, tuple[Callable[[Trained], Any], type[Exception], str]] = {
    "unknown id": (
        lambda t: t.run.zoom([99], t.model, t.loss),
        UnknownSampleError,
        "sample 99 is not in this run; it has 8 samples, such as 0, 1, 2.",
    ),
    "not a list": (
        lambda t: t.run.zoom(1, t.model, t.loss),
        ReadingError,
        "got the id 1; give a list of ids: [1].",
    ),
    "no ids": (
        lambda t: t.run.zoom([], t.model, t.loss),
        ReadingError,
        "zoom got no ids; give those of the samples to run again, such as [7].",
    ),
    "not visited yet": (
        lambda t: t.run.at(0).zoom([1], t.model, t.loss),
        UnknownSampleError,
        "sample 1 was not visited up to step 0, which is read here",
    ),
    "not visited then": (
        lambda t: t.run.zoom([1], t.model, t.loss, steps=[77]),
        UnknownStepError,
        "none of these samples was visited in [77]; there are visits in the steps",
    ),
    "unknown layer": (
        lambda t: t.run.zoom([1], t.model, t.loss, layers=["body"]),
        UnknownLayerError,
        "layer 'body' is not in this run; it recorded 'embed', 'head'.",
    ),
    "another model": (
        lambda t: t.run.zoom([1], nn.Linear(2, 2), t.loss),
        ModelMismatchError,
        "the model is not the recorded one: its 'embed.weight' does not exist",
    ),
    "no model": (
        lambda t: t.run.zoom([1], t.loss, t.loss),
        ModelMismatchError,
        "the model is of type method; give the trained torch.nn.Module.",
    ),
    "no loss": (
        lambda t: t.run.zoom([1], t.model, 3.0),
        ReadingError,
        "the loss is of type float; give a function of a model and a list of ids",
    ),
    "several numbers": (
        lambda t: t.run.zoom([1], t.model, lambda model, ids: model(t.x[ids])),
        ReadingError,
        "the loss of sample 1 is of shape (1, 6, 20); give one number",
    ),
    "no tensor": (
        lambda t: t.run.zoom([1], t.model, lambda model, ids: 0.5),
        ReadingError,
        "the loss of sample 1 is of type float; give one number",
    ),
    "detached": (
        lambda t: t.run.zoom([1], t.model, lambda model, ids: t.loss(model, ids).detach()),
        ReadingError,
        "does not depend on the parameters of the model that it is called with",
    ),
    "its own model": (
        lambda t: t.run.zoom([1], t.model, lambda _, ids: t.loss(t.model, ids)),
        ReadingError,
        "does not depend on the parameters of the model that it is called with",
    ),
    "no rows": (
        lambda t: t.run.zoom([1], t.model, lambda model, ids: model.head.weight.square().sum()),
        ReadingError,
        "the loss of sample 1 left no rows in 'embed', 'head'",
    ),
    "no answer": (
        lambda t: t.run.zoom([1], t.model, t.loss).contributions(3),
        ReadingError,
        "contributions(answer) got int; give what one layer of a spotlight says",
    ),
    "another step": (
        lambda t: (
            t.run.at(4)
            .zoom([1], t.model, t.loss)
            .contributions(t.run.spotlight(t.model, t.x[:1], 2).last)
        ),
        ReadingError,
        "and the zoom about step 4 of",
    ),
    "another layer": (
        lambda t: t.run.zoom([1], t.model, t.loss, layers=["embed"]).contributions(
            t.run.spotlight(t.model, t.x[:1], 2)["head"]
        ),
        ReadingError,
        "none of these rows has a part in the answer",
    ),
    "no such position": (
        lambda t: (
            t.run.zoom([1], t.model, t.loss)
            .contributions(t.run.spotlight(t.model, t.x[:1], 2)["head"])
            .positions("embed")
        ),
        ReadingError,
        "layer 'embed' has no rows here; there are 'head'.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_questions_are_refused_in_words(case: str, trained: Make) -> None:
    ask, error, words = BAD[case]
    given = trained("words")
    with pytest.raises(error, match=re.escape(words)):
        ask(given)
    assert all(parameter.grad is None for parameter in given.model.parameters())


def test_too_much_is_refused(trained: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    given = trained("words")
    monkeypatch.setattr(zooming, "MOST_VISITS", 2)
    with pytest.raises(ReadingError, match=r"these 8 samples have 20 visits, .*2 are the most\."):
        given.run.zoom(given.run.ids, given.model, given.loss)
    monkeypatch.setattr(zooming, "MOST_BYTES", 1000)
    with pytest.raises(ReadingError, match=r"the rows of the first 1 visits take 0.0 GB"):
        given.run.zoom([1], given.model, given.loss)
