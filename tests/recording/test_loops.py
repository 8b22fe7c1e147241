"""Loops as people write them: recorded, they train the same bits, and the books balance."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.told import told
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, RMSprop
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import RecordingError, RecordingWarning, SampleIdsError

OUTSIDE = "something other than the optimizer changed it between steps"
UNRECORDED = SimpleNamespace(samples=lambda ids: None)
Watched = Callable[[nn.Module, Optimizer], AbstractContextManager[Any]]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Loop:
    """A loop, given what to train inside of; which books it leaves by step, and why."""

    train: Callable[[Watched], None]
    by_step: dict[str, str] = field(default_factory=dict)


LOOPS: dict[str, Loop] = {}


def loop(**by_step: str) -> Callable[[Callable[[Watched], None]], Callable[[Watched], None]]:
    """Adds a loop; books are given by the first part of their names, with a part of the reason."""

    def add(train: Callable[[Watched], None]) -> Callable[[Watched], None]:
        LOOPS[train.__name__] = Loop(train, by_step)
        return train

    return add


class Net(nn.Module):
    """Two layers, each of which a loop can get hold of."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enc(x).tanh())


def batches(count: int = 6) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, width, generator=generator) for width in (6, 3))
    for number in range(count):
        ids = torch.arange(4 * number, 4 * number + 4) % 12
        yield ids, x[ids], y[ids]


def descend(loss: Tensor, optimizer: Optimizer) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# Backward passes that are not for the parameters, or thrown away


@loop()
def attacked_and_accumulated(record: Watched) -> None:
    """Projected gradient descent on the input, two micro-batches a step."""
    model = Net()
    optimizer = Adam(model.parameters(), lr=0.01)
    with record(model, optimizer) as recorder:
        for number, (ids, x, y) in enumerate(batches()):
            recorder.samples(ids)
            noise = torch.zeros_like(x, requires_grad=True)
            for _ in range(2):
                (gradient,) = torch.autograd.grad(F.mse_loss(model(x + noise), y), noise)
                noise = (noise + 0.1 * gradient.sign()).detach().requires_grad_()
            F.mse_loss(model(x + noise.detach()), y).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


@loop()
def attacked_by_a_backward_pass(record: Watched) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer) as recorder:
        for ids, x, y in batches():
            recorder.samples(ids)
            x.requires_grad_()
            F.mse_loss(model(x), y).backward()
            optimizer.zero_grad()
            descend(F.mse_loss(model((x + 0.1 * x.grad.sign()).detach()), y), optimizer)


@loop()
def sharpness_aware(record: Watched) -> None:
    """The weights are moved, and moved back: to within rounding, they are the same."""
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer) as recorder:
        for ids, x, y in batches():
            recorder.samples(ids)
            F.mse_loss(model(x), y).backward()
            moves = [0.05 * p.grad for p in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            optimizer.step()
            optimizer.zero_grad()


@loop()
def validated_with_gradients(record: Watched) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer) as recorder:
        for ids, x, y in batches():
            recorder.samples(ids)
            descend(F.mse_loss(model(x), y), optimizer)
            F.mse_loss(model.eval()(x[:3]), y[:3]).item()
            model.train()


@loop()
def adversaries(record: Watched) -> None:
    """The discriminator is not told whose samples it judges for the generator's sake."""
    maker, judge = nn.Linear(2, 6), nn.Linear(6, 1)
    making = Adam(maker.parameters(), lr=0.01, betas=(0.5, 0.999))
    judging = Adam(judge.parameters(), lr=0.01, betas=(0.5, 0.999))
    with record(maker, making) as by_maker, record(judge, judging) as by_judge:
        for ids, x, y in batches():
            judging.zero_grad()
            by_maker.samples(ids)
            made = maker(y[:, :2])
            by_judge.samples(ids)
            loss = F.softplus(-judge(x)).mean() + F.softplus(judge(made.detach())).mean()
            loss.backward()
            judging.step()
            descend(F.softplus(-judge(made)).mean(), making)


# Samples that are hard to count


@loop()
def acting_on_one_observation_at_a_time(record: Watched) -> None:
    model = Net()
    optimizer = Adam(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for _, x, y in batches():
            descend(sum(F.mse_loss(model(x[t]), y[t]) for t in range(4)), optimizer)


@loop()
def naming_one_observation_at_a_time(record: Watched) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer) as recorder:
        for ids, x, y in batches():
            recorder.samples(ids[:1])
            descend(F.mse_loss(model(x[0]), y[0]), optimizer)


@loop()
def batches_that_are_empty(record: Watched) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record(model, optimizer) as recorder:
        for number, (ids, x, y) in enumerate(batches()):
            kept = slice(0, 4 * (number % 2))
            recorder.samples(ids[kept])
            descend(F.mse_loss(model(x[kept]), y[kept], reduction="sum"), optimizer)


class Parabola(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.tensor(x)) for x in (0.5, -0.3, 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.a + self.b * x + self.c * x**2


@loop()
def numbers_for_samples(record: Watched) -> None:
    model = Parabola()
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer) as recorder:
        for ids, x, y in batches():
            recorder.samples(ids)
            descend(F.mse_loss(model(x[:, 0]), y[:, 0]), optimizer)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(10, 6), nn.Linear(6, 3)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(words, offsets))


@loop()
def texts_end_to_end(record: Watched) -> None:
    """Eleven words of four texts: the ids fit the offsets."""
    model = Words()
    optimizer = Adam(model.parameters(), lr=0.01)
    with record(model, optimizer) as recorder:
        for ids, _, y in batches():
            recorder.samples(ids)
            words = torch.arange(11) * int(ids[0] + 1) % 10
            descend(F.mse_loss(model(words, torch.tensor([0, 3, 4, 9])), y), optimizer)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.tensor([0, 2, 3])
        return x[:, :3].index_add(0, chosen, self.expert(x[chosen])) * self.gate(x)


@loop()
def samples_are_routed(record: Watched) -> None:
    model = Experts()
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for _, x, y in batches():
            descend(F.mse_loss(model(x), y), optimizer)


# Weights that others change


@loop(enc=OUTSIDE, head=OUTSIDE)
def weights_are_clipped(record: Watched) -> None:
    model = Net()
    optimizer = RMSprop(model.parameters(), lr=0.05)
    with record(model, optimizer):
        for _, x, y in batches():
            descend(F.mse_loss(model(x), y), optimizer)
            for parameter in model.parameters():
                parameter.data.clamp_(-0.1, 0.1)


@loop(enc=OUTSIDE)
def one_layer_is_kept_small(record: Watched) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record(model, optimizer):
        for _, x, y in batches():
            descend(F.mse_loss(model(x), y), optimizer)
            with torch.no_grad():
                model.enc.weight.mul_(0.9)


@loop(teacher=OUTSIDE)
def a_teacher_follows(record: Watched) -> None:
    """As momentum encoders do, with a tensor of its own each time."""
    model = nn.ModuleDict({"student": Net(), "teacher": Net().requires_grad_(False)})
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer) as recorder:
        for ids, x, y in batches():
            recorder.samples(ids)
            descend(F.mse_loss(model["student"](x), y + model["teacher"](x)), optimizer)
            pairs = zip(model["teacher"].parameters(), model["student"].parameters(), strict=True)
            for follower, leader in pairs:
                follower.data = 0.9 * follower.data + 0.1 * leader.data


@loop(enc=OUTSIDE, head=OUTSIDE)
def back_half_of_the_way(record: Watched) -> None:
    model = Net()
    optimizer = Adam(model.parameters(), lr=0.01)
    with record(model, optimizer):
        for number, (_, x, y) in enumerate(batches()):
            if number % 2 == 0:
                start = {name: weight.clone() for name, weight in model.state_dict().items()}
            descend(F.mse_loss(model(x), y), optimizer)
            if number % 2:
                end = model.state_dict()
                model.load_state_dict({n: (w + end[n]) / 2 for n, w in start.items()})


@loop(head="another optimizer, Adam, stepped it; by row is what the recorded SGD does")
def two_optimizers(record: Watched) -> None:
    model = Net()
    ours, theirs = SGD(model.enc.parameters(), lr=0.1), Adam(model.head.parameters(), lr=0.01)
    with record(model, ours):
        for _, x, y in batches():
            F.mse_loss(model(x), y).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()


@loop()
def averages_are_evaluated(record: Watched) -> None:
    """Weights that are swapped for others and put back are not changed."""
    model = Net()
    optimizer = Adam(model.parameters(), lr=0.01)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    with record(model, optimizer), torch.no_grad():
        for _, x, y in batches():
            with torch.enable_grad():
                descend(F.mse_loss(model(x), y), optimizer)
            kept = [parameter.clone() for parameter in model.parameters()]
            torch._foreach_lerp_(averages, kept, 0.1)
            torch._foreach_copy_(list(model.parameters()), averages)
            model(x)
            torch._foreach_copy_(list(model.parameters()), kept)


# Calls that others make


class Pausing(Net):
    """Its evaluation takes as long as a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.done = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.begun.set()
            self.done.wait(10)
        return super().forward(x)


@loop()
def evaluated_by_another_thread(record: Watched) -> None:
    model = Pausing()
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for _, x, y in batches():
            model.begun.clear()
            model.done.clear()
            evaluation = threading.Thread(target=torch.no_grad()(model), args=(x,))
            evaluation.start()
            model.begun.wait(10)
            descend(F.mse_loss(model(x), y), optimizer)
            model.done.set()
            evaluation.join()


@loop(enc="a scripted module makes no calls that could be seen")
def partly_scripted(record: Watched) -> None:
    model = Net()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`?torch.jit")  # is deprecated, in newer releases
        model.enc = torch.jit.trace(model.enc, torch.zeros(4, 6))
    optimizer = SGD(model.parameters(), lr=0.1)
    with record(model, optimizer):
        for _, x, y in batches():
            descend(F.mse_loss(model(x), y), optimizer)


@pytest.mark.parametrize("name", LOOPS)
def test_loop(name: str, tmp_path: Path) -> None:
    made: list[list[nn.Module]] = [[], []]

    def plainly(model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        made[0].append(model)
        return nullcontext(UNRECORDED)

    @contextmanager
    def recorded(model: nn.Module, optimizer: Optimizer) -> Iterator[Any]:
        made[1].append(model)
        path = tmp_path / str(len(made[1]))
        with told(path), dualform.record(model, optimizer, path) as recorder:
            yield recorder

    for way in (plainly, recorded):
        torch.manual_seed(0)
        LOOPS[name].train(way)
    for number, (plain, model) in enumerate(zip(*made, strict=True), start=1):
        for one, other in zip(
            plain.state_dict().values(), model.state_dict().values(), strict=True
        ):
            assert torch.equal(one, other)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        _check_books(dualform.open(tmp_path / str(number)).audit(), LOOPS[name].by_step)


def _check_books(audit: dualform.Audit, by_step: dict[str, str]) -> None:
    assert audit.remainder <= 1e-12, audit
    for book in audit.books:
        reason = by_step.get(book.name.split(".")[0])
        assert book.granularity == ("row" if reason is None else "step"), audit
        assert (reason or "") in book.reason


class Checkpointed(Net):
    def __init__(self, reentrant: bool, head: bool) -> None:
        super().__init__()
        self.reentrant, self.whole = reentrant, head

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.enc, x.clone().requires_grad_(), use_reentrant=self.reentrant)
        if not self.whole:
            return self.head(hidden.tanh())
        return checkpoint(self.head, hidden.tanh(), use_reentrant=self.reentrant)


def without_second_pass(model: nn.Module, path: Path) -> tuple[dict[str, Tensor], float]:
    """What is left of a siamese loop without its second views, and the share kept by row."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = SGD(model.parameters(), lr=0.1)
    with told(path), dualform.record(model, optimizer, path) as recorder:
        for ids, x, y in batches():
            recorder.samples(ids)
            first = model(x)
            recorder.samples(ids + 100)
            descend(F.mse_loss(first, y) + model(2 * x).square().mean(), optimizer)
    run = dualform.open(path)
    second = [sample for sample in run.ids if int(sample) >= 100]
    return (run.subtract(second) if second else {}), run.audit().coverage


def test_what_is_computed_again_belongs_to_its_own_batch(tmp_path: Path) -> None:
    plain, _ = without_second_pass(Net(), tmp_path / "plain")
    again, coverage = without_second_pass(Checkpointed(True, head=False), tmp_path / "again")
    assert coverage == 1.0
    for name, weight in plain.items():
        assert torch.allclose(again[name], weight, rtol=0, atol=1e-14)


def test_what_cannot_be_told_apart_is_nobody_s(tmp_path: Path) -> None:
    """Nothing comes after what is computed again: it may be of either pass."""
    _, coverage = without_second_pass(Checkpointed(True, head=True), tmp_path / "run")
    assert coverage == 0.0
    assert dualform.open(tmp_path / "run").audit().remainder <= 1e-12


@pytest.mark.parametrize("first", [0, 20])
@pytest.mark.parametrize("make", [SGD, Adam])
def test_weights_are_clipped_over_many_parcels(
    make: Callable[..., Optimizer], first: int, tmp_path: Path
) -> None:
    model = Net()
    optimizer = make(model.parameters(), lr=0.05)
    with (
        told(tmp_path / "run"),
        dualform.record(model, optimizer, tmp_path / "run", buffer_bytes=1500),
    ):
        for number, (_, x, y) in enumerate(batches(40)):
            descend(F.mse_loss(model(x), y), optimizer)
            if number >= first:
                for parameter in model.parameters():
                    parameter.data.clamp_(-0.2, 0.2)
    audit = dualform.open(tmp_path / "run").audit()
    assert audit.remainder <= 1e-12
    assert all(OUTSIDE in book.reason for book in audit.books)


def test_weights_put_in_after_the_last_step_are_not_its_own(tmp_path: Path) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with (  # noqa: PT031
        pytest.warns(RecordingWarning, match="the weights changed after step 6, the last of the"),
        dualform.record(model, optimizer, tmp_path / "run"),
    ):
        best = {name: weight.clone() for name, weight in model.state_dict().items()}
        for _, x, y in batches():
            descend(F.mse_loss(model(x), y), optimizer)
        last = {name: weight.clone() for name, weight in model.state_dict().items()}
        model.load_state_dict(best)
    run = dualform.open(tmp_path / "run")
    assert run.audit().coverage == 1.0
    assert run.kept_steps == [0]
    for name, weight in run.state_dict().items():
        assert torch.allclose(weight, last[name], rtol=0, atol=1e-14)


def test_models_that_no_run_can_hold(tmp_path: Path) -> None:
    lazy = nn.LazyLinear(3)
    with torch.device("meta"):
        empty = nn.Linear(2, 3)
    turning = nn.Linear(2, 3)
    turning.register_buffer("turn", torch.ones(1, dtype=torch.complex64))
    for model, message in (
        (lazy, "'weight' has no shape yet"),
        (empty, "'weight' has no values"),
        (nn.Linear(2, 3, dtype=torch.complex64), "complex64, and runs hold real numbers; keep"),
        (turning, "'turn' has dtype complex64, .* register it with persistent=False"),
    ):
        optimizer = SGD(model.parameters(), lr=0.1)
        with pytest.raises(RecordingError, match=message):
            dualform.record(model, optimizer, tmp_path / "run").__enter__()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (5, "got 5; give one id for each sample"),
        ("abcd", "got 'abcd'; give one id for each sample"),
        (None, "got None; give one id for each sample"),
        ([2**63, 1, 2, 3], "integers fit into 64 bits"),
        (torch.tensor([True] * 4), "ids are integers or strings"),
        (torch.tensor(5), "ids are integers or strings"),
        (torch.tensor([0, 1, 2, 2**63], dtype=torch.uint64), "integers fit into 64 bits"),
    ],
)
def test_ids_that_name_no_samples(ids: Any, message: str, tmp_path: Path) -> None:
    model = Net()
    with (
        pytest.warns(RecordingWarning, match="the recorder saw no step"),
        dualform.record(model, SGD(model.parameters(), lr=0.1), tmp_path / "run") as recorder,
        pytest.raises(SampleIdsError, match=message),
    ):
        recorder.samples(ids)
