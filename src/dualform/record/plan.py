"""Before training starts: which parameter is booked how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from dualform.errors import RecordingError
from dualform.ledger import Book, Stream
from dualform.ledger.format import ROOT
from dualform.record.layers import LayerKind, kind_of
from dualform.record.optimizers import Rule


@dataclass(frozen=True)
class Source:
    """A watched layer: the module, its kind, and the stream its rows go to."""

    stream: Stream
    module: nn.Module
    kind: LayerKind
    parameters: dict[str, str]
    """Book name to form."""


@dataclass(frozen=True)
class Account:
    """Books that share streams, checked together: usually a weight and its bias."""

    books: tuple[str, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The books of a model, in the order of its parameters."""

    parameters: dict[str, nn.Parameter]
    books: tuple[Book, ...]
    sources: tuple[Source, ...]
    accounts: tuple[Account, ...]


def make_plan(model: nn.Module, optimizer: Optimizer, rule: Rule) -> Plan:
    """Books every parameter: by row where layer and optimizer have a rule, else by step."""
    parameters = dict(model.named_parameters())
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not known.intersection(map(id, parameters.values())):
        raise RecordingError(
            "the optimizer has none of the model's parameters; give the one made with "
            "model.parameters()."
        )
    names = {id(parameter): name for name, parameter in parameters.items()}
    sources = _sources(model, names) if rule.fields else ()
    unruled = "" if rule.fields else f"{type(optimizer).__name__} has no rule yet"
    books = tuple(
        _book(model, name, parameter, sources, unruled) for name, parameter in parameters.items()
    )
    return Plan(parameters, books, sources, _accounts(sources))


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _sources(model: nn.Module, names: dict[int, str]) -> tuple[Source, ...]:
    found: list[Source] = []
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is None:
            continue
        shape = kind.shape(module)
        parameters = {
            id(getattr(module, attribute)): form for attribute, form in shape.forms.items()
        }
        if not all(key in names for key in parameters):
            continue  # a computed weight (parametrization): its parameters are booked by step
        terms = {names[key]: form for key, form in parameters.items()}
        if _shares_bias(terms, found):
            continue
        found.append(Source(Stream(name or ROOT, shape.keys, shape.values), module, kind, terms))
    return tuple(found)


def _shares_bias(terms: dict[str, str], found: list[Source]) -> bool:
    """Whether another weight uses the same bias: one probe cannot tell such layers apart."""
    weights = {name for name, form in terms.items() if form == "outer"}
    others = [source for source in found if not weights <= set(source.parameters)]
    return any(set(terms) & set(source.parameters) for source in others)


def _book(
    model: nn.Module,
    name: str,
    parameter: nn.Parameter,
    sources: tuple[Source, ...],
    unruled: str,
) -> Book:
    terms = {s.stream.name: s.parameters[name] for s in sources if name in s.parameters}
    reason = "" if terms else unruled or _no_kind(model, name)
    return Book(name, tuple(parameter.shape), dtype_name(parameter.dtype), terms, reason)


def _no_kind(model: nn.Module, name: str) -> str:
    owner = model.get_submodule(name.rpartition(".")[0])
    return f"{type(owner).__name__} has no rule yet"


def _accounts(sources: tuple[Source, ...]) -> tuple[Account, ...]:
    """Groups sources that share a parameter (tied weights), with all their books."""
    groups: list[tuple[set[str], list[int]]] = []
    for index, source in enumerate(sources):
        books, members = set(source.parameters), [index]
        for group in [group for group in groups if group[0] & books]:
            groups.remove(group)
            books, members = group[0] | books, group[1] + members
        groups.append((books, members))
    return tuple(Account(tuple(sorted(books)), tuple(members)) for books, members in groups)
