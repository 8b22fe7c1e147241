"""Watching a model: what a training step leaves behind, at the least possible cost to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualform.layers import (
    Finder,
    Hook,
    Rows,
    Seen,
    Watching,
    is_scripted,
    is_single,
    kinds,
    matrix_use,
    packing_order,
    shared_labels,
    tensors_in,
    usual_axis,
    when_errors_come,
)
from dualform.ledger import Declaration
from dualform.ledger.samples import SampleId, check_ids, listed
from dualform.owners import UNCLEAR, Batch, Owners, Sighting
from dualform.private import own_parameters
from dualform.recording.guard import Guard
from dualform.recording.naming import Naming
from dualform.recording.passes import Batches, Here, Reached
from dualform.recording.ports import Port, Ports
from dualform.recording.tape import Page

NOTHING = nullcontext()
FORWARD, BACKWARD = "in the forward pass", "in the backward pass"


class Watch:
    """Sees a model's calls while it runs; backward passes write to one tape a stream."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        step: int,
        known: Iterable[Declaration] = (),
        guard: Guard | None = None,
    ) -> None:
        self.ports = Ports(parameters, known)
        self._guard = guard or Guard(strict=True)
        self.step = step
        """The step under way."""
        self.bytes = 0
        """How much has been written since `take`."""
        self.dropped: set[str] = set()
        """Books that need no rows any more."""
        self.owners = Owners(parameters, usual_axis(model))
        """To which samples the rows of each layer belong."""
        self.unnamed: set[int] = set()
        """The batches without ids that left rows in this step."""
        self._batches, self._reached = Batches(step), Reached(parameters)
        self._on_graphs: list[tuple[int, RemovableHandle]] = []
        """Hooks on several outputs, by step: such a hook and its graph keep each other alive."""
        self._calls = 0
        self._find = Finder(parameters)
        self._find.guard = partial(self._guard.run, FORWARD)
        self._mode = Watching(self._find, kinds(), self._guard.around(FORWARD, self._take))
        self._here = Here()
        self._root, self._handles = model, list[RemovableHandle]()
        self._parts: dict[nn.Module, list[RemovableHandle]] = {}
        self._alone: set[nn.Module] = set()
        self._owner_calls = 0
        self._hook(model)

    # Step by step

    def samples(self, ids: Tensor | Sequence[SampleId], naming: Naming) -> None:
        """Names the samples of the next forward pass."""
        ids = ids.clone() if isinstance(ids, Tensor) else listed(ids)
        check_ids(ids)
        naming.name(ids)
        self._batches.name(ids)

    def end_step(self) -> None:
        """The optimizer has stepped; what comes belongs to the next step."""
        self.step += 1
        self.unnamed.clear()
        self._batches.end_step()
        for step, hook in self._on_graphs:
            if step < self.step - 1:
                hook.remove()
        self._on_graphs = [(step, hook) for step, hook in self._on_graphs if step >= self.step - 1]
        if self._parts:
            self._settle_parts()

    @property
    def is_midway(self) -> bool:
        """Whether the step under way has rows already."""
        pages = [page for port in self.ports.all for page in port.tape.pages[-1:]]
        return any(page.marks[-1][0] == self.step for page in pages if page.marks)

    # Pages

    def peek(self) -> dict[int, list[Page]]:
        """The pages of each stream, without taking them."""
        return {index: port.tape.pages for index, port in enumerate(self.ports.all)}

    def take(self) -> dict[int, list[Page]]:
        """The pages of each stream; `pool.give_back` them once they are written.

        Rows of the step under way (a checkpoint between backward and step) move to new pages.
        """
        self.bytes = 0
        taken = {index: port.tape.take() for index, port in enumerate(self.ports.all)}
        for index, pages in taken.items():
            for page in pages:
                for at, (step, batch) in enumerate(page.marks):
                    if step == self.step:
                        x, error = page.key_slots[at], page.value_slots[at]
                        shared = page.shared[at] if page.shared else None
                        tape = self.ports.all[index].tape
                        self.bytes += tape.write(step, batch, x, error, page.form[4], shared)
        return taken

    # Hooks

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call of the model, whose hooks stay until it ends."""
        return self._here.depth > 0

    def close(self) -> None:
        """Takes every hook off."""
        own = [handle for pair in self._parts.values() for handle in pair]
        for handle in [*self._handles, *self._around_root, *own]:
            handle.remove()

    def _hook(self, model: nn.Module) -> None:
        self._around_root = () if is_scripted(model) else self._around(model, self._enter_root)
        for module in model.modules():
            if module is not model and not is_scripted(module):
                self._parts[module] = list(self._around(module, self._enter_part))
        self._handles += [*shared_labels(model, self._find), *packing_order(model, self._find)]

    def _around(self, module: nn.Module, enter: Callable[..., None]) -> Sequence[RemovableHandle]:
        return (
            module.register_forward_pre_hook(Hook(enter), with_kwargs=True, prepend=True),
            module.register_forward_hook(Hook(self._leave), always_call=True),
        )

    def _enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._enter()
        self._guard.run(FORWARD, self._begin_batch, module, args, kwargs)

    def _begin_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            given = list(tensors_in((args, kwargs)))
            self._begin_trial(module, self._batches.begin(given), given)

    def _enter_part(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._enter()
        if not torch.is_grad_enabled():
            return
        self._owner_calls += bool(own_parameters(module))
        if self._here.depth == 1:  # called by itself, not from within the model
            self._alone.add(module)
            self._guard.run(FORWARD, self._begin_part, module, args, kwargs)

    def _begin_part(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = list(tensors_in((args, kwargs)))
        self._begin_trial(module, self._batches.begin_inside(given), given)

    def _begin_trial(self, module: nn.Module, batch: Batch | None, given: Sequence[Tensor]) -> None:
        """Makes the pass an experiment where one is due, to the end of this call."""
        if batch is None or self._here.trial is not None:
            return
        trial = self.owners.begin(batch, given, self.dropped)
        if trial is None:
            return

        def end(*_: Any) -> None:
            handle.remove()
            self._here.trial = None
            trial.twins.__exit__(None, None, None)
            if self._guard.failure is None:
                self._guard.run(FORWARD, lambda: self.owners.learn(trial.close()))

        trial.twins.guard = self._find.guard
        handle = module.register_forward_hook(Hook(end), always_call=True)
        self._here.trial = trial
        trial.twins.__enter__()

    def _enter(self) -> None:
        self._here.depth += 1
        if self._here.depth == 1:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._here.depth == 0:
            return  # the call was broken off before it was entered
        self._here.depth -= 1
        if self._here.depth == 0:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._find.recent.clear()

    def _settle_parts(self) -> None:
        """After the first step: modules that only the model itself calls need no hooks."""
        parts, self._parts = self._parts, {}
        for module, handles in parts.items():
            for handle in handles:
                if module not in self._alone:
                    handle.remove()
                else:
                    self._handles.append(handle)
        owners = [module for module in parts if own_parameters(module)]
        plain = [
            type(module).forward is nn.Linear.forward and "weight" in own_parameters(module)
            for module in owners
        ]
        if all(plain) and not self._alone and self._calls == self._owner_calls:
            self._look_at(owners)

    def _look_at(self, layers: Iterable[nn.Module]) -> None:
        """In a model of plain linear layers, only their own calls need to be seen."""
        for handle in self._around_root:
            handle.remove()
        begin = Hook(self._guard.around(FORWARD, self._begin_batch))
        see = Hook(self._guard.around(FORWARD, self._see_linear))
        self._handles.append(self._root.register_forward_pre_hook(begin, with_kwargs=True))
        self._handles += [layer.register_forward_hook(see) for layer in layers]

    def _see_linear(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        own = own_parameters(module)
        weight, bias = own["weight"], own["bias"]
        if args and (use := matrix_use(self._find, out, False, args[0], weight, bias)):
            self._take(use)

    # Uses

    def _take(self, use: Seen) -> None:
        outputs, trial = use.outputs, self._here.trial
        trained = any(out.grad_fn is not None for out in outputs)
        batch = self._batches.of_call() if trained else None
        if batch is not None:
            if batch.begun and not batch.calls and is_single(use):
                batch.alone()
            batch.calls += 1
        single = batch is not None and batch.size == 1  # as its first layer may have shown
        seen = None if trial is None or single else trial.observe(use)
        if batch is not None:
            backward = self._guard.around(BACKWARD, self._backward(use, batch, seen))
            hook = when_errors_come(use, backward)
            if len(outputs) > 1 and hook is not None:
                self._on_graphs.append((self.step, hook))

    def _backward(
        self, use: Seen, batch: Batch, seen: Sequence[Sighting] | None
    ) -> Callable[[Sequence[Tensor | None]], None]:
        self._calls += 1
        order = self._calls

        def backward(errors: Sequence[Tensor | None]) -> None:
            self._batches.arrive(batch)
            with torch.no_grad() if torch.is_grad_enabled() else NOTHING:  # create_graph=True
                for at, rows in enumerate(use.rows(errors)):
                    self._write(rows, batch, order, seen[at] if seen else None)

        return backward

    def _write(self, rows: Rows, batch: Batch, order: int, seen: Sighting | None) -> None:
        port = self.ports.of(rows, order)
        keys, values = rows.keys, rows.values
        if port is None or values is None or self.dropped.issuperset(port.terms):
            return
        if not self._reached(port.terms):
            return
        lead = keys.shape[: keys.ndim - rows.site.key_dims]
        if batch.size < 0:
            batch.begin_inside(lead)
        if batch.size == 0 or not math.prod(lead):
            return
        shape = (keys.shape, batch.size)
        if port.arranged[0] != shape or seen is not None:
            found = self.owners.of(rows.site, lead, batch, seen)
            if isinstance(found, str):  # then the probe will miss them
                self.owners.refuse(rows.site, found)
                return
            if isinstance(found, Tensor):
                self._write_one_by_one(port, rows, batch, found)
                return
            port.arranged = (shape, found)
        self._put(port, rows, batch, port.arranged[1])

    def _write_one_by_one(self, port: Port, rows: Rows, batch: Batch, owners: Tensor) -> None:
        """Rows in the order of their data: each is a sample of a batch of its own."""
        site = rows.site
        assert rows.values is not None
        keys = rows.keys.flatten(0, rows.keys.ndim - site.key_dims - 1)
        values = rows.values.flatten(0, rows.values.ndim - site.value_dims - 1)
        known = (owners >= 0).to(values.device)
        if not known.all():
            if bool(values[~known].any()):
                self.owners.refuse(site, UNCLEAR)
                return
            keys, values, owners = keys[known], values[known], owners[owners >= 0]
        if len(owners):
            rows = rows._replace(keys=keys, values=values)
            self._put(port, rows, self._batches.part(batch, owners), 1)

    def _put(self, port: Port, rows: Rows, batch: Batch, stretch: int) -> None:
        keys, values = rows.keys, rows.values
        assert values is not None
        if (batch.whole or batch).ids is None:
            self.unnamed.add(batch.number)
        if keys.dtype != values.dtype and keys.is_floating_point():
            keys = keys.to(values.dtype)  # as the kernel saw it under autocast
        order = (batch.size, stretch)
        self.bytes += port.tape.write(self.step, batch, keys, values, order, rows.shared)
