"""Ports: where the rows of each stream come in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from dualform.layers import Rows, Site, stream_name
from dualform.ledger import Declaration, Stream
from dualform.memory.blocks import matrix_shape
from dualform.recording.tape import Pool, Tape


class Port:
    """Where the rows of one stream come in: its site, its declaration and its tape.

    `order` says when its layer was first called: backward passes meet streams the other way round.
    """

    def __init__(self, site: Site, stream: Stream, pool: Pool, order: int) -> None:
        self.site, self.stream, self.order = site, stream, order
        self.terms = dict(site.terms)
        self.tape = Tape(pool)
        self.arranged: tuple[Any, int] = (None, 0)
        """The shape of keys and batch last seen, and how many neighbors then shared a sample."""

    @property
    def declaration(self) -> Declaration:
        """What readers must know."""
        return Declaration(self.stream, self.terms)


class Ports:
    """The streams met so far, by site."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], known: Iterable[Declaration]
    ) -> None:
        self._parameters = parameters
        self.pool = Pool()
        self.all: list[Port] = []
        self._by_site: dict[int, Port | None] = {}
        self._known = {d.stream.name: d for d in known}
        self._views: dict[str, tuple[str, int]] = {
            book: (term.view, term.groups)
            for d in self._known.values()
            for book, term in d.terms.items()
        }
        self._taken: set[str] = set()

    def of(self, rows: Rows, order: int) -> Port | None:
        """The port of a site; None where its books are already seen in another way."""
        at = id(rows.site)
        if at not in self._by_site:
            self._by_site[at] = self._open(rows, order)
        return self._by_site[at]

    def forget(self) -> None:
        """Frees the memory of all that was written, when nothing more will be."""
        for port in self.all:
            port.tape.take()
        self.pool.forget()

    def _open(self, rows: Rows, order: int) -> Port | None:
        site = rows.site
        assert rows.values is not None
        for book, term in site.terms.items():
            if self._views.setdefault(book, (term.view, term.groups)) != (term.view, term.groups):
                return None
        keys = tuple(rows.keys.shape[rows.keys.ndim - site.key_dims :]) or (1,)
        values = tuple(rows.values.shape[rows.values.ndim - site.value_dims :])
        shared = () if rows.shared is None else tuple(rows.shared.shape)
        stream = Stream(stream_name(site.label), keys, values, dict(site.layout), shared)
        for port in self.all:  # the same use by another call, such as x @ W after linear(x, W.T)
            if port.site == site and port.stream == replace(stream, name=port.stream.name):
                return port
        stream = self._named(site, stream)
        self._taken.add(stream.name)
        self.all.append(Port(site, stream, self.pool, order))
        return self.all[-1]

    def _named(self, site: Site, stream: Stream) -> Stream:
        """The stream under a name that no other has; the one it had in an earlier part of a run."""
        base = stream.name + self._part(site, stream)
        for number in itertools.count(1):
            named = replace(stream, name=base if number == 1 else f"{base}@{number}")
            known = self._known.get(named.name, Declaration(named, dict(site.terms)))
            if named.name not in self._taken and known == Declaration(named, dict(site.terms)):
                break
        return named

    def _part(self, site: Site, stream: Stream) -> str:
        """Which part of its parameter a stream is about, where it is not about all of it."""
        book, term = next(iter(site.terms.items()))
        if term.form == "lookup" or stream.shared:
            return ""
        shape = tuple(self._parameters[book].shape)
        (top, left), (height, width) = term.at, matrix_shape(shape, term.view, term.groups)
        rows = stream.values[0] if stream.layout else math.prod(stream.values)
        columns = math.prod(stream.keys) if term.form == "outer" else width
        part = f"{top}:{top + rows}" if rows < height else ""
        if columns < width and not stream.layout:
            part = f"{part or ':'},{left}:{left + columns}"
        return f"[{part}]" if part else ""
