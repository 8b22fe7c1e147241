"""The first steps of a compiled model, which run as it was written: what can be tapped later.

`Learning` sees each call. It takes down by which parameter its tap will be found, and why it cannot
be tapped, where it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from dualform.layers import Seen, Site, Use, Watching
from dualform.memory.forms import form_named
from dualform.private import current_backward, is_one_graph
from dualform.recording.tap_calls import ADDITIONS, READERS
from dualform.recording.taps import EXACT_PLACES

CURE = "record without torch.compile to have its samples"
IN_PARTS = f"a compiled model uses a part of it, or computes something from it first; {CURE}"
BY = "a compiled model uses it in {}, whose records cannot be taken there; " + CURE
SEVERAL = f"a compiled model uses it in several ways that it cannot tell apart; {CURE}"
OFTEN = f"a compiled model reads it more than once in a forward pass; {CURE}"
FOLLOWED = f"the data decides the order of its rows, which a compiled model does not tell; {CURE}"
WHOLE = f"its rows cannot be summarized, and a compiled model keeps no others; {CURE}"
TALL = f"a compiled model tells places of a table only up to {EXACT_PLACES:,}; {CURE}"

UNCOMPILED = "the model runs without torch.compile while it is recorded: "
WAITING = (
    "the model runs without torch.compile until enough rows were seen to summarize every layer; "
    "recording at this speed ends by itself."
)
ALONE = UNCOMPILED + "the loop calls parts of it by themselves, and only the whole is compiled."
SINGLE = UNCOMPILED + "it is given a single sample without a dimension that counts samples."
RECOMPUTES = UNCOMPILED + (
    "it uses activation checkpointing, which needs torch.compile(model, fullgraph=True)."
)
TRACED = ("", F.multi_head_attention_forward.__name__)
"""Functions inside of which calls can be tapped; empty for the model itself."""


@dataclass
class Learned:
    """How the calls of one site are made."""

    site: Site
    kind: str = ""
    parameter: nn.Parameter | None = None
    """The one that its tap will be found by."""
    calls: int = 0
    """In the forward pass under way."""
    added: int = 0
    """How often what was read of it was added to all samples."""
    most: int = 0
    broadcast: bool = False
    problem: str = ""


class Learning(Watching):
    """Sees every call, as `Watching` does, and takes down which of them can be tapped."""

    def __init__(self, find: Any, kinds: Any, take: Callable[[Seen], None]) -> None:
        super().__init__(find, kinds, take)
        self.sites: dict[int, Learned] = {}
        self._within = ""
        """The function whose own calls are seen."""
        self.recomputes = False
        """Whether calls are made again in the backward pass."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Makes the call, and looks at it if its function belongs to a kind."""
        kind = self._kinds.get(func)
        if kind is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        out, use = kind.see(self._find, self._inside, func, args, kwargs or {})
        if use is not None:
            self._find.guard(self._learn, func, args, kwargs or {}, out, use)
            self._take(use)
        return out

    def _inside(self, func: Any, args: Any, kwargs: Any, axis: int) -> Any:
        before, self._within = self._within, func.__name__
        try:
            return super()._inside(func, args, kwargs, axis)
        finally:
            self._within = before

    def begin_pass(self) -> None:
        """A forward pass begins."""
        for learned in self.sites.values():
            learned.calls = learned.added = 0

    def _learn(self, func: Any, args: Any, kwargs: Any, out: Any, use: Seen) -> None:
        if current_backward() >= 0:
            self.recomputes = True
            return
        if not isinstance(use, Use) or not isinstance(out, Tensor) or not out.requires_grad:
            return
        site = use.site
        learned = self.sites.setdefault(id(site), Learned(site))
        reads = any(not form_named(term.form).has_sides for term in site.terms.values())
        if reads and func in ADDITIONS:
            learned.broadcast, learned.added = True, learned.added + 1
            learned.most = max(learned.most, learned.added)
            return
        learned.calls += 1
        learned.most = max(learned.most, learned.calls)
        read = READERS.get(func)
        call = None if read is None else read(func, args, kwargs, out)
        if self._within not in TRACED or call is None:
            name = self._within or getattr(func, "__name__", str(func))
            learned.problem = learned.problem or BY.format(name)
        elif not isinstance(call.parameter, nn.Parameter):
            learned.problem = learned.problem or IN_PARTS
        elif learned.parameter is None:
            learned.kind, learned.parameter = call.kind, call.parameter
        elif learned.parameter is not call.parameter or learned.kind != call.kind:
            learned.problem = SEVERAL


def why_uncompiled(model: nn.Module, learning: Learning, alone: bool, single: bool) -> str:
    """Why a compiled model must run as it was written for good; empty where it need not."""
    if alone:
        return ALONE
    if single:
        return SINGLE
    if learning.recomputes and not is_one_graph(model):
        return RECOMPUTES
    return ""
