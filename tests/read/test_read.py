"""What a run answers, against plain float64 references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.told import told
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dualform
from dualform.errors import (
    ModelMismatchError,
    ReadingError,
    RecordingWarning,
    UnknownLayerError,
    UnknownSampleError,
    UnknownStepError,
)
from dualform.read.largest import Largest
from dualform.read.scan import Chunk
from dualform.read.suspicion import row_errors

SAMPLES, EPOCHS, BATCH = 30, 4, 6


class Trained:
    """A recorded float64 training, and everything a plain loop keeps of it."""

    def __init__(self, path: Path, ids: list[str] | None = None, buffer: int = 1 << 13) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        self.x, self.labels = torch.randn(SAMPLES, 5).double(), torch.arange(SAMPLES) % 3
        orders = [torch.randperm(SAMPLES) for _ in range(EPOCHS)]
        self.names = ids or list(range(SAMPLES))
        self.gradients: list[list[tuple[int, Tensor]]] = []
        self.lr, self.decay = 0.2, 0.05
        optimizer = SGD(self.model.parameters(), lr=self.lr, weight_decay=self.decay)
        self.path = path
        with dualform.record(self.model, optimizer, path, buffer_bytes=buffer) as recorder:
            recorder.describe(self.names, labels=self.labels)
            for order in orders:
                for part in order.split(BATCH):
                    recorder.samples([self.names[i] for i in part])
                    self.step(optimizer, part)
                recorder.checkpoint()
        self.run = dualform.open(path)

    def step(self, optimizer: SGD, part: Tensor) -> None:
        """One step, keeping each sample's own gradient of the last layer's weight."""
        twin = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        twin.load_state_dict(self.model.state_dict())
        each = []
        for i in part.tolist():
            loss = F.cross_entropy(twin(self.x[[i]]), self.labels[[i]]) / len(part)
            each.append((i, torch.autograd.grad(loss, twin[2].weight)[0]))
        self.gradients.append(each)
        F.cross_entropy(self.model(self.x[part]), self.labels[part]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def contributions(self, query: Tensor, unit: int, until: int | None = None) -> np.ndarray:
        """(samples,): what each sample's gradients, decayed as they were, add to one output."""
        steps = len(self.gradients) if until is None else until
        found = torch.zeros(SAMPLES, dtype=torch.float64)
        for t, each in enumerate(self.gradients[:steps]):
            coefficient = -self.lr * (1 - self.lr * self.decay) ** (steps - 1 - t)
            for sample, gradient in each:
                found[sample] += coefficient * (gradient[unit] @ query)
        return found.numpy()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained") / "run")


def bias_free(trained: Trained, x: Tensor) -> tuple[dualform.Reading, Tensor]:
    reading = trained.run.spotlight(trained.model, x, output=1)["2"]
    return reading, reading.queries.inputs


def test_contributions_equal_each_sample_s_own_gradients(trained: Trained) -> None:
    """The dual form against autograd, one sample at a time; the bias taken off both sides."""
    reading, inputs = bias_free(trained, trained.x[:4])
    memory = reading.memory()
    order = row_errors(reading.source, reading.layer).samples
    for at in range(4):
        scores = memory.scores(inputs[at][None])[0] * memory.values[:, 1]
        summed = np.zeros(SAMPLES)
        np.add.at(summed, order, scores.numpy())
        assert abs(summed - trained.contributions(inputs[at], 1)).max() < 1e-14


def test_samples_are_rows_summed(trained: Trained) -> None:
    reading, _ = bias_free(trained, trained.x[:4])
    rows = reading.rows(SAMPLES * EPOCHS)
    assert len(rows) == 4 * SAMPLES * EPOCHS
    scores = reading.samples()
    summed = np.zeros_like(scores.values)
    for row in rows.rows:
        summed[scores.ids.index(row.id), reading.names.index(row.query)] += row.value
    assert abs(summed - scores.values).max() < 1e-14
    sizes = [abs(row.value) for row in rows.rows[: SAMPLES * EPOCHS]]
    assert sizes == sorted(sizes, reverse=True)


def test_the_sum_is_the_layer_s_output(trained: Trained) -> None:
    for layer, reading in trained.run.spotlight(trained.model, trained.x).items():
        check = reading.check
        summed = reading.initial + reading.samples().values.sum(0) + check.steps + reading.remainder
        actual = (reading.queries.outputs * reading.directions).sum(1).numpy()
        assert abs(summed - actual).max() < 1e-12, layer
        assert abs(reading.remainder).max() < 1e-12


def test_every_grouping_sums_to_the_evidence(trained: Trained) -> None:
    reading = trained.run.spotlight(trained.model, trained.x[:3])["2"]
    evidence = reading.check.evidence
    for scores in (
        reading.by(),
        reading.by(lambda sample: sample % 2),
        reading.by(dict.fromkeys(range(SAMPLES), "all")),
    ):
        assert abs(scores.values.sum(0) - evidence).max() < 1e-12
    for by, count in (("step", 20), ("epoch", EPOCHS)):
        timeline = reading.timeline(by)
        assert len(timeline) == count
        assert abs(timeline.values.sum(0) - evidence).max() < 1e-12
        assert abs(timeline.cumulative[-1] - evidence).max() < 1e-12
    assert reading.by().ids == [0, 1, 2]


def test_reading_as_of_an_earlier_step(trained: Trained) -> None:
    for step in (5, 7, 10):
        run = trained.run.at(step)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        model.load_state_dict(run.state_dict())
        reading = run.spotlight(model, trained.x[:2], output=1)["2"]
        expected = trained.contributions(reading.queries.inputs[0], 1, until=step)
        inner = (
            reading.memory().scores(reading.queries.inputs[:1])[0] * reading.memory().values[:, 1]
        )
        assert abs(float(inner.sum()) - expected.sum()) < 1e-13
        assert abs(reading.remainder).max() < 1e-12
    assert trained.run.at(10).audit().measured_at == 10
    assert trained.run.at(7).audit().measured_at == 5
    assert trained.run.at(3).audit().measured_at == 0
    assert np.isnan(trained.run.at(3).audit().remainder)


def test_subtracting_takes_contributions_away(trained: Trained) -> None:
    gone = [3, 8]
    state = trained.run.subtract(gone)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model.load_state_dict(state)
    reading = trained.run.spotlight(trained.model, trained.x[:4], output=2)["2"]
    query = reading.queries.inputs
    after = (query @ model[2].weight.T + model[2].bias)[:, 2].detach().numpy()
    lost = reading.samples().values[gone].sum(0)
    assert abs(after - (reading.total - lost)).max() < 1e-13
    everything = trained.run.subtract(trained.run.ids)
    kept = (1 - trained.lr * trained.decay) ** 20
    initial = trained.run.at(0).state_dict()
    for name, weight in everything.items():
        assert (weight - kept * initial[name]).abs().max() < 1e-12


def test_keys_only_is_the_published_score(trained: Trained) -> None:
    reading, inputs = bias_free(trained, trained.x[:2])
    scores = reading.keys_only()
    assert scores.title.startswith("keys only")
    memory = reading.memory()
    order = row_errors(reading.source, reading.layer).samples
    expected = np.zeros((SAMPLES, 2))
    np.add.at(expected, order, (memory.keys @ inputs.T).abs().numpy())
    assert abs(scores.values - expected).max() < 1e-12


def test_directions(trained: Trained) -> None:
    """A direction over outputs reads the same combination of the outputs' readings."""
    model, x = trained.model, trained.x[:2]
    direction = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 1.0]])
    mixed = trained.run.spotlight(model, x, output=direction)["2"].samples().values
    units = [trained.run.spotlight(model, x, output=u)["2"].samples().values for u in range(3)]
    assert abs(sum(units[u] * direction[:, u].numpy() for u in range(3)) - mixed).max() < 1e-13
    chosen = trained.run.spotlight(model, x, output=[2, 0])["2"]
    assert chosen.asked == ["output 2", "output 0"]
    assert abs(chosen.samples().values[:, 0] - units[2][:, 0]).max() == 0


def test_string_ids(tmp_path: Path, trained: Trained) -> None:
    """Ids belong to the user: the same training with names gives the same numbers."""
    names = [f"sample é {i}" for i in range(SAMPLES)]
    named = Trained(tmp_path / "run", names)
    first = trained.run.spotlight(trained.model, trained.x[:2])["2"].samples()
    second = named.run.spotlight(named.model, named.x[:2])["2"].samples()
    by_name = dict(zip(second.ids, second.values.tolist(), strict=True))
    assert [by_name[names[i]] for i in first.ids] == first.values.tolist()
    assert named.run.subtract([names[4]])["2.weight"].shape == (3, 7)


def test_one_shard_or_many(tmp_path: Path, trained: Trained) -> None:
    other = Trained(tmp_path / "run", buffer=1 << 30)
    assert len(other.run._ledger.shards) < len(trained.run._ledger.shards) + 1
    one = trained.run.spotlight(trained.model, trained.x[:2])["0"].samples().values
    assert (
        abs(one - other.run.spotlight(other.model, other.x[:2])["0"].samples().values).max() < 1e-13
    )


def test_results_print_convert_and_plot(trained: Trained) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    run = trained.run
    reading = run.spotlight(trained.model, trained.x[:2])["2"]
    results = [run, run.audit(), reading, reading.samples(), reading.top(3), reading.rows(3)]
    results += [
        reading.timeline(),
        reading.timeline("epoch"),
        run.spotlight(trained.model, trained.x),
    ]
    for result in results:
        assert len(repr(result).splitlines()) > 3
        assert "<pre" in result._repr_html_()
    scores = reading.samples()
    assert scores.to_pandas().shape == scores.numpy().shape == tuple(scores.tensor().shape)
    ranked = reading.top(3).to_pandas()
    assert ranked.groupby("query")["value"].is_monotonic_decreasing.tolist() == [True, True]
    assert len(run.audit().to_pandas()) == 4
    assert reading.timeline("epoch").to_pandas().shape == (EPOCHS, 2)
    assert reading.timeline().numpy().shape == tuple(reading.timeline().tensor().shape)
    for plotted in (reading.plot(), reading.timeline().plot(), reading.top(3).plot()):
        assert plotted.get_xlabel()
    mpl.pyplot.close("all")


def test_questions_a_run_cannot_answer(trained: Trained) -> None:
    run, model, x = trained.run, trained.model, trained.x
    with pytest.raises(UnknownLayerError, match=r"layer 'fc9' is not in this run; it recorded '0'"):
        run.spotlight(model, x)["fc9"]
    with pytest.raises(UnknownStepError, match="step 99 is not in this run; it has steps 0 to 20"):
        run.at(99)
    with pytest.raises(UnknownSampleError, match="sample 77 is not in this run; it has 30 samples"):
        run.subtract([77])
    with pytest.raises(ReadingError, match="output=9 does not fit 30 queries of a layer with 7"):
        run.spotlight(model, x, output=9)["0"]
    with pytest.raises(ReadingError, match="timeline by 'week': there are 'step' and 'epoch'"):
        run.timeline(model, x, by="week")
    with pytest.raises(ReadingError, match="sample 2 has no group"):
        run.spotlight(model, x)["2"].by({0: "a", 1: "b"})
    with pytest.raises(ReadingError, match="give 'label', a mapping from id to group such as"):
        run.spotlight(model, x)["2"].by("color")


def test_a_run_without_rows_says_so(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    with told(tmp_path / "run"), dualform.record(model, optimizer, tmp_path / "run"):
        optimizer.step(closure)
    run = dualform.open(tmp_path / "run")
    with pytest.raises(ReadingError, match="no layer of this run was booked by row"):
        run.timeline(model, x)
    with pytest.raises(UnknownSampleError, match="this run knows no samples"):
        run.subtract([1])


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(RecordingWarning, match="the recorder saw no step"),
        dualform.record(model, sgd, tmp_path / "run"),
    ):
        run = dualform.open(tmp_path / "run")
    assert "none committed yet" in str(run)
    assert "no step is committed up to here: there is nothing to add up" in str(run.audit())
    committed = "no step of this run is committed yet; a recording commits every 30 seconds"
    with pytest.raises(ReadingError, match=committed):
        run.timeline(model, torch.zeros(1, 3))
    with pytest.raises(UnknownSampleError, match=f"this run knows no samples: {committed}"):
        run.suspicion()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda run, reading: run.at(0).suspicion(), "layer '2' has no rows up to step 0; ask at"),
        (
            lambda run, reading: run.spotlight(nn.Linear(2, 2).state_dict(), torch.zeros(1, 2)),
            "the model is of type OrderedDict; give the trained torch.nn.Module",
        ),
        (
            lambda run, reading: run.spotlight(nn.Sequential(), torch.zeros(1, 2)),
            "its '0.weight' does not exist",
        ),
        (
            lambda run, reading: run.revisit([0])[2],
            r"layer 2 is not in this run; it recorded '0', '2'",
        ),
        (lambda run, reading: reading.top(0), "k=0: ask for at least one sample"),
        (lambda run, reading: reading.by([0, 1]), r"by\(list\): give 'label', a mapping"),
        (lambda run, reading: run.subtract(3), r"got the id 3; give a list of ids: \[3\]"),
        (lambda run, reading: run.revisit("a"), "give a list of ids"),
    ],
)
def test_questions_of_the_wrong_form(ask: object, message: str, trained: Trained) -> None:
    reading = trained.run.spotlight(trained.model, trained.x[:1]).last
    with pytest.raises(ReadingError, match=message):
        ask(trained.run, reading)  # type: ignore[operator]
    with pytest.raises(ReadingError, match="output='cat' does not fit"):
        trained.run.spotlight(trained.model, trained.x, output="cat")["2"]  # type: ignore[arg-type]


def test_a_model_that_is_not_the_recorded_one(trained: Trained) -> None:
    wider = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with pytest.raises(ModelMismatchError, match=r"its '0.weight' has shape \(8, 5\), the run's"):
        trained.run.spotlight(wider, trained.x)
    shorter = nn.Sequential(nn.Linear(5, 7)).double()
    with pytest.raises(ModelMismatchError, match=r"its '2\.weight' does not exist, the run's has"):
        trained.run.spotlight(shorter, trained.x)
    fresh = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    with pytest.raises(ModelMismatchError, match="differs from the run's at step 20 by"):
        trained.run.spotlight(fresh, trained.x)
    with pytest.raises(ModelMismatchError, match=r"model\.load_state_dict"):
        trained.run.spotlight(fresh, trained.x)
    with pytest.raises(ModelMismatchError, match=r"load_state_dict\(run\.at\(7\)\.state_dict\(\)"):
        trained.run.at(7).spotlight(fresh, trained.x)
    fresh.load_state_dict(trained.run.state_dict())
    trained.run.spotlight(fresh, trained.x)
    with pytest.raises(
        ReadingError, match=r"x is an array of numpy, float64 of shape \(30, 5\); gi"
    ):
        trained.run.spotlight(fresh, trained.x.numpy())
    with pytest.raises(
        ReadingError, match=r"no tensor\. torch\.as_tensor\(x\) makes one of an array"
    ):
        trained.run.explain(fresh, trained.x.numpy())
    with pytest.raises(
        ReadingError, match=r"the model gives \(3,\) .* give x as a batch, or a func"
    ):
        trained.run.explain(fresh, trained.x[0])


@given(
    rows=st.integers(1, 60),
    queries=st.integers(1, 4),
    k=st.integers(1, 12),
    chunk=st.integers(1, 20),
    seed=st.integers(0, 100),
)
@settings(max_examples=80, deadline=None)
def test_the_largest_rows_are_found(rows: int, queries: int, k: int, chunk: int, seed: int) -> None:
    """Pruned while scanning, against a plain sort of everything."""
    torch.manual_seed(seed)
    values = torch.randn(rows, queries)
    largest = Largest(k, queries)
    for start in range(0, rows, chunk):
        part = values[start : start + chunk]
        index = torch.arange(start, start + len(part))
        rows = SimpleNamespace(keys=part, samples=index, steps=index, positions=index)
        largest.add(part, cast(Chunk, rows))
    sizes, places = largest.result()
    for query in range(queries):
        mine = places[:, 0] == query
        order = values[:, query].abs().argsort(descending=True)[:k]
        assert places[mine, 1].tolist() == order.tolist()
        assert torch.equal(sizes[mine].float(), values[order, query])


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("decay", [None, 0.7])
def test_means_of_weights_are_reads_of_the_same_rows(
    make: Callable[..., torch.optim.Optimizer], decay: float | None, tmp_path: Path
) -> None:
    """torch's own AveragedModel, against the run read for the mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = make(model.parameters(), lr=0.05, weight_decay=0.01)
    rule = None if decay is None else get_ema_multi_avg_fn(decay)
    mean = AveragedModel(model, multi_avg_fn=rule)
    x, y = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for number in range(1, 9):
            recorder.samples(range(8))
            (model(x) - y).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number in (3, 5, 6, 8):
                mean.update_parameters(model)
    run = dualform.open(tmp_path / "run").average([3, 5, 6, 8], decay)
    for name, weight in run.state_dict().items():
        assert (weight - mean.module.state_dict()[name]).abs().max() < 1e-13
    reading = run.spotlight(mean.module, x[:2])["2"]
    parts = reading.initial + reading.samples().values.sum(0)
    output = mean(x[:2]).detach().max(1).values.numpy()
    assert abs(parts - output).max() < 1e-12
    with pytest.raises(ReadingError, match="a mean of weights was never kept"):
        run.audit()
    with pytest.raises(UnknownStepError, match="in order, each once"):
        run.average([5, 3])
