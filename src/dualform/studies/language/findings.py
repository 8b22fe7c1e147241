"""What the numbers say, in sentences that they decide."""

from __future__ import annotations

from collections.abc import Iterator

from dualform.studies.estimate import Estimate, differs, estimate
from dualform.studies.language.measure import EXACT, KEYS, NETWORK
from dualform.studies.language.results import LanguageResults


def findings(results: LanguageResults) -> tuple[str, ...]:
    """All of them, model by model."""
    return (
        *(sentence for model in results.models for sentence in _of_model(results, model)),
        *(_summaries(results, model) for model in results.compared),
    )


def _of_model(results: LanguageResults, model: str) -> Iterator[str]:
    if layers := results.layers(model):
        yield _same_next(results, model, layers[-1])
        yield _context(results, model, layers[-1])
        yield _in_common(results, model, layers)
        yield _tug_of_war(results, model)
    yield _network(results, model)
    yield _itself(results, model)


def _same_next(results: LanguageResults, model: str, last: str) -> str:
    keys, exact = (
        results.found(model, f"{how} {last}", "test", "summed", "same next")
        for how in (KEYS, EXACT)
    )
    chance = results.mean(model, "chance", "test", "same next", scale=100)
    return (
        f"{model}: of the first ten training positions in the output layer, what is foretold after "
        f"a test prompt follows {keys} % by keys only and {exact} % exactly; it follows {chance} % "
        "of all positions."
    )


def _context(results: LanguageResults, model: str, last: str) -> str:
    keys, exact = (
        results.found(model, f"{how} {last}", "test", "summed", "shared") for how in (KEYS, EXACT)
    )
    gap = estimate(
        _shared(one, f"{KEYS} {last}") - _shared(one, f"{EXACT} {last}")
        for one in results.models[model]
    )
    word = "as much context, as far as can be told:"
    if differs(gap):
        word = "more context:" if gap.mean > 0 else "less context:"
    return (
        f"{model}: in the output layer, positions that are found by keys only share {word} {keys} "
        f"tokens with a test prompt, against {exact} of those that contribute most."
    )


def _shared(
    found: dict[str, dict[str, dict[str, dict[str, dict[str, float]]]]], name: str
) -> float:
    return found["measures"][name]["test"]["summed"]["shared"]


def _in_common(results: LanguageResults, model: str, layers: list[str]) -> str:
    shares = {layer: results.mean(model, "common", layer, "test", scale=100) for layer in layers}
    best = max(shares, key=lambda layer: shares[layer].mean)
    return (
        f"{model}: keys only and exact contributions have at most {shares[best]} % of their first "
        f"ten positions in common (layer {best}, test prompts)."
    )


def _tug_of_war(results: LanguageResults, model: str) -> str:
    own, others, logit = (
        results.mean(model, "account", NETWORK, part)
        for part in ("followed by it", "others", "output")
    )
    return (
        f"{model}: through the whole network, training positions that are followed by the foretold "
        f"token add {own} to its logit, all others add {others}; the logit is {logit}."
    )


def _network(results: LanguageResults, model: str) -> str:
    def read(what: str) -> Estimate:
        return results.found(model, f"{EXACT} {NETWORK}", "test", "summed", what)

    chance = results.mean(model, "chance", "test", "shared, same next")
    word = "which random positions with the same next token share as well"
    if differs(read("shared"), chance.mean):
        word = f"against {chance} of random positions with the same next token"
    return (
        f"{model}: through the whole network, the foretold token follows {read('same next')} % of "
        f"the first ten positions of test prompts; they share {read('shared')} tokens of context, "
        f"{word}."
    )


def _itself(results: LanguageResults, model: str) -> str:
    asked = {f"{EXACT} {NETWORK}": "through the whole network"}
    if layers := results.layers(model):
        asked = {f"{EXACT} {layers[-1]}": "in the output layer"} | asked
    parts = []
    for measure, where in asked.items():
        own = [one["measures"][measure]["itself"] for one in results.models[model]]
        count = sum(int(one["of"]) for one in own)
        found = round(sum(one["among the first"] * one["of"] for one in own))
        parts.append(f"{found} of {count} {where}")
    return (
        f"{model}: training prompts that were foretold right have their own position among the "
        f"first ten of exact contributions as follows: {', '.join(parts)}."
    )


def _summaries(results: LanguageResults, model: str) -> str:
    share, windows, positions = (
        results.mean(model, "summaries", *path, scale=scale)
        for path, scale in ((("attributed", "all"), 100), (("windows",), 1), (("positions",), 100))
    )
    sizes = estimate(one["summaries"]["bytes"] / one["bytes"] for one in results.models[model])
    return (
        f"{model}: summaries take {100 * sizes.mean:.2g} % of the bytes of all rows and attribute "
        f"{share} % of the change to samples. What windows contribute correlates by {windows} with "
        f"what their rows do; visits that are run again have {positions} % of the first ten "
        "positions."
    )
