"""What layers are asked about a prompt: their output at its last token, along the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from dualform.ledger.samples import SampleId
from dualform.memory.forms import form_named
from dualform.read import Run
from dualform.read.explain import Explanation, Questions, ask_all
from dualform.read.rerun import Rerun
from dualform.read.spotlight import Reading
from dualform.studies.language.prompts import Prompts


def product_layers(run: Run) -> list[str]:
    """The recorded layers that are matrix products: those whose inputs can be compared.

    >>> from dualform.testing import tiny_run
    >>> product_layers(tiny_run()[0])
    ['0', '2']
    """
    info = run.info
    return [
        stream.name
        for stream in info.layers
        if any(form_named(term.form).is_product for term in info.terms_of(stream.name).values())
    ]


def foretold_logit(output: Tensor, token: Tensor) -> Tensor:
    """(samples,): what is given for a token after the last one.

    >>> foretold_logit(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([0]))
    tensor([3.])
    """
    return output[:, -1].gather(1, token[:, None].to(output.device))[:, 0]


def sensitivities(run: Run, model: nn.Module, prompts: Prompts) -> Mapping[str, Tensor]:
    """(prompts, width) for each layer: how far its output at the last token moves the logit.

    Asked along these directions, a layer answers in units of the logit of what is foretold. The
    gates of an LSTM, which torch hides, are among the layers.
    """
    device = next(model.parameters()).device

    def logit(own: nn.Module, ids: list[SampleId]) -> Tensor:
        at = [int(name) for name in ids]
        return foretold_logit(own(prompts.x[at].to(device)), prompts.foretold[at])[0]

    rerun, known = Rerun(model, logit, run.source.ledger), product_layers(run)
    found: dict[str, list[Tensor]] = {layer: [] for layer in known}
    for at in range(len(prompts)):
        calls = rerun(at, run.source.weights)
        for layer in known:
            (rows,) = calls[layer]
            found[layer].append(rows.values[-1].flatten().double().cpu())
    return {layer: torch.stack(gradients) for layer, gradients in found.items()}


def last_readings(run: Run, model: nn.Module, prompts: Prompts) -> dict[str, Reading]:
    """The reading of each layer at the last token of each prompt, one query a prompt."""
    device = next(model.parameters()).device
    spotlight = run.spotlight(model, prompts.x.to(device))
    length = prompts.x.shape[1]
    last = range(length - 1, length * len(prompts), length)
    return {
        layer: replace(
            spotlight[layer].only(list(last)), directions=along, asked=["foretold"] * len(prompts)
        )
        for layer, along in sensitivities(run, model, prompts).items()
    }


def network_questions(run: Run, model: nn.Module, prompts: Prompts) -> Questions:
    """What the logit of what is foretold asks of all parameters."""
    device = next(model.parameters()).device
    target = (foretold_logit, prompts.foretold)
    (found,) = ask_all(model, prompts.x.to(device), target, run.source)
    return found


def explained(run: Run, model: nn.Module, prompts: Prompts) -> Explanation:
    """The same, with what each sample contributed."""
    device = next(model.parameters()).device
    return run.explain(model, prompts.x.to(device), (foretold_logit, prompts.foretold))
