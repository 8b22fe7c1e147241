"""Stages of recording and their owners: which thread may change what."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualform
from dualform import recording
from dualform.errors import CoverageWarning
from dualform.owners import BatchSamples, Owners
from dualform.recording.accounts import Evidence, Feed
from dualform.recording.changes import StepChanges
from dualform.recording.delivery import Delivery
from dualform.recording.messages import Findings, Handover, RecordedStep, WeightSpan
from dualform.recording.pages import Page, StreamRows
from dualform.recording.probe import Look
from dualform.recording.streams import OpenStream

MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.iter_modules(recording.__path__, "dualform.recording.")
]
CLASSES = {
    value
    for module in MODULES
    for value in vars(module).values()
    if inspect.isclass(value) and value.__module__ == module.__name__
}
MOST_FIELDS = 10


@pytest.mark.parametrize(
    "message",
    [StepChanges, Handover, Findings, BatchSamples, OpenStream, Look, StreamRows, Feed, Evidence],
    ids=lambda message: message.__name__,
)
def test_messages_are_frozen(message: type) -> None:
    fields = dataclasses.fields(message)
    instance = object.__new__(message)
    for field in fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(instance, field.name, None)


def test_steps_are_frozen() -> None:
    step = RecordedStep(1, (), (), (), {})
    for field in RecordedStep._fields:
        with pytest.raises(AttributeError):
            setattr(step, field, None)
    for mapping in (step.changes, step.divisors, step.edited):
        with pytest.raises(TypeError):
            mapping["w"] = torch.zeros(1)  # type: ignore[index]


def mutable_fields(cls: type) -> set[str]:
    """Fields that a method other than `__init__` sets, or that hold a list, dict, set or deque."""
    (node,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    found = set()
    for method in node.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        for part in ast.walk(method):
            targets: list[ast.expr] = []
            if isinstance(part, ast.Assign):
                targets = [*part.targets]
            elif isinstance(part, ast.AugAssign | ast.AnnAssign):
                targets = [part.target]
            pairs = [
                (own, value)
                for target in targets
                for own, value in _pairs(target, getattr(part, "value", None))
            ]
            for own, value in pairs:
                is_own = isinstance(own, ast.Attribute) and isinstance(own.value, ast.Name)
                if is_own and own.value.id == "self" and not _stays(method, value):
                    found.add(own.attr)
    return found


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[Any, ast.expr | None]]:
    """The targets of an assignment, each with its value where that is written beside it."""
    if not isinstance(target, ast.Tuple):
        yield target, value
    elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield from ((part, None) for part in target.elts)


def _stays(method: ast.FunctionDef, value: ast.expr | None) -> bool:
    """Whether a field is set for good: at the start, and not to something that is filled later."""
    containers = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    empty = isinstance(value, ast.Call) and ast.unparse(value.func).partition("[")[0] in (
        "set",
        "dict",
        "list",
        "deque",
        "dict.fromkeys",
    )
    return method.name == "__init__" and not isinstance(value, containers) and not empty


def test_a_field_that_changes_is_counted() -> None:
    class Example:
        def __init__(self) -> None:
            self.a, self.b = 1, set()
            self.c: dict[str, int] = {}
            self.d = self.e = 0

        def change(self) -> None:
            self.d += 1
            self.a, self.f = 2, 3

    source = inspect.getsource(Example)
    assert "self.e" in source
    assert mutable_fields(Example) == {"a", "b", "c", "d", "f"}


@pytest.mark.parametrize("cls", sorted(CLASSES, key=lambda cls: cls.__name__))
def test_no_class_has_many_mutable_fields(cls: type) -> None:
    assert len(mutable_fields(cls)) <= MOST_FIELDS


class Loop(nn.Module):
    """Layers that are kept in different ways: by row, given up, changed from outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.conv = nn.Embedding(7, 6), nn.Conv1d(6, 4, 2)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
        self.masked, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).mT).mean(-1)
        return self.head(self.norm(x) + torch.tanh(self.masked(x)) * self.scale)


def train(path: Path, steps: int = 12) -> dualform.Recorder:
    """A loop in which books are given up by either thread, and both have much to do."""
    model = Loop()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(0)
    with dualform.record(model, optimizer, path, buffer_bytes=4000) as recorder:
        for number in range(steps):
            tokens = torch.randint(7, (5, 4), generator=draw)
            recorder.samples([f"{number}-{at}" for at in range(5)])
            F.cross_entropy(model(tokens), tokens[:, 0] % 3).backward()
            if number == 5:
                model.masked.weight.grad[0] = 0.0
            optimizer.step()
            optimizer.zero_grad()
            if number == 7:
                with torch.no_grad():
                    model.conv.weight.mul_(0.5)
            if number % 4 == 3:
                recorder.checkpoint()
    return recorder


MUTATORS = (
    *("__setitem__", "__delitem__", "__iadd__", "__ior__", "__iand__", "__isub__", "__ixor__"),
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("setdefault", "sort", "reverse", "update", "difference_update", "intersection_update"),
)
Seen: TypeAlias = dict[str, set[str]]


class Threads:
    """Wraps lists, dicts and sets, so that they note the threads that change them."""

    def __init__(self) -> None:
        self.seen: Seen = defaultdict(set)
        self._kinds = {kind: self._noting(kind) for kind in (list, dict, set)}

    def wrap(self, value: Any, path: str) -> Any:
        """The value itself, where it is none of these."""
        if type(value) not in self._kinds:
            return value
        wrapped = self._kinds[type(value)](value)
        wrapped.path = f"{path} {id(wrapped)}"
        return wrapped

    def _noting(self, kind: type) -> type:
        def noting(method: str) -> Callable[..., Any]:
            usual = getattr(kind, method)

            def changed(own: Any, *args: Any, **options: Any) -> Any:
                self.seen[own.path].add(threading.current_thread().name)
                return usual(own, *(self.wrap(value, own.path) for value in args), **options)

            return changed

        methods = {name: noting(name) for name in MUTATORS if hasattr(kind, name)}
        return type(f"Noting{kind.__name__}", (kind,), methods)


def threads_that_change(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Notes for every object of a stage, and its lists, dicts and sets, who changes them."""
    threads = Threads()
    for cls in {*CLASSES, Owners}:
        params = getattr(cls, "__dataclass_params__", None)
        frozen = params is not None and params.frozen
        if issubclass(cls, BaseException) or frozen or hasattr(cls, "__slots__"):
            continue
        usual = cls.__setattr__

        def noting(self: Any, name: str, value: Any, usual: Any = usual) -> None:
            now = threading.current_thread().name
            made_in = self.__dict__.setdefault("_made_in", now)
            own = f"{type(self).__name__} {id(self)}"
            if not _is_made(self, made_in, now):
                threads.seen[own].add(now)
            usual(self, name, threads.wrap(value, f"{own} {name}"))

        monkeypatch.setattr(cls, "__setattr__", noting, raising=False)
    return threads.seen


def _is_made(instance: Any, made_in: str, now: str) -> bool:
    """Whether the object is being made: an object may be made by one thread for another."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is instance:
            return made_in == now
        frame = frame.f_back
    return False


def test_no_object_is_changed_by_two_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = threads_that_change(monkeypatch)
    with pytest.warns(CoverageWarning):
        recorder = train(tmp_path / "run")
    monkeypatch.undo()
    assert recorder.failure is None
    changed_by_both = {name: threads for name, threads in seen.items() if len(threads) > 1}
    assert not changed_by_both
    stages: Seen = defaultdict(set)
    for name, threads in seen.items():
        stages[name.split()[0]] |= threads
    writers = {"Bookkeeper", "SampleNumbers", "Entries", "Reconciler", "Followed", "BatchSizes"}
    writers.add("HostMemory")
    assert {name for name, threads in stages.items() if "dualform-writer" in threads} == writers
    assert stages["StepRecorder"] == stages["BookStates"] == stages["Page"] == {"MainThread"}


def containers(thing: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The lists, dicts, sets and deques that an object of a stage reaches, with their paths."""
    if depth > 6 or isinstance(thing, Tensor | nn.Module | torch.optim.Optimizer | str | bytes):
        return
    if isinstance(thing, list | dict | set | deque):
        yield path, thing
        return
    own = type(thing).__module__.startswith(("dualform.recording", "dualform.owners"))
    if own and not isinstance(thing, Page):
        for name, value in getattr(thing, "__dict__", {}).items():
            yield from containers(value, f"{path}.{name}", depth + 1)


def test_stages_of_two_threads_share_no_container(tmp_path: Path) -> None:
    """What the writer's thread can fill is reached by no stage of the training thread."""
    with pytest.warns(CoverageWarning):
        steps = train(tmp_path / "run")._steps
    assert steps is not None
    stages = steps.stages
    bookkeeper = stages.delivery._bookkeeper
    writers = {id(thing): path for path, thing in containers(bookkeeper, "bookkeeper")}
    training: dict[int, str] = {}
    for name in ("watch", "check", "observer", "snapshots", "schedule", "notices"):
        for path, thing in containers(getattr(stages, name), name):
            training[id(thing)] = path
    shared = {training[at] for at in writers.keys() & training.keys()}
    assert {path for path in shared if "_plan." not in path and "_parameters" not in path} == set()


def fingerprint(thing: Any, seen: set[int] | None = None) -> Any:
    """What a message holds: values of plain things, identities and versions of tensors."""
    if isinstance(thing, Tensor):
        return id(thing), thing._version
    if isinstance(thing, StepChanges):
        return list(thing), [fingerprint(vector) for vector in thing.vectors]
    if isinstance(thing, Mapping):
        return {name: fingerprint(value) for name, value in thing.items()}
    if isinstance(thing, WeightSpan):
        return tuple(fingerprint(part) for part in thing)
    if isinstance(thing, Page):
        return id(thing), len(thing.marks), [fingerprint(samples) for _, samples in thing.marks]
    if isinstance(thing, list | tuple):
        return [fingerprint(part) for part in thing]
    if dataclasses.is_dataclass(thing) and not isinstance(thing, Look | OpenStream):
        return {f.name: fingerprint(getattr(thing, f.name)) for f in dataclasses.fields(thing)}
    return id(thing)


def test_nobody_changes_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-over is the same when the writer's thread has done with it as when it was sent."""
    sent: list[tuple[Handover, Any]] = []
    usual = Delivery._deliver
    monkeypatch.setattr("dualform.recording.pages.PagePool.give_back", lambda self, pages: None)

    def delivered(self: Delivery, handover: Handover) -> None:
        before = fingerprint(handover)
        usual(self, handover)
        sent.append((handover, before))

    monkeypatch.setattr(Delivery, "_deliver", delivered)
    with pytest.warns(CoverageWarning):
        train(tmp_path / "run")
    assert len(sent) > 3
    for handover, before in sent:
        assert fingerprint(handover) == before
