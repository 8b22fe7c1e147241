"""Instruments against training: since when do tokens collapse, and heads attend alike?

A recorded run knows its weights at every step. So the report on a model can be made at several of
them, on the same batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Group
from rich.text import Text
from torch import Tensor, nn

from dualform.diagnose.paths import Paths
from dualform.diagnose.report import Diagnosis, diagnose
from dualform.errors import ModelMismatchError, UnknownStepError
from dualform.read import Run
from dualform.read.display import Displayed, columns, framed, matplotlib_axes, pandas_frame
from dualform.read.progress import together

SEEN = 9
"""At so many steps a run is looked at, unless steps are given."""


@dataclass(frozen=True, repr=False)
class OverTraining(Displayed):
    """What a run's model did at some steps; prints, plots, and becomes a data frame.

    >>> from dualform.testing import tiny_attention_run
    >>> run, model, batch = tiny_attention_run()
    >>> found = over_training(run, model, batch, steps=[0, 3, 6])
    >>> found.steps, len(found.reports[0].collapse.layers)
    ((0, 3, 6), 2)
    """

    steps: tuple[int, ...]
    reports: tuple[Diagnosis, ...]
    """What `dualform.diagnose` says at each of them."""

    @property
    def paths(self) -> tuple[Paths, ...]:
        """Scores of heads by attention paths at each step, where targets were given."""
        return tuple(one.paths for one in self.reports if one.paths is not None)

    @property
    def findings(self) -> tuple[str, ...]:
        """What changed, in sentences."""
        return (self._of_tokens(), *self._of_heads(), *self._of_paths())

    def _of_tokens(self) -> str:
        ends = [one.collapse.layers[-1] for one in (self.reports[0], self.reports[-1])]
        first, last = (one.spread.relative for one in ends)
        return (
            f"Differences between tokens after '{ends[1].name}' are {last:.1%} of the tokens' size "
            f"at step {self.steps[-1]}; at step {self.steps[0]} they were {first:.1%}."
        )

    def _of_heads(self) -> Iterator[str]:
        """Since when heads attend alike, and until when they did."""
        alike = [_alike(report) for report in self.reports]
        for group in sorted(alike[-1]):
            since = next(at for at in range(len(alike)) if all(group in x for x in alike[at:]))
            yield (
                f"Heads {', '.join(map(str, group[1]))} of {group[0]} attend alike "
                + (f"since step {self.steps[since]}." if since else "from the first step on.")
            )
        for group in sorted(alike[0] - alike[-1]):
            last = max(at for at, x in enumerate(alike) if group in x)
            yield (
                f"Heads {', '.join(map(str, group[1]))} of {group[0]} attended alike, and do so no "
                f"more after step {self.steps[last]}."
            )

    def _of_paths(self) -> Iterator[str]:
        if self.paths:
            yield f"At step {self.steps[-1]}: {self.paths[-1].finding}"

    def __rich__(self) -> Group:
        names = ["step", "μ/‖X‖, last", "contraction", "alike", "overlap", "least share"]
        table = columns([*names, *["needed most"] * bool(self.paths)], {"needed most"})
        for step, report in zip(self.steps, self.reports, strict=True):
            factors = [x.contraction for x in report.collapse.layers if x.contraction is not None]
            heads = () if report.heads is None else report.heads.heads
            overlaps = [one.overlap for one in heads if one.overlap is not None]
            table.add_row(
                f"{step:,}",
                f"{report.collapse.layers[-1].spread.relative:.3g}",
                f"{fmean(factors):.3f}" if factors else "–",
                str(sum(len(group) for _, group in _alike(report))),
                f"{fmean(overlaps):.3f}" if overlaps else "–",
                f"{min(one.share for one in heads):.3f}" if heads else "–",
                *([_needed_most(report)] if self.paths else []),
            )
        sentences = [Text(f"· {said}") for said in self.findings]
        return Group(framed("the model over training", table), *sentences)

    def to_pandas(self) -> Any:
        """A data frame with a line for each step and head."""
        data: dict[str, list[Any]] = {"step": [], "relative": [], "score": []}
        rows: list[dict[str, Any]] = []
        for step, report in zip(self.steps, self.reports, strict=True):
            spreads = {one.name: one.spread.relative for one in report.collapse.layers}
            scores = iter(() if report.paths is None else report.paths.each)
            for one in () if report.heads is None else report.heads.heads:
                rows.append(vars(one))
                data["step"].append(step)
                data["relative"].append(spreads[one.block])
                data["score"].append(next(scores, (None, ""))[0])
        own = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        return pandas_frame({"step": data["step"], **own, **data})

    def plot(self, axes: Any = None) -> Any:
        """μ/‖X‖ after each block against the step."""
        axes = matplotlib_axes(axes)
        for at, layer in enumerate(self.reports[0].collapse.layers):
            values = [one.collapse.layers[at].spread.relative for one in self.reports]
            axes.plot(self.steps, values, marker="o", label=layer.name)
        axes.set(xlabel="step", ylabel="μ/‖X‖", ylim=(0, 1.05))
        axes.legend(frameon=False)
        return axes


def _needed_most(report: Diagnosis) -> str:
    """The end of its block's name, and the number of the head with the largest score."""
    if report.paths is None:
        return "–"
    rows = zip(report.paths.blocks, report.paths.scores, strict=True)
    _, block, head = max((float(row.max()), name, int(row.argmax())) for name, row in rows)
    return f"{'.'.join(block.split('.')[-2:])}, {head}"


def _alike(report: Diagnosis) -> set[tuple[str, tuple[int, ...]]]:
    if report.heads is None:
        return set()
    return {(g[0].block, tuple(one.head for one in g)) for g in report.heads.redundant}


def over_training(
    run: Run,
    model: nn.Module,
    batch: Any,
    *,
    steps: Sequence[int] | None = None,
    layers: str | Sequence[str] | None = None,
    targets: Tensor | None = None,
    ablate: bool = False,
) -> OverTraining:
    """`dualform.diagnose(model, batch)` with the weights that a run's model had at some steps.

    >>> from dualform.testing import tiny_attention_run
    >>> run, model, batch = tiny_attention_run()
    >>> over_training(run, model, batch, steps=[0, 6]).findings[0]
    "Differences between tokens after 'layers.1' are ... at step 6; at step 0 they were ..."

    Args:
        model: the recorded one; a copy of it gets the weights.
        steps: of the run. Default: nine, from its start to its end.
        targets: one number a sample: also scores heads by attention paths.
    """
    chosen = _steps(run) if steps is None else tuple(steps)
    if not chosen:
        raise UnknownStepError("steps is empty; give one step or more, or leave it out.")
    copied, reports = copy.deepcopy(model), list[Diagnosis]()
    with together("looking at the model over training", len(chosen)) as progress:
        for step in chosen:
            _load(copied, run, step)
            reports.append(diagnose(copied, batch, layers=layers, targets=targets, ablate=ablate))
            progress.advance(1)
    return OverTraining(chosen, tuple(reports))


def _steps(run: Run) -> tuple[int, ...]:
    """Some steps, evenly spaced, with the first and the last."""
    return tuple(sorted({round(run.steps * at / (SEEN - 1)) for at in range(SEEN)}))


def _load(model: nn.Module, run: Run, step: int) -> None:
    try:
        model.load_state_dict(run.at(step).state_dict(), strict=False)
    except RuntimeError as error:
        first = str(error).partition("\n")[2].partition("\n")[0].strip()
        raise ModelMismatchError(f"this is not the recorded model: {first}") from error
