"""A use: one call of a torch function in which parameters take part linearly.

Books belong to parameters, not to classes of modules. While a model runs, every torch function that
is handed a parameter (or a view of one) is looked up among the kinds of this folder; a kind says
what the call's rows are, for `nn.Linear` as for `F.linear(x, self.w[:8])`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dualform.layers.computed import PARAMETRIZED, computed_weight, leaves
from dualform.layers.extent import Block, extent
from dualform.ledger import Term
from dualform.memory.forms import form_named
from dualform.private import base_of, has_hooks


@dataclass(frozen=True)
class Site:
    """What all uses of the same kind of the same parameters have in common: their stream."""

    label: str
    """A parameter's name, to call the stream after."""
    terms: Mapping[str, Term]
    """The books that are fed, each with its form."""
    key_dims: int = 1
    """How many trailing dimensions of the keys make up one record."""
    value_dims: int = 1
    layout: Mapping[str, Any] = field(default_factory=dict)
    axis: int | None = None
    """The dimension that counts samples; None where it is found by its size."""
    aside: bool = False
    """Whether rows come of how a weight is computed, and a query of the layer has none."""

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """The books that are read by place."""
        terms = self.terms.items()
        return tuple([book for book, term in terms if not form_named(term.form).has_sides])


class Rows(NamedTuple):
    """What a use leaves behind: keys, and once the errors are known, values."""

    site: Site
    keys: Tensor
    values: Tensor | None
    shared: Tensor | None = None
    """A matrix with which the blocks of all these rows are multiplied, where they are."""
    is_data: bool = False
    """Whether keys are what the call was given, and do not depend on what is trained."""
    rounding: torch.dtype | None = None
    """The type whose rounding the gradient has, where it is coarser than that of the rows."""

    @property
    def record(self) -> tuple[int, ...]:
        """The shape of one record's key, of which a convolution makes several rows."""
        return tuple(self.keys.shape[self.keys.ndim - self.site.key_dims :]) or (1,)


class Seen(Protocol):
    """A call that was seen, as a recorder or a reader needs it."""

    outputs: tuple[Tensor, ...]
    """The tensors whose gradients `rows` wants; none once a hook on their graph waits for them."""

    def rows(self, errors: Sequence[Tensor | None] | None) -> Iterable[Rows]:
        """Keys, and values where errors are given."""


@runtime_checkable
class Waits(Protocol):
    """A call that knows itself when its errors come."""

    def await_errors(
        self, action: Callable[[Sequence[Tensor | None]], None]
    ) -> RemovableHandle | None:
        """Has the action called with them; None where it is as with other calls."""


@dataclass(slots=True)
class Use:
    """One call: where its keys come from, and how its errors become values."""

    site: Site
    outputs: tuple[Tensor, ...]
    """One tensor, whose gradient is the error."""
    key: Tensor | Callable[[], Tensor]
    value: Callable[[Tensor], Tensor] | None = None
    superseded: bool = False
    """Whether a later call has been found to show the same rows sample by sample."""

    def rows(self, errors: Sequence[Tensor | None] | None) -> Iterable[Rows]:
        """Keys, and values where errors are given."""
        if self.superseded or (errors is not None and errors[0] is None):
            return ()
        keys = self.key if isinstance(self.key, Tensor) else self.key()
        if errors is None:
            return (Rows(self.site, keys, None),)
        error = errors[0]
        assert error is not None
        is_data = keys is self.key and not keys.requires_grad
        values = error if self.value is None else self.value(error)
        return (Rows(self.site, keys, values, None, is_data),)


@dataclass(slots=True)
class Split:
    """One call whose rows go to several sites: `make` gives them, with values for an error."""

    outputs: tuple[Tensor, ...]
    make: Callable[[Tensor | None], Iterable[Rows]]

    def rows(self, errors: Sequence[Tensor | None] | None) -> Iterable[Rows]:
        """Keys, and values where errors are given."""
        if errors is None:
            return self.make(None)
        return () if errors[0] is None else self.make(errors[0])


class Together:
    """Several uses of one output: of all the parameters that took part in a call."""

    def __init__(self, uses: Sequence[Seen]) -> None:
        self._uses, self.outputs = uses, uses[0].outputs
        for use in uses:
            use.outputs = ()

    @classmethod
    def of(cls, *uses: Seen | None) -> Seen | None:
        """As few as they are: None for none, the use itself where it is alone."""
        found = [use for use in uses if use is not None]
        return cls(found) if len(found) > 1 else found[0] if found else None

    def rows(self, errors: Sequence[Tensor | None] | None) -> Iterable[Rows]:
        """Keys, and values where errors are given, use after use."""
        return (rows for use in self._uses for rows in use.rows(errors))


def is_single(use: Seen) -> bool:
    """Whether a matrix, or a convolution, is used on a single sample without a dimension for it."""
    if not isinstance(use, Use) or use.outputs[0].ndim != use.site.value_dims:
        return False
    first = next(iter(use.site.terms.values()))
    return form_named(first.form).is_product


class Found(NamedTuple):
    """A parameter in a call's arguments: itself, or a view of it."""

    book: str
    label: str
    """What it is called where it is used, if several modules share it."""
    parameter: Tensor
    given: Tensor

    def matrix(self, swapped: bool = False) -> Block | None:
        """The view in which the given tensor is a block of the parameter's matrix, and its place.

        `swapped` for a tensor whose second dimension counts outputs. None where it is no block.
        """
        if self.given.ndim < 2:
            return None
        outputs = int(swapped)
        return self.block([outputs], [at for at in range(self.given.ndim) if at != outputs])

    def block(self, outputs: Sequence[int], inputs: Sequence[int]) -> Block | None:
        """The same where several dimensions of the given tensor may count outputs, or inputs."""
        part = extent(self.parameter, self.given)
        return None if part is None else part.block(outputs, inputs)

    def flat(self) -> Block | None:
        """The same for the flattened parameter; None where the given tensor is no stretch of it."""
        part = extent(self.parameter, self.given)
        return None if part is None else part.flat()


class Finder:
    """Knows a model's parameters by identity, and the sites met so far.

    Those that are not trained count only where `frozen` says so.
    """

    def __init__(self, parameters: Mapping[str, Tensor], frozen: bool = False) -> None:
        self._frozen = frozen
        self._whole = {id(p): Found(name, name, p, p) for name, p in parameters.items()}
        self._owners = {
            name: owner for name in parameters if (owner := computed_weight(name, parameters))
        }
        """The weight that each parameter is there to compute, as parametrizations do."""
        self._owner = {id(parameters[name]): owner for name, owner in self._owners.items()}
        self.computes = bool(self._owner)
        """Whether the model has parameters that weights are computed from."""
        self._sites: dict[Hashable, Site | None] = {}
        self.labels: dict[str, str] = {}
        """What shared parameters are called in the module that is running."""
        self.axis: int | None = None
        """The dimension that counts samples, where a kind knows it of the calls inside its own."""
        self.order: Tensor | None = None
        """Where each sample of a packed sequence stands, which is sorted by length."""
        self.recent: dict[int, tuple[Tensor, Use]] = {}
        """Outputs of table reads in this forward pass, which may yet be broadcast."""
        self._made: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._alive = 64
        self.stand_ins: Callable[[Tensor], str | None] | None = None
        """Where others stand in the place of parameters: the name of the one that a tensor does."""
        self.guard: Callable[..., Any] = _run
        """Runs what looks at a call of the model. A recorder's returns None after a failure."""

    def __call__(self, tensor: Any) -> Found | None:
        """The parameter behind a tensor that is trained, or None."""
        known = self._known(tensor)
        if known is None:
            base = base_of(tensor)
            known = None if base is None else self._known(base)
            if known is None or not _distinct(tensor):
                return None
        if not (self._frozen or known.parameter.requires_grad) or PARAMETRIZED in known.book:
            return None
        if tensor is known.parameter and not self.labels:
            return known
        return known._replace(label=self.labels.get(known.book, known.book), given=tensor)

    def _known(self, tensor: Any) -> Found | None:
        """The parameter that a tensor is, or stands in for."""
        known = self._whole.get(id(tensor))
        if known is None and self.stand_ins is not None and isinstance(tensor, nn.Parameter):
            book = self.stand_ins(tensor)
            if book is not None:
                known = self._whole[id(tensor)] = Found(book, book, tensor, tensor)
                if book in self._owners:
                    self._owner[id(tensor)] = self._owners[book]
        return known

    def each(self, *tensors: Any) -> list[Found | None]:
        """The parameter behind each of some tensors."""
        return [self(tensor) for tensor in tensors]

    def original(self, tensor: Any) -> Found | None:
        """The parameter that weights are computed from, itself or a view of it; else None."""
        for candidate in (tensor, base_of(tensor)):
            known = self._known(candidate)
            if known is not None and id(candidate) in self._owner:
                return known if self._frozen or known.parameter.requires_grad else None
        return None

    def originals(self, weight: Any) -> list[Found]:
        """All parameters that a weight was computed from, where they are there for it alone.

        None for what a layer gave, nor where hooks of the user's would see too many gradients.
        """
        node, owner, found = getattr(weight, "grad_fn", None), None, []
        for leaf in () if node is None else leaves(node):
            known = self._known(leaf)
            own = None if known is None else self._owner.get(id(leaf))
            if (
                leaf is None
                or known is None
                or own is None
                or own != (owner or own)
                or has_hooks(leaf)
            ):
                return []
            owner = own
            found.append(known)
        return found

    def remember(self, tensor: Tensor, what: Any) -> None:
        """Keeps what a tensor was made of, as long as it lives."""
        self._made[id(tensor)] = (weakref.ref(tensor), what)
        if len(self._made) > 2 * self._alive:
            self._made = {key: made for key, made in self._made.items() if made[0]() is not None}
            self._alive = max(64, len(self._made))

    def recall(self, tensor: Any) -> Any:
        """What `remember` was told of a tensor, or None."""
        made, what = self._made.get(id(tensor), (None, None))
        return what if made is not None and made() is tensor else None

    def site(self, key: Sequence[Hashable], build: Callable[[], Site]) -> Site | None:
        """The site known under a key, made at the first call; None where it feeds no book.

        Parameters in the key stand for the part of them that was given.
        """
        known = tuple(_place(part) if isinstance(part, Found) else part for part in key)
        try:
            return self._sites[known]
        except KeyError:
            site = build()
            return self._sites.setdefault(known, site if site.terms else None)


def _run(action: Callable[..., Any], *args: Any) -> Any:
    return action(*args)


def _distinct(tensor: Tensor) -> bool:
    """Whether every element of a view is another element of its base."""
    return all(s > 0 for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def _place(found: Found) -> Hashable:
    """What tells the parts of parameters apart, to know a site by."""
    given = found.given
    if given is found.parameter:
        return found.book, found.label
    return found.book, found.label, given.storage_offset(), given.shape, given.stride()


def book_terms(
    weight: Found | None,
    bias: Found | None = None,
    form: str = "outer",
    swapped: bool = False,
    groups: int = 1,
) -> dict[str, Term]:
    """How a weight in this form and an offset enter, as far as they are trained and blocks."""
    of_weight = {} if weight is None else _term(weight, form, swapped, groups)
    return of_weight | ({} if bias is None else _term(bias, "sum"))


def _term(found: Found, form: str, swapped: bool = False, groups: int = 1) -> dict[str, Term]:
    block = found.matrix(swapped) if form_named(form).has_width else found.flat()
    if block is None or (form == "lookup" and block[0] != "rows"):
        return {}
    view, at = block
    if groups > 1 and view != "rows" and found.given is not found.parameter:
        return {}
    return {found.book: Term(form, view, groups, at)}


def outer_site(
    find: Finder, found: Found, outputs: Sequence[int], inputs: Sequence[int]
) -> Site | None:
    """The site of a matrix product with a weight whose dimensions `outputs` count outputs."""
    key = ("outer", found, tuple(outputs), tuple(inputs))

    def build() -> Site:
        block = found.block(outputs, inputs)
        terms = {} if block is None else {found.book: Term("outer", block[0], at=block[1])}
        return Site(found.label, terms)

    return find.site(key, build)


Function: TypeAlias = Callable[..., Any]
Inside: TypeAlias = Callable[..., Any]
"""Called with a function, its arguments and the dimension that counts samples in it."""


class LayerKind:
    """A kind of layer: which torch functions it is, and what a call of one leaves as rows.

    A new kind names its functions and writes `use`; or `see`, if it must act before the call.
    """

    functions: ClassVar[tuple[Function, ...]]

    def see(
        self, find: Finder, inside: Inside, func: Function, args: Sequence[Any], kwargs: Any
    ) -> tuple[Any, Seen | None]:
        """Makes the call; its output and its use. `inside` makes it with its own calls watched.

        The model's own call must not fail because of ours: only that call is outside of the guard.
        """
        out = func(*args, **kwargs)
        return out, find.guard(self.use, find, func, args, kwargs, out)

    def use(
        self, find: Finder, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> Seen | None:
        """The call as a `Use`, or None where no parameter takes part as this kind books it."""
        return None


def named(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: str, **defaults: Any
) -> dict[str, Any]:
    """A call's arguments by name, given the names in order.

    >>> named([3], {"c": 5}, "a b c", b=1)
    {'a': 3, 'b': 1, 'c': 5}
    """
    order = names.split()
    empty = dict.fromkeys(order)
    return {**empty, **defaults, **dict(zip(order, args, strict=False)), **kwargs}
