"""Taps: a compiled model's backward pass computes records, as the gradients of probes.

A *tap* stands behind one use of a parameter. The call is made as it always was. Then its output
passes an autograd function that changes nothing: forward copies it (which inductor removes), and
backward hands on the error as it came. The function has one more input, a *probe*, whose values
nobody reads. What backward gives as the probe's gradient are the records of each sample. Dynamo
traces all of this with the model, without a graph break.

A probe has a fixed shape, (largest batch, numbers a sample): Dynamo takes every tensor that is
reached through a parameter for static. How many samples a batch has is the length of a tensor of
the mode, which Dynamo finds dynamic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dualform.layers.composite import undelegated
from dualform.layers.elementwise import rows_in_shape
from dualform.layers.patches import at_positions, convolved, patches
from dualform.ledger import Stream
from dualform.private import checkpoint_in_graphs
from dualform.recording.contraction import errors_along, summaries_of
from dualform.recording.tap_calls import READ, READERS, Call

TAPS = "_dualform_taps"
"""An attribute of a parameter: its taps."""
SUMMARY, GROUPS, ALONG, RAW, LOOKUP = "summary", "groups", "along", "raw", "lookup"
SUM, SCALE = "sum", "scale"
PLAIN = Stream("", (), ())
"""What calls see that are no convolutions."""
EXACT_PLACES = 1 << 24
"""Places of a table are kept as 32-bit floats, which are exact up to here."""


class How(NamedTuple):
    """What a tap computes: all of it constant to the compiler."""

    kind: str
    parts: tuple[str, ...]
    """One for each book, in the order in which a probe holds their records."""
    patterns: Mapping[int, tuple[int, str | int]]
    """Which dimension counts samples, and how it is folded; by the dimensions before a row."""
    each: int
    """The most rows of a sample, where rows are kept."""
    has_outputs: bool
    """Whether errors are kept in a basis."""
    has_inputs: bool
    layout: Stream | None = None
    """What convolutions see."""
    broadcast: bool = False
    """Whether a table is read once for all samples, and seen where it is added."""


class Tap:
    """What is found on a parameter while a compiled model is traced."""

    def __init__(self, how: How, U: Tensor, V: Tensor, probe: Tensor) -> None:
        self.how, self.U, self.V, self.probe = how, U, V, probe
        self.nothing = torch.empty(0, dtype=U.dtype, device=U.device)
        """In place of an input: Dynamo takes no tensor twice."""


class Taps(dict[str, Tap]):
    """The taps of one parameter, by kind of call; a copy of the parameter has none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()

    def __deepcopy__(self, memo: Any) -> dict[str, Tap]:
        return {}


class _Tapped(Function):
    """The identity; the gradient of its probe are the records of each sample."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        probe: Tensor,
        count: Tensor,
        U: Tensor,
        V: Tensor,
        how: How,
        extra: Any,
        pattern: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, U, V)
        ctx.size, ctx.dtype, ctx.samples = probe.shape, probe.dtype, count.shape[0]
        ctx.how, ctx.extra, ctx.pattern = how, extra, pattern
        return y.clone()  # a view would forbid changes in place after it

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> Any:
        x, U, V = ctx.saved_tensors
        with torch.autocast(e.device.type, enabled=False):
            found = _records(ctx.how, ctx.extra, ctx.pattern, x, e, U, V, ctx.samples)
            parts = [part.to(ctx.dtype) for part in found]
            records = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            size, (count, width) = ctx.size, records.shape
            if count != size[0] or width != size[1]:
                records = F.pad(records, (0, size[1] - width, 0, size[0] - count))
        return e, None, records, None, None, None, None, None, None


def _records(
    how: How, extra: Any, pattern: Any, x: Tensor, e: Tensor, U: Tensor, V: Tensor, samples: int
) -> list[Tensor]:
    """(samples, numbers) for each part, and a last column of ones where there are rows."""
    if how.kind == "conv":
        keys, errors = x.to(e.dtype), at_positions(how.layout, e)  # type: ignore[arg-type]
    else:
        keys, errors = _rows(how.kind, extra, x, e)
        errors = by_sample(errors, samples, pattern)
        keys = by_sample(keys, samples, pattern) if keys is not None else errors
    found, has_rows = [], False
    for part in how.parts:
        if part == SUMMARY:
            stream, given = (PLAIN, errors) if how.layout is None else (how.layout, e)
            a = errors_along(stream, given, U if how.has_outputs else None, samples)
            summaries = summaries_of(stream, keys.to(e.dtype), a, V if how.has_inputs else None)
            found.append(summaries.reshape(samples, -1))
        elif part == GROUPS:
            groups = how.layout.layout["groups"]  # type: ignore[union-attr]
            b = patches(how.layout, keys)  # type: ignore[arg-type]
            sides = [t.reshape(samples, t.shape[1], groups, -1) for t in (errors, b)]
            found.append(torch.einsum("npgo,npgi->ngoi", *sides).reshape(samples, -1))
        elif part == ALONG:
            a = errors @ U if how.has_outputs else errors
            found += [_padded(a, how.each), _padded(_along(how, keys, V, samples), how.each)]
            has_rows = True
        elif part == RAW:
            whole = how.layout is not None
            found += (
                [e.flatten(1), keys.flatten(1)]
                if whole
                else [_padded(errors, how.each), _padded(keys, how.each)]
            )
            has_rows = True
        elif part == LOOKUP:
            a = errors @ V if how.has_inputs else errors
            found += [_padded(a, how.each), _padded(keys, how.each)]
            has_rows = True
        elif part == SUM:
            found.append(errors.sum(1, dtype=torch.promote_types(errors.dtype, torch.float32)))
        else:
            both = keys.to(errors.dtype) * errors
            found.append(both.sum(1, dtype=torch.promote_types(both.dtype, torch.float32)))
    if has_rows:  # a graph may be gone through twice: then inputs and places are counted twice
        found.append(errors.new_ones(samples, 1))
    return found


def _along(how: How, keys: Tensor, V: Tensor, samples: int) -> Tensor:
    """(samples, rows, k_i): inputs in the directions of V."""
    if how.layout is None:
        return keys.to(V.dtype) @ V if how.has_inputs else keys
    if how.has_inputs:
        return convolved(how.layout, keys, V).flatten(2).mT
    return patches(how.layout, keys)


def _padded(rows: Tensor, each: int) -> Tensor:
    """(samples, each × width) of rows (samples, rows, width)."""
    missing = each - rows.shape[1]
    return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).flatten(1)


def _rows(kind: str, extra: Any, x: Tensor, e: Tensor) -> tuple[Any, Tensor]:
    """Keys and errors of a call, with one trailing dimension; no keys for an offset."""
    if kind == "product":
        return x.to(e.dtype), e
    if kind == "lookup":
        places = x.expand(e.shape[:-1]).unsqueeze(-1)
        if extra is not None:
            e = e.masked_fill(places == extra, 0)
        return places.to(torch.float32), e
    if kind == "layer_norm":
        shape, eps = extra
        return F.layer_norm(x.to(e.dtype), shape, eps=eps).flatten(-len(shape)), e.flatten(
            -len(shape)
        )
    if kind == "rms_norm":
        shape, eps = extra
        return F.rms_norm(x.to(e.dtype), shape, eps=eps).flatten(-len(shape)), e.flatten(
            -len(shape)
        )
    if kind == "batch_norm":
        return F.batch_norm(x.to(e.dtype), None, None, training=True, eps=extra).movedim(
            1, -1
        ), e.movedim(1, -1)
    if kind == "group_norm":
        groups, eps = extra
        return F.group_norm(x.to(e.dtype), groups, eps=eps).movedim(1, -1), e.movedim(1, -1)
    shape, factor = extra
    place = rows_in_shape(list(shape), e.ndim)
    if kind == "offset":
        return None, place(e if factor == 1 else e * factor)
    return place(x.expand(e.shape)), place(e)


def by_sample(rows: Tensor, samples: int, pattern: tuple[int, str | int] | None) -> Tensor:
    """(samples, rows, width) of a tensor with a width last; None stands for a single sample.

    >>> rows = torch.arange(6.0).reshape(3, 2, 1)  # 3 positions, 2 samples
    >>> by_sample(rows, 2, (1, "")).flatten()
    tensor([0., 2., 4., 1., 3., 5.])
    """
    lead, width = rows.shape[:-1], rows.shape[-1]
    dim, folded = (0, "") if pattern is None else pattern
    if isinstance(folded, int):  # so many neighbors of each sample, and others around them
        behind = folded * math.prod(lead[dim + 1 :])
        return rows.reshape(-1, samples, behind, width).transpose(0, 1).flatten(1, 2)
    if folded and dim:
        around = math.prod(lead[:dim])
        return rows.reshape(around, samples, -1, width).transpose(0, 1).flatten(1, 2)
    return (rows.movedim(dim, 0) if dim else rows).reshape(samples, -1, width)


class Capture(TorchFunctionMode):
    """While it is entered, the output of every call that has a tap passes through it.

    Dynamo wants a mode without an `__enter__` of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.empty(0, 0)
        """As long as there are samples in the batch."""
        self.checkpoint = checkpoint_in_graphs()
        self.attention = undelegated(F.multi_head_attention_forward)
        """The same function, whose own calls can be seen."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Makes the call; its output comes through the tap, where there is one."""
        kwargs = kwargs or {}
        if func is self.checkpoint:
            # Dynamo hands us torch.utils.checkpoint as a function, and its body would not see the
            # mode. To enter it there is a side effect that Dynamo refuses, unless the stack of
            # modes is known to change already: hence the empty `with`.
            with self:
                pass
            return func(self._inside(args[0]), *args[1:], **kwargs)
        if func is F.multi_head_attention_forward and self.attention is not None:
            with self:
                return self.attention(*args, **kwargs)
        if func is torch.Tensor.unflatten:  # Dynamo cannot trace the method inside of a mode
            return torch.unflatten(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is torch.Tensor.to and hasattr(args[0], READ):  # the same tensor, as a rule
            setattr(out, READ, getattr(args[0], READ))
            return out
        read = READERS.get(func)
        call = None if read is None else read(func, args, kwargs, out)
        return out if call is None else self._tapped(call, out)

    def _inside(self, body: Any) -> Any:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return body(*args, **kwargs)

        return inside

    def _tapped(self, call: Call, out: Any) -> Any:
        if call.kind == READ:
            tap, x, extra = call.extra
        else:
            taps = getattr(call.parameter, TAPS, None)
            tap, x, extra = None if taps is None else taps.get(call.kind), call.x, call.extra
        if tap is None:
            return out
        how = tap.how
        if how.broadcast and call.kind != READ:
            setattr(out, READ, (tap, x, extra))
            return out
        samples, lead = self.count.shape[0], out.ndim - call.dims
        pattern = how.patterns.get(lead)
        if not _fits(how, call, out, samples, pattern):
            return out
        given = (tap.probe, self.count, tap.U, tap.V, how, extra, pattern)
        return _Tapped.apply(out, tap.nothing if x is None else x, *given)  # type: ignore[no-untyped-call]


def _fits(how: How, call: Call, out: Tensor, samples: int, pattern: Any) -> bool:
    """Whether the records of a call fit the probe; else its rows are missing, which is noticed."""
    if how.layout is not None:
        return tuple(call.x.shape[1:]) == tuple(how.layout.keys)
    if pattern is None and samples != 1:
        return False
    rows = math.prod(out.shape[: out.ndim - call.dims])
    return not how.each or rows <= how.each * samples
