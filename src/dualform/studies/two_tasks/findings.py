"""What the numbers say, in sentences that they decide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dualform.studies.estimate import Estimate, differs, estimate
from dualform.studies.two_tasks.attention import NETWORK
from dualform.studies.two_tasks.measure import FORGOTTEN, KEPT
from dualform.studies.two_tasks.overwriting import CULPRITS
from dualform.studies.two_tasks.results import TwoTasksResults, attended, digits_part, garments_part
from dualform.studies.two_tasks.tasks import OUTPUTS


def findings(results: TwoTasksResults) -> tuple[str, ...]:
    """All of them, in the order of the questions."""
    return (
        *_forgetting(results),
        *_telling_apart(results),
        *_signed(results),
        *_after_the_switch(results),
        *_overwriting(results),
        *_last_layer(results),
        *_margins(results),
        *_momentum(results),
    )


def _forgetting(results: TwoTasksResults) -> Iterator[str]:
    (_, _), (_, at_switch), *later = results.reads.items()
    before = estimate((r["accuracy"]["digits"] for r in at_switch), 100)
    after = [estimate((r["accuracy"]["digits"] for r in reads), 100) for _, reads in later]
    steps = (end - results.setting.switch for end in results.setting.ends)
    each = ", ".join(f"{a} % after {n:,} steps" for a, n in zip(after, steps, strict=True))
    yield (
        f"At the switch {before} % of the test digits are right; on garments this falls to {each}."
    )


def _telling_apart(results: TwoTasksResults) -> Iterator[str]:
    """By how many points of 100 digits' share differs between test digits and test garments."""
    for measure, title in (("keys", "keys only"), ("sizes", "exact contributions")):
        gaps = {
            layer: estimate(
                (
                    attended(one["attention"][layer][measure], "digits", "digits")
                    - attended(one["attention"][layer][measure], "digits", "garments")
                    for one in results.together
                ),
                100,
            )
            for layer in results.layers
        }
        least, *_, best = sorted(gaps, key=lambda layer: gaps[layer].mean)
        told = all(differs(gap) and gap.mean > 0 for gap in gaps.values())
        yield (
            f"Trained together, {title} {'tell' if told else 'do not tell'} the tasks apart in "
            f"{'every layer' if told else 'all layers'}: the share of digits is larger for test "
            f"digits than for test garments by {gaps[best]} points of 100 in layer {best}, and by "
            f"{gaps[least]} in layer {least}."
        )


def _signed(results: TwoTasksResults) -> Iterator[str]:
    found = [one["attention"][NETWORK]["signed"] for one in results.together]
    for task, other in (("digits", "garments"), ("garments", "digits")):
        own, cross = (estimate(attended(f, side, task) for f in found) for side in (task, other))
        unsure = "" if differs(cross) else ", which may be nothing"
        yield (
            f"Trained together, with signs and through the whole network, {task} add {own} to the "
            f"outputs of test {task} for their class, and {other} add {cross}{unsure}."
        )


def _after_the_switch(results: TwoTasksResults) -> Iterator[str]:
    setting, last = results.setting, results.layers[-1]
    end = max(setting.ends)
    visits = 100 * setting.switch / end
    for measure, layer, title in (
        ("keys", last, f"keys only, layer {last}"),
        ("sizes", NETWORK, "exact, whole network"),
    ):
        share = results.shares(measure, layer, "digits")[-1]
        word = "about as much as"
        if differs(share, visits):
            word = "more than" if share.mean > visits else "less than"
        yield (
            f"At step {end:,} digits had {visits:.0f} % of all visits; test digits give them "
            f"{share} % of their attention ({title}), {word} that."
        )
    found = [one["reads"][str(end)]["attention"][NETWORK]["signed"] for one in results.sequences]
    helped = estimate(attended(f, "digits", "garments") for f in found)
    if differs(helped):
        word = "support" if helped.mean > 0 else "speak against"
        yield (
            f"At step {end:,} the digits of the first phase {word} the outputs of test garments "
            f"for their class, by {helped} in all."
        )


def _overwriting(results: TwoTasksResults) -> Iterator[str]:
    built, *_ = results.stages(digits_part)
    _, *taken = results.stages(garments_part)
    ends = results.setting.ends
    each = ", ".join(f"{t} until step {e:,}" for t, e in zip(taken, ends, strict=True))
    yield (
        f"Through the whole network, digits built up {built} of the output of test digits for "
        f"their class; garments then changed it by {each}."
    )
    first = results.layers[0]
    shares = [
        estimate(
            (
                one["stage"]["layers"][first] / (one["stage"]["after"] - one["stage"]["before"])
                for one in results.ends(end)
            ),
            100,
        )
        for end in ends
    ]
    each = ", ".join(f"{s} % until step {e:,}" for s, e in zip(shares, ends, strict=True))
    yield f"Of the change after the switch, layer {first} has {each}."


def _last_layer(results: TwoTasksResults) -> Iterator[str]:
    last, end = results.layers[-1], max(results.setting.ends)
    changes: dict[str, Estimate] = {}
    for name, part in (("digits", _of_digits), ("garments", _of_garments), ("output", _of_output)):
        changes[name] = estimate(
            part(one["reads"][str(end)]["attention"][last])
            - part(one["reads"][str(results.setting.switch)]["attention"][last])
            for one in results.sequences
        )
    direct = abs(changes["garments"].mean) >= abs(changes["output"].mean) / 2
    yield (
        f"Asked alone at step {end:,}, layer {last} shows "
        f"{'much' if direct else 'little'} of it: of the change of its output by "
        f"{changes['output']}, rows of garments have {changes['garments']}, and "
        f"{changes['digits']} is that rows of digits count otherwise for what the layer gets now."
    )


def _of_digits(found: dict[str, Any]) -> float:
    return attended(found["signed"], "digits", "digits")


def _of_garments(found: dict[str, Any]) -> float:
    return attended(found["signed"], "garments", "digits")


def _of_output(found: dict[str, Any]) -> float:
    return float(np.mean(found["total"][:OUTPUTS]))


def _margins(results: TwoTasksResults) -> Iterator[str]:
    end = max(results.setting.ends)
    for name in (FORGOTTEN, KEPT):
        own = [one[name] for one in results.ends(end) if one[name]["of"]]
        if not own:
            yield f"At step {end:,} no digit that was right at the switch was {name}."
            continue
        change = estimate(one["after"] - one["before"] for one in own)
        parts = [estimate(one["culprits"][part] for one in own) for part in CULPRITS[:3]]
        strongest = estimate((one["rival is strongest"] for one in own), 100)
        yield (
            f"Digits that are {name} at step {end:,}: their margins changed by {change}. Garments "
            f"with the rival's output have {parts[0]} of it, garments with the digit's own output "
            f"{parts[1]}, other garments {parts[2]}. For {strongest} % of these digits, the "
            "garments with the rival's output take most."
        )
    yield from _balance(results, end)


def _balance(results: TwoTasksResults, end: int) -> Iterator[str]:
    """Whether it is the balance of both pulls that tells forgotten digits from kept ones."""
    both = [
        [sum(one[name]["culprits"][part] for part in CULPRITS[:2]) for name in (FORGOTTEN, KEPT)]
        for one in results.ends(end)
        if one[FORGOTTEN]["of"] and one[KEPT]["of"]
    ]
    gap = estimate(kept - lost for lost, kept in both)
    if differs(gap) and gap.mean > 0:
        lost, kept = (estimate(side) for side in zip(*both, strict=True))
        yield (
            "The balance of both pulls tells forgotten digits from kept ones: garments with the "
            f"digit's own output and with its rival's add {lost} together where it was forgotten, "
            f"and {kept} where it was kept; with the same seed the difference is {gap}."
        )


def _momentum(results: TwoTasksResults) -> Iterator[str]:
    _, *carried = results.stages(digits_part)
    if differs(carried[-1]):
        yield (
            "After the switch momentum still carries gradients of digits into the weights: they "
            f"add {carried[-1]} to the output of test digits for their class."
        )
