"""What the numbers say, in sentences that they decide."""

from __future__ import annotations

from collections.abc import Iterator

from dualform.studies.comparison import clear_differences
from dualform.studies.estimate import Estimate, differs, estimate
from dualform.studies.hypernetwork.results import (
    SCORE,
    HypernetworkResults,
    TaskResults,
    answer_shares,
)

HYLA = "HYLA"


def findings(results: HypernetworkResults) -> tuple[str, ...]:
    """All of them, in the order of the questions."""
    return (
        *(sentence for task in results.tasks for sentence in _generalizing(task)),
        *(sentence for task in results.tasks for sentence in _ablations(task)),
        *(sentence for task in results.tasks for sentence in _codes(task)),
        *_ambiguity(results),
    )


def _generalizing(task: TaskResults) -> Iterator[str]:
    for part in task.parts:
        scores = task.scores(part)
        best = max(task.trained, key=lambda layer: scores.reached(layer).mean)
        of_hyla = f"; HYLA {scores.reached(HYLA)}" if best != HYLA and HYLA in task.trained else ""
        kind = "fresh problems of known rules" if part == "test" else f"held-out {part}"
        yield (
            f"On {kind} ({task.name}, {SCORE[task.name]}) {best} is best with "
            f"{scores.reached(best)}{of_hyla}."
        )
    held_out = [task.scores(part) for part in task.parts[1:]]
    yield f"{task.name}, held-out parts: {clear_differences(held_out)}"


def _ablations(task: TaskResults) -> Iterator[str]:
    """HYLA against linear attention, and against what is left of it without each of its parts."""
    others = [layer for layer in task.trained if layer not in (HYLA, "softmax")]
    if HYLA not in task.trained or not others:
        return
    found = []
    for layer in others:
        gaps = {part: _gap(task, part, layer) for part in task.parts}
        found += [f"{layer} on {part} {gap}" for part, gap in gaps.items() if differs(gap)]
    counted = len(others) * len(task.parts)
    each = f": {'; '.join(found)}" if found else ""
    yield (
        f"Differences to HYLA ({task.name}: linear attention and ablations, all parts) have a 95 % "
        f"interval without 0 in {len(found)} of {counted} cases{each}."
    )


def _gap(task: TaskResults, part: str, layer: str) -> Estimate:
    """By how much a layer is better than HYLA, seed by seed."""
    values = task.scores(part).values
    pairs = zip(values[layer], values[HYLA], strict=True)
    return estimate(round(one - other, 9) for one, other in pairs)


def _codes(task: TaskResults) -> Iterator[str]:
    before, after, chance = task.told("untrained"), task.told(), task.chance()
    each = []
    for layer in task.trained:
        gained = estimate(
            one - other
            for one, other in zip(after.values[layer], before.values[layer], strict=True)
        )
        clear = "" if differs(gained) else ", which may be nothing"
        word = "up" if gained.mean >= 0 else "down"
        each.append(
            f"{layer} {after.reached(layer)} ({word} {abs(gained.mean):.1f} by training{clear})"
        )
    yield (
        f"A probe tells rules from latent codes ({task.name}, %): {'; '.join(each)}. Without codes "
        f"it tells {chance:.1f}."
    )


def _ambiguity(results: HypernetworkResults) -> Iterator[str]:
    answers = results.answers["features"]
    each = ", ".join(f"{n}: {100 - answer_shares(counts)[0]:.1f}" for n, counts in answers.items())
    yield f"Several answers agree with so many puzzles (raven, %), by their features: {each}."
    rules = results.answers["rules"]
    least, most = (choose(rules, key=lambda name: rules[name]) for choose in (min, max))
    yield (
        f"Where it is known which features belong together, it is {rules[least]:.1%} of the rows "
        f"({least}) to {rules[most]:.1%} ({most})."
    )
