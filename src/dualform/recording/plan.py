"""Before training starts: the parameters, and what is known of how they will be booked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.layers import is_scripted
from dualform.layers.computed import computed_weight, is_weight_norm
from dualform.layers.derived import LARGEST
from dualform.ledger import Book
from dualform.ledger.tensors import CODES
from dualform.optimizers import Rule, why_observed
from dualform.private import (
    before_compile,
    is_compiled,
    is_joining,
    may_have_compiled,
    uses_cuda_graphs,
)
from dualform.recording.keep import (
    AUTO,
    STEPS,
    Keep,
    Policy,
    Summaries,
    read_keep,
    read_layers,
    refuse_needless,
    why_by_step,
)
from dualform.recording.shards import Portion, part_of, refuse_sharded

JOINED = (
    "model.join() lets processes make steps without those that have no batches left, and a step of "
    "a run is one that every process has made. Leave it out, and have a process without a batch "
    "call the model with an empty one, or give all processes as many batches (DistributedSampler)."
)


@dataclass(frozen=True)
class Plan:
    """The books of a model, in the order of its parameters."""

    parameters: dict[str, nn.Parameter]
    books: tuple[Book, ...]
    keep: Mapping[str, Policy]
    """How much is stored of each parameter's rows: its policy."""

    def book(self, name: str) -> Book:
        """The book of a parameter."""
        return self.books[self.columns[name]]

    @cached_property
    def parts(self) -> dict[str, Portion]:
        """Of each parameter that is sharded over the processes, which part this one holds."""
        parts = {name: part_of(parameter) for name, parameter in self.parameters.items()}
        return {name: part for name, part in parts.items() if part is not None}

    @cached_property
    def columns(self) -> dict[str, int]:
        """The number of each book."""
        return {book.name: at for at, book in enumerate(self.books)}


def make_plan(
    model: nn.Module,
    optimizer: Optimizer,
    rule: Rule,
    keep: Keep = AUTO,
    layers: str | Sequence[str] | None = None,
) -> Plan:
    """A book for every parameter; by step from the start where the optimizer has no rule.

    So are those of which no rows are to be kept.
    """
    parameters = dict(model.named_parameters())
    refuse_unready(parameters)
    refuse_unwritable(model, parameters)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not known.intersection(map(id, parameters.values())):
        raise RecordingError(
            "the optimizer has none of the model's parameters; give the one made with "
            "model.parameters()."
        )
    reason = "" if rule.fields else why_observed(optimizer)
    refused = rule.group_refusals(optimizer)
    kept = read_keep(keep, parameters)
    for name, policy in kept.items():
        if isinstance(policy, Summaries) and policy.offsets == STEPS:
            kept[name] = STEPS if parameters[name].ndim < 2 else policy
    refuse_needless(keep, {name: p.shape for name, p in parameters.items()})
    recorded = read_layers(layers, parameters)
    reasons = {
        name: reason or refused.get(id(p), "") or why_by_step(kept[name], name in recorded)
        for name, p in parameters.items()
    }
    kept = {name: kept[name] if name in recorded else STEPS for name in parameters}
    books = tuple(
        Book(name, tuple(p.shape), dtype_name(p.dtype), reason=reasons[name])
        for name, p in parameters.items()
    )
    return Plan(parameters, books, kept)


def without_join(model: nn.Module) -> ExitStack:
    """Until closed, `model.join()` is refused: its processes make different steps."""
    stack = ExitStack()
    if isinstance(model, nn.parallel.DistributedDataParallel):

        def refuse(**given: Any) -> None:
            raise RecordingError(JOINED)

        vars(model)["join_hook"] = refuse
        stack.callback(vars(model).pop, "join_hook", None)
    return stack


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def torch_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer that torch calls: a wrapper, such as accelerate's, keeps it as `.optimizer`."""
    inner = optimizer
    while isinstance(deeper := getattr(inner, "optimizer", None), Optimizer):
        inner = deeper
    if not isinstance(inner, Optimizer):
        raise RecordingError(
            f"the optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, or a "
            "wrapper that keeps one as its `.optimizer`."
        )
    return inner


def uncompiled() -> ExitStack:
    """Until closed, what torch.compile made runs as it was written, so that it can be seen."""
    stack = ExitStack()
    if may_have_compiled():
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    return stack


def may_nest(optimizer: Optimizer) -> bool:
    """Whether a step may run inside another: more than one of its classes has a `step`.

    >>> parameters = [torch.zeros(1)]
    >>> may_nest(torch.optim.Adam(parameters)), may_nest(torch.optim.AdamW(parameters))
    (False, False)
    """
    classes = [cls for cls in type(optimizer).__mro__ if cls is not Optimizer]
    steps = [vars(cls)["step"] for cls in classes if "step" in vars(cls)]
    return len({inspect.unwrap(step) for step in steps}) > 1  # torch wraps them, some twice


def is_nested(optimizer: Optimizer) -> bool:
    """Whether a step is running inside another: a subclass that calls `super().step()`.

    Torch calls hooks for both. Counting hooks would go wrong after a step that raised. So the calls
    of `step` that are running are counted, those of the kind that calls hooks: the innermost does.
    """
    steps = [vars(cls)["step"] for cls in type(optimizer).__mro__ if "step" in vars(cls)]
    codes = {step.__code__ for step in steps if isinstance(step, FunctionType)}
    frame, running = inspect.currentframe(), []
    while frame is not None:
        if frame.f_code in codes and _first_argument(frame) is optimizer:
            running.append(frame.f_code)
        frame = frame.f_back
    return running.count(running[0]) > 1 if running else False


def _first_argument(frame: FrameType) -> object:
    names, others, _, values = inspect.getargvalues(frame)
    return values[names[0]] if names else next(iter(values[others] if others else ()), None)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what compiles it or averages its gradients."""
    model = before_compile(model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return before_compile(model.module)
    return model


def compiled_part(model: nn.Module) -> nn.Module | None:
    """What of it is compiled: the model, or what DistributedDataParallel wraps; None if nothing.

    >>> compiled_part(nn.Linear(2, 2)) is None
    True
    """
    called: list[nn.Module] = [model]
    if isinstance(model, nn.parallel.DistributedDataParallel):
        called.append(model.module)
    return next((module for module in called if is_compiled(module)), None)


def refuse_wrapped(model: nn.Module) -> None:
    """Refuses models whose own calls are not those that see the batch."""
    if isinstance(model, nn.DataParallel):
        raise RecordingError(
            "the model is wrapped in DataParallel: its gradients come from several replicas in one "
            "process. Start one process for each GPU (torchrun) and use DistributedDataParallel, "
            "or record on one device (CUDA_VISIBLE_DEVICES=0)."
        )
    if is_joining(model):
        raise RecordingError(JOINED)
    refuse_sharded(unwrapped(model))
    for name, module in unwrapped(model).named_modules():
        if name and is_compiled(module):
            raise RecordingError(
                f"its module '{name}' is compiled, and a compiled module makes no calls that could "
                "be seen. Compile the whole model and record it with keep='summaries', or train "
                "without torch.compile."
            )


def refuse_to_capture(model: nn.Module, keep: Mapping[str, Policy], of_parts: bool) -> None:
    """Refuses a compiled model whose rows are asked for, or that writes over its results.

    So it does where its parameters are parts, whose whole parameters come and go in the compiled
    code.
    """
    if of_parts:
        raise RecordingError(
            "the model is compiled, and its parameters are sharded: where whole parameters come "
            "and go in compiled code, its calls cannot be tapped. Train without torch.compile, or "
            "with DistributedDataParallel."
        )
    others = {name: how for name, how in keep.items() if not isinstance(how, Summaries)}
    for name, how in others.items():
        if how != STEPS:
            raise RecordingError(
                f"the model is compiled, and a compiled model makes no calls that could be seen: "
                f"there are no rows to keep for '{name}' with keep={how!r}. Use keep='summaries' "
                "(see dualform.summaries), or train without torch.compile."
            )
    if uses_cuda_graphs(model):
        raise RecordingError(
            "the model is compiled with CUDA graphs, which write over the results of a step in the "
            "next one. Compile it without them: mode='default', or "
            "'max-autotune-no-cudagraphs' in place of 'reduce-overhead' or 'max-autotune'."
        )


def refuse_unready(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuses parameters that have no shape or no values yet."""
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise RecordingError(
                f"'{name}' has no shape yet: it belongs to a lazy module. Call the model once, "
                "under torch.no_grad(), before recording."
            )
        if parameter.is_meta:
            raise RecordingError(
                f"'{name}' has no values: it is on the meta device. Use model.to_empty(device=…) "
                "and initialize or load the model before recording."
            )


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state dict; a module's `get_extra_state` may give anything."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def refuse_unwritable(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuses tensors that a run cannot hold."""
    for name, tensor in state_tensors(model).items():
        dtype, cure = dtype_name(tensor.dtype), "register it with persistent=False"
        if tensor.is_complex():
            if name in parameters:
                cure = "keep torch.view_as_real of it, and use torch.view_as_complex in forward"
            raise RecordingError(f"'{name}' has dtype {dtype}, and runs hold real numbers; {cure}.")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise RecordingError(f"'{name}' is {kind}, and runs hold dense tensors; {cure}.")
        if tensor.dtype not in CODES:
            known = ", ".join(map(dtype_name, CODES))
            raise RecordingError(f"'{name}' has dtype {dtype}, and runs hold {known}; {cure}.")


def reason_of(model: nn.Module, name: str) -> str:
    """Why no call of the model left rows for a parameter."""
    path, _, own = name.rpartition(".")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if computed_weight(name, parameters):
        size = parameters[name].numel()
        if size > LARGEST and not is_weight_norm(own, model.get_submodule(path)):
            return (
                f"a weight is computed from it: its rows are every sample's gradient in full, and "
                f"{size:,} numbers a sample are too many to keep; the most are {LARGEST:,}"
            )
        return "a weight is computed from it in a way that leaves no rows, or under autocast"
    owner = dict(model.named_modules(remove_duplicate=False))[path]
    if is_scripted(owner):
        return "a scripted module makes no calls that could be seen; by row is the module itself"
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        if owner.max_norm is not None:
            return "with max_norm the table changes when it is read"
        if isinstance(owner, nn.EmbeddingBag):
            return f"EmbeddingBag with mode='{owner.mode}' or scaling by frequency has no rows"
    if isinstance(owner, nn.RNNBase) and owner.dropout and owner.num_layers > 1:
        return (
            "cuDNN keeps the dropout between its layers to itself; train under "
            "torch.backends.cudnn.flags(enabled=False) to have rows"
        )
    return f"no call was seen in which '{own}' of {type(owner).__name__} leaves rows"
