"""A loop with `accelerate`, and loaders of every kind that hand out their ids."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from tests.integrations.one_hot import COUNT, Net, Pairs, X, Y, check_run, same_weights, sgd
from tests.told import told
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

import dualform
from dualform.errors import RecordingError, RecordingWarning
from dualform.integrations import with_ids


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Batches(Pairs):
    """Reads a whole batch at once, as `datasets` does."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


LOADERS: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 4, "shuffle": True},
    "workers": {"batch_size": 4, "shuffle": True, "num_workers": 2},
    "persistent": {"batch_size": 4, "shuffle": True, "num_workers": 2, "persistent_workers": True},
    "out of order": {"batch_size": 4, "num_workers": 2, "in_order": False},
    "batch sampler": {"batch_sampler": BatchSampler(RandomSampler(range(COUNT)), 5, False)},
}


def loop(
    accelerator: Accelerator, net: Net, loader: Any, path: Path | None, anew: bool = False
) -> None:
    """The loop of accelerate's documentation; `anew` asks for the ids in each epoch."""
    model, optimizer, loader = accelerator.prepare(net, sgd(net), loader)
    if path is None:
        return epochs(accelerator, model, optimizer, lambda: loader)
    with dualform.record(model, optimizer, path) as recorder:
        batches = with_ids(loader, recorder)
        name = (lambda: with_ids(loader, recorder)) if anew else (lambda: batches)
        return epochs(accelerator, model, optimizer, name)


def epochs(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any) -> None:
    torch.manual_seed(5)
    for _ in range(3):
        for x, y in loader():
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_rows_have_their_ids_and_training_is_the_same(
    name: str, accumulate: int, tmp_path: Path
) -> None:
    recorded, plain = Net(), Net()
    for net, path in ((recorded, tmp_path / "run"), (plain, None)):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        loop(accelerator, net, DataLoader(Batches(), **LOADERS[name]), path, anew=accumulate == 3)
    if name != "out of order":  # which is never the same twice
        assert same_weights(recorded, plain)
    whole = len(recorded.diary) / 3 % accumulate == 0
    check_run(tmp_path / "run", recorded, accumulate if whole else 0)


def test_seeded_samplers_and_skipped_batches(tmp_path: Path) -> None:
    """Epochs are counted, and the batches skipped after a restart are not named."""
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    recorded, plain = Net(), Net()
    for net, path in ((recorded, tmp_path / "run"), (plain, None)):
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        loop(accelerator, net, DataLoader(Pairs(), 4, shuffle=True), path, anew=True)
    assert same_weights(recorded, plain)
    assert recorded.diary[:6] != recorded.diary[6:12]

    net, accelerator = Net(), Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(Pairs(), 4, shuffle=True))
    loop(accelerator, net, accelerator.skip_first_batches(loader, 2), tmp_path / "skipped")
    assert len(net.diary) == 3 * 4
    assert dualform.open(tmp_path / "skipped").ids == sorted(set(net.seen))


def test_the_loader_given_is_not_changed(tmp_path: Path) -> None:
    net, loader = Net(), DataLoader(Pairs(), batch_size=11)
    optimizer = sgd(net)
    with told(tmp_path / "run"), dualform.record(net, optimizer, tmp_path / "run") as recorder:
        named = with_ids(loader, recorder)
        assert with_ids(loader, recorder) is with_ids(named, recorder) is named
        assert isinstance(named, DataLoader)
        assert len(named) == len(loader) == 2
        assert named.dataset[3][0].argmax() == 3
        x, y = next(iter(loader))
        assert x.shape == (11, COUNT)
        with torch.no_grad():
            net(x)
        for x, y in named:
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    assert type(loader.dataset) is Pairs
    with pytest.raises(RecordingError, match="not recording"):
        next(iter(named))


def test_a_loader_that_reads_batches_itself(tmp_path: Path) -> None:
    """`batch_size=None`: the sampler gives lists of indices, and the dataset takes them."""
    data = torch.utils.data.StackDataset(X, Y)
    sampler = BatchSampler(RandomSampler(range(COUNT)), 4, False)
    loader = DataLoader(
        WholeBatches(data), sampler=sampler, batch_size=None, collate_fn=lambda batch: batch
    )
    net = Net()
    optimizer = sgd(net)
    with dualform.record(net, optimizer, tmp_path / "run") as recorder:
        for x, y in with_ids(loader, recorder):
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    check_run(tmp_path / "run", net)


class WholeBatches(torch.utils.data.Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: list[int]) -> Any:
        return [torch.stack(column) for column in zip(*(self.data[i] for i in index), strict=True)]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


def test_what_has_no_ids(tmp_path: Path) -> None:
    net = Net()
    with (  # noqa: PT031
        pytest.warns(RecordingWarning, match="the recorder saw no step"),
        dualform.record(net, sgd(net), tmp_path / "run") as recorder,
    ):
        with pytest.raises(RecordingError, match=r"a stream \(Stream\)"):
            with_ids(DataLoader(Stream()), recorder)
        with pytest.raises(RecordingError, match="this is a list"):
            with_ids([1, 2], recorder)
        config = DataLoaderConfiguration(dispatch_batches=True)
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(Pairs()))
        with pytest.raises(RecordingError, match="dispatch_batches=False"):
            with_ids(loader, recorder)


def test_wrappers_are_refused(tmp_path: Path) -> None:
    net = Net()
    with (
        pytest.raises(RecordingError, match=r"DataParallel.*CUDA_VISIBLE_DEVICES=0"),
        dualform.record(nn.DataParallel(net), sgd(net), tmp_path / "run"),
    ):
        pass
    with pytest.raises(RecordingError, match="the optimizer is a str"):
        dualform.record(net, "sgd", tmp_path / "run")


BREAKS_OFF = """
import sys, torch
from pathlib import Path
from dualform.integrations.session import RecordingSession

class Owner: pass
torch.set_default_dtype(torch.float64)
owner, model = Owner(), torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = RecordingSession(owner, model, optimizer, Path(sys.argv[1]))
for _ in range(4):
    model(torch.randn(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
loud = {name for name in ("accelerate", "lightning", "transformers") if name in sys.modules}
raise SystemExit(f"broke off; imported {loud or 'nothing'}")
"""


def test_a_process_that_ends_commits_what_it_recorded(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BREAKS_OFF, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "broke off; imported nothing"
    run = dualform.open(tmp_path / "run")
    assert run.steps == 4
    assert run.audit().remainder < 1e-12


@pytest.mark.parametrize(("name", "extra"), [("transformers", "hf"), ("lightning", "lightning")])
def test_a_missing_package_is_named(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (name, f"{name}.pytorch"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"dualform.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'dualform\[{extra}\]'"):
        __import__(f"dualform.integrations.{name}")


def test_saved_states_can_be_gone_on_from(tmp_path: Path) -> None:
    """`accelerator.save_state` asks model and optimizer for their states: the step is marked."""
    for resume in (False, True):
        accelerator = Accelerator(cpu=True)
        net = Net()
        model, optimizer, loader = accelerator.prepare(net, sgd(net), DataLoader(Pairs(), 11))
        if resume:
            accelerator.load_state(str(tmp_path / "state"))
        with dualform.record(model, optimizer, tmp_path / "run", resume=resume) as recorder:
            assert recorder.step == (2 if resume else 0)
            for _ in range(2):
                for x, y in with_ids(loader, recorder):
                    accelerator.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                if recorder.step == 2:
                    accelerator.save_state(str(tmp_path / "state"))
    run = dualform.open(tmp_path / "run")
    assert run.steps == 6
    assert run.audit().remainder <= 1e-6
