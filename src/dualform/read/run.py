"""A recorded run, opened for questions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.text import Text
from torch import Tensor, nn

from dualform.errors import ReadingError, UnknownSampleError, UnknownStepError
from dualform.ledger import Ledger, Samples, run_path
from dualform.ledger.format import RunInfo
from dualform.ledger.samples import SampleId, plain_list
from dualform.read.audit import Audit, make_audit
from dualform.read.coefficients import Accounting, mean_shares
from dualform.read.contributions import Source
from dualform.read.display import Displayed, columns, framed, moment
from dualform.read.engine import Engine, device_named, engine_of
from dualform.read.explain import TOLERANCE, Explanation, make_explanation
from dualform.read.influence import Influence, Influencer
from dualform.read.queries import Outputs, ask, check_model, last_seen
from dualform.read.removal import Removal, make_removal
from dualform.read.rerun import Loss
from dualform.read.sample_names import SampleNames
from dualform.read.scores import Scores
from dualform.read.spotlight import Spotlight, nothing_by_row, unknown_layer
from dualform.read.suspicion import make_suspicion
from dualform.read.targets import Target
from dualform.read.timeline import Bins, Timeline
from dualform.read.weights import reconstruct, row_parts, weights_near
from dualform.read.zoom import VisitSteps, Zoom, make_zoom

NOTHING_YET = "none committed yet: recorder.checkpoint() commits what is recorded so far"


def open_run(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    damaged: bool = False,
    engine: Engine | str | None = None,
) -> Run:
    """Opens a run folder for reading, as far as it is committed.

    >>> import dualform
    >>> dualform.open("no/run")
    Traceback (most recent call last):
    dualform.errors.NotARunError: 'no/run' is not a dualform run: there is nothing at that path.

    Args:
        device: where rows are multiplied: "cpu", or a GPU such as "cuda".
        damaged: open a damaged run too, as far as it can be read; `check` says what is wrong.
        engine: who reads: "threads" of this process, "ray", or as `dualform.engine` makes it.
    """
    return Run(Ledger(run_path(path), damaged=damaged), device=device, engine=engine_of(engine))


class Run(Displayed):
    """A recorded run as of a step: audit it, read predictions from it, subtract samples.

    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> run.audit().remainder < 1e-6
    True
    >>> run.spotlight(model, x[:1])["2"].top(3).ids
    [..., ..., ...]
    """

    def __init__(
        self,
        ledger: Ledger,
        step: int | None = None,
        device: torch.device | str = "cpu",
        shares: Sequence[float] = (),
        engine: Engine | None = None,
    ) -> None:
        self._ledger, self._device, self._shares = ledger, device_named(device), shares
        self._engine = engine or engine_of(None)
        self.steps = ledger.last_step if step is None else step
        """The step the run is read at; without `at`, the last one committed."""

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._ledger.path

    @property
    def info(self) -> RunInfo:
        """Streams, books, optimizer and metadata, as recorded."""
        return self._ledger.info

    @property
    def layers(self) -> list[str]:
        """The layers whose rows were recorded, in the order of the model."""
        return [stream.name for stream in self.info.layers]

    @property
    def kept_steps(self) -> list[int]:
        """The steps whose weights were kept; 0 is the start."""
        return [step for step in self._ledger.kept_steps if step <= self.steps]

    @cached_property
    def samples(self) -> Samples:
        """Labels and previews, as far as they were described."""
        return Samples(self.path)

    @property
    def ids(self) -> list[SampleId]:
        """The ids of all samples that left rows."""
        return list(self._names.ids)

    @cached_property
    def bins(self) -> Bins:
        """Training in parts: epochs, as a rule."""
        return Bins.of(self._accounting.reader, self.steps)

    @property
    def nbytes(self) -> int:
        """Bytes of everything committed."""
        return self._ledger.nbytes

    def at(self, step: int) -> Run:
        """The same run read as of an earlier step."""
        if not 0 <= step <= self._ledger.last_step:
            raise UnknownStepError(
                f"step {step} is not in this run; it has steps 0 to {self._ledger.last_step}."
            )
        return Run(self._ledger, step, self._device, engine=self._engine)

    def average(self, steps: Sequence[int], decay: float | None = None) -> Run:
        """The same run, read for a mean of its weights: what EMA and SWA evaluate.

        >>> from dualform.testing import tiny_run
        >>> run, _, _ = tiny_run()
        >>> swa = run.average(steps=[4, 5, 6]).state_dict()
        >>> parts = [run.at(step).state_dict()["0.weight"] for step in (4, 5, 6)]
        >>> bool((swa["0.weight"] - sum(parts) / 3).abs().max() < 1e-6)
        True

        Args:
            steps: the steps after which the mean was updated, in order.
            decay: of an exponential mean, which begins as the first of them (as in torch's
                `get_ema_multi_avg_fn`); without, all count the same.
        """
        last = max(steps, default=0)
        ordered = bool(steps) and list(steps) == sorted(set(steps))
        if not ordered or not 0 <= steps[0] <= last <= self.steps:
            raise UnknownStepError(
                f"cannot average over steps {list(steps)[:5]}: give steps from 0 to {self.steps}, "
                "in order, each once."
            )
        return Run(self._ledger, last, self._device, mean_shares(steps, decay), self._engine)

    def audit(self) -> Audit:
        """Adds every book up and compares it with the weights that were kept."""
        if self._shares:
            raise ReadingError("a mean of weights was never kept; audit the run it was made from.")
        return make_audit(self._ledger, self.steps, self._device, self._engine)

    def check(self) -> list[str]:
        """Reads every committed byte; returns what is wrong, in words."""
        return [problem for _, problem in self._ledger.check()]

    def spotlight(self, model: nn.Module, x: Any, output: Outputs = None) -> Spotlight:
        """Each layer's output for `x`, as exact signed contributions of the training rows.

        The model is run in evaluation mode, and left as it was.

        Args:
            x: what the model is called with: a tensor, a tuple of arguments, or a mapping of
                keyword arguments.
            output: the unit that is asked about: one for all queries, one for each query (each
                token is one), or a direction for each; by default the unit with most output.
        """
        check_model(model, self._weights, self._ledger, self.steps)
        asked = ask(model, x, self._ledger, self._weights)
        return Spotlight(asked, output, self.source)

    def explain(
        self, model: nn.Module, x: Any, target: Target = None, tolerance: float = TOLERANCE
    ) -> Explanation:
        """The whole network's output as exact contributions of the training samples: an account.

        The parts add up to the output of the trained model. They say what training did, not what
        it would have done without a sample; `influence` estimates that.

        Args:
            x: the queries, one for each element of the batch: a tensor, a tuple of arguments or a
                mapping of keyword arguments.
            target: the number that is asked about. A class for all queries, or one for each (by
                default the class with most output); a function of one query's output, whose batch
                has one element; or a pair of a loss and labels, called as `loss(output, label)`.
            tolerance: how much of the output's change the integration may miss.
        """
        check_model(model, self._weights, self._ledger, self.steps)
        return make_explanation(model, x, target, self.source, tolerance)

    def influence(
        self,
        model: nn.Module,
        x: Any,
        target: Target = None,
        method: str = "ridge",
        damping: float | None = None,
        rank: int | None = None,
    ) -> Influence:
        """Estimates how much the target would fall if each sample were left out of training.

        It answers "what if", where `explain` answers "what was": a sample that others could have
        stood in for has a large account and little influence.

        Args:
            x, target: as in `explain`.
            method: "ridge", the samples' contributions solved against each other. For comparison
                from the same ledger: "accounting" (not solved), "tracin" (learning rates only)
                and "fisher" (influence functions from each sample's last gradient).
            damping: λ, in units of the mean diagonal of what is inverted; 3 for "ridge".
            rank: how many leading directions are kept of the contributions to each line of a
                parameter. All of them up to 4,096 parameters or samples, 512 beyond that.
        """
        check_model(model, self._weights, self._ledger, self.steps)
        return self._influencer(model, x, target, method, damping, rank)

    def zoom(
        self,
        ids: Sequence[SampleId],
        model: nn.Module,
        loss: Loss,
        steps: VisitSteps | None = None,
        layers: Sequence[str] | None = None,
    ) -> Zoom:
        """The rows of a few samples (tokens, patches, time steps), by running their visits again.

        Each is run on a copy of the model, with the weights that its step saw; with summaries,
        between those that were kept around it. The result says how near, and how well rows agree.

        Args:
            model: the trained model, in the mode (`train` or `eval`) in which the samples are run.
            loss: called as `loss(model, [id])`, it runs that model on the sample as training did,
                and returns the sample's loss. A factor, such as 1 / batch size, is found.
            steps, layers: by default all visits (at most 100) and layers; steps may be by id.
        """
        who = (self._numbers(ids), plain_list(ids))
        return make_zoom(self.source, self._weights_near, *who, model, loss, steps, layers)

    def _weights_near(self, step: int) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Weights after a step, or as near to it as they are known; and after which steps."""
        if any(map(self._ledger.is_summarized, self.info.books)):
            return weights_near(self._ledger, step)
        return (step,), self.at(step)._weights

    def suspicion(self, layer: str | None = None) -> Scores:
        """`mean ‖e‖` over a sample's rows: how large the errors were that came back to a layer.

        A network learns what samples have in common before it learns the exceptions by heart, so
        that the errors of a wrong label are large in most visits, even if the last ones are small.
        Sizes are relative to the mean over steps with as many rows: a short batch weighs like the
        others.

        >>> from dualform.testing import tiny_run
        >>> run, _, _ = tiny_run()
        >>> run.suspicion().top(2).ids
        [3, 0]

        Args:
            layer: by default the last one, whose errors are those of the model's output.
        """
        self._numbers([])  # refuses a run without samples
        if layer is not None and layer not in self.layers:
            raise unknown_layer(layer, self.layers)
        return make_suspicion(self.source, layer or self.layers[-1])

    def revisit(self, ids: Sequence[SampleId], output: Outputs = None) -> Spotlight:
        """Like `spotlight`, for training samples as each layer last saw them; needs no model."""
        numbers, reader = self._numbers(ids), self._accounting.reader
        found = last_seen(reader, numbers, plain_list(ids), self._weights, self.steps)
        return Spotlight(found, output, self.source)

    def timeline(
        self,
        model: nn.Module,
        x: Any,
        layer: str | None = None,
        output: Outputs = None,
        by: str = "step",
    ) -> Timeline:
        """When a layer's output (by default the last one's) was learned, by "step" or "epoch"."""
        spotlight = self.spotlight(model, x, output)
        return (spotlight.last if layer is None else spotlight[layer]).timeline(by)

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters after this step: as kept, or else as the books add up to them.

        Buffers, such as the statistics of BatchNorm, are not booked: they are those of the last
        step up to here whose weights were kept.
        """
        return self._state_dict(dict(self._weights))

    def subtract(self, ids: Sequence[SampleId]) -> dict[str, Tensor]:
        """A state dict without these samples' contributions.

        It takes away what their rows added; it does not say what training without them would
        have led to. The result is a model of its own, which this run cannot be asked about.
        """
        numbers = self._numbers(ids)
        parts = row_parts(self._accounting, self.info.books, numbers)
        weights = dict(self._weights)
        for name, part in parts.items():
            weights[name] = (weights[name].double() - part).to(weights[name].dtype)
        return self._state_dict(weights)

    def without(
        self, ids: Sequence[SampleId], model: nn.Module, x: Any, target: Target = None
    ) -> Removal:
        """Predictions without these samples: an account of them, and an estimate of retraining.

        The account takes away what the samples added. That is not what training without them would
        have led to, since others would have done part of the same; the estimate is about that.

        Args:
            x, target: as in `explain`.
        """
        self._numbers(ids)  # refuses samples that are not in this run
        explanation = self.explain(model, x, target)
        return make_removal(plain_list(ids), explanation, self.influence(model, x, target))

    def __rich__(self) -> Group:
        table = columns(("fact", "value"), words=("fact", "value"))
        table.show_header = False
        facts = self.info.metadata
        lines = {
            "steps": f"{self.steps:,}" if self._ledger.last_step else NOTHING_YET,
            "samples": f"{len(self._names.ids):,}{', each seen once' if self._seen_once else ''}",
            "layers by row": ", ".join(self.layers) or "none",
            "optimizer": str(facts.get("optimizer", "")),
            "recorded": f"{moment(facts.get('created', ''))}, {self.nbytes / 1e6:,.1f} MB",
        }
        for name, line in lines.items():
            table.add_row(name, Text(line))
        return framed(f"run {self.path}", table)

    @property
    def _seen_once(self) -> bool:
        """Whether no sample came twice: so it looks where a loop of epochs did not name them."""
        visits = self._ledger.column("batches")
        return len(visits) > 0 and int(visits[:, 1].sum()) == len(self._names.ids)

    @cached_property
    def _accounting(self) -> Accounting:
        return Accounting(self._ledger, self.steps, self._device, self._shares, self._engine)

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        """Parameters and buffers after this step; what was not kept is added up."""
        kept = max(self.kept_steps)
        weights = self._ledger.weights(kept)
        if kept != self.steps or self._shares:
            books = reconstruct(self._accounting)
            weights.update({name: book.to(weights[name].dtype) for name, book in books.items()})
        return weights

    def _state_dict(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        aliases = self.info.metadata.get("aliases", {})
        return weights | {alias: weights[name] for alias, name in aliases.items()}

    @cached_property
    def _names(self) -> SampleNames:
        return SampleNames.of(self._ledger)

    def sample_id(self, text: str) -> SampleId:
        """The id that a text stands for: an integer, where this run's ids are integers.

        >>> from dualform.testing import tiny_run
        >>> run, _, _ = tiny_run()
        >>> run.sample_id("7")
        7
        """
        return self._names.parse(text)

    def _numbers(self, ids: Sequence[SampleId]) -> Tensor:
        if not self._names.ids and not isinstance(ids, str | int):
            raise UnknownSampleError(f"this run knows no samples: {nothing_by_row(self._ledger)}.")
        return self._names.numbers_of(ids)

    @cached_property
    def _influencer(self) -> Influencer:
        return Influencer(self.source)

    @cached_property
    def source(self) -> Source:
        """What readings come from: rows, coefficients, weights, and what samples are called."""
        where = (self._ledger, self._accounting, self.steps, self._weights)
        who = (self._names.numbers, self._names.ids, self.samples.labels)
        return Source(*where, *who, self._device)
