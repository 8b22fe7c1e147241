"""What the numbers say, in sentences that they decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dualform.studies.controls.left_out import PLAIN, SCALED
from dualform.studies.controls.measure import RANDOM, TRUE, UNTRAINED
from dualform.studies.controls.reads import INPUT_SPACE, NEAREST
from dualform.studies.controls.removal import CHANCE, CLASS
from dualform.studies.controls.results import ASKED, COLUMNS, SELF, ControlsResults
from dualform.studies.estimate import Estimate, differs, estimate

BY_CLASS = "random labels, by true class"


def findings(results: ControlsResults) -> tuple[str, ...]:
    """All of them, in the order of the questions."""
    return (
        *_learned(results),
        *_against_untrained(results),
        *_against_input_space(results),
        *_random_labels(results),
        *_what_is_asked(results),
        *_plain_formula(results),
        *_retraining(results),
        *_without_the_first(results),
    )


def listed(words: Sequence[str]) -> str:
    """Words as a list in a sentence; those that have commas are divided by semicolons.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(["a, b", "c"])
    ('a', 'a, b and c', 'a, b; and c')
    """
    *some, last = words
    if any("," in word for word in words):
        return "; ".join([*some, f"and {last}" if some else last])
    return f"{', '.join(some)} and {last}" if some else last


def span(values: Sequence[float], digits: int = 0) -> str:
    """From the least of some values to the largest.

    >>> span([0.2, 0.1]), span([0.2, 0.1], 1)
    ('0', '0.1 to 0.2')
    """
    least, largest = (f"{one:.{digits}f}" for one in (min(values), max(values)))
    return least if least == largest else f"{least} to {largest}"


def _compared(gap: Estimate) -> str:
    if not differs(gap):
        return "no difference that these networks show"
    return "more" if gap.mean > 0 else "fewer"


def _learned(results: ControlsResults) -> Iterator[str]:
    fit, test = (
        estimate((one["accuracy"][part] for one in results.networks[RANDOM]), 100)
        for part in ("training", "test")
    )
    usual = results.rate(TRUE, SELF, "target")
    yield (
        f"With true labels the network has {usual} % of the test digits right that are asked "
        f"about. With random labels it learns {fit} % of them, and has {test} % of all test "
        "digits right."
    )


def _difference(results: ControlsResults, read: str, one: str, other: str) -> Estimate:
    """By how much more often a read's answer is the target in one column than in another."""
    first, second = (
        [
            found[COLUMNS[column][1]][read]["target"]
            for found in results.networks[COLUMNS[column][0]]
        ]
        for column in (one, other)
    )
    return estimate((a - b for a, b in zip(first, second, strict=True)), 100)


def _against_untrained(results: ControlsResults) -> Iterator[str]:
    """Whether training makes keys tell more of classes than they do before the first step."""
    for layer in results.layers:
        read = f"keys only, layer {layer}"
        gap = _difference(results, read, TRUE, UNTRAINED)
        trained, before = (results.rate(which, read, "target") for which in (TRUE, UNTRAINED))
        yield (
            f"Keys only, layer {layer}: the right class has the largest total for {trained} % of "
            f"test digits after training, and for {before} % before the first step: "
            f"{_compared(gap)}."
        )


def _against_input_space(results: ControlsResults) -> Iterator[str]:
    keys = [read for read in results.reads if read.startswith("keys only")]
    rates = {read: _certain(results.rate(TRUE, read, "target")) for read in keys}
    best = max(rates, key=lambda read: rates[read].mean)
    space, summed = (
        _certain(results.rate(TRUE, read, "target")) for read in (NEAREST, INPUT_SPACE)
    )
    own = _certain(results.rate(TRUE, SELF, "target"))
    word = "about as many as"
    if differs(rates[best], space.mean):
        word = "more than" if rates[best].mean > space.mean else "fewer than"
    yield (
        f"The {NEAREST} have {space} % right without any network, and sums of |x·q| there "
        f"{summed} %. The best sums of keys ({best}) have {rates[best]} %: "
        f"{word} the nearest pictures have. The network itself has {own} %."
    )


def _certain(found: Estimate | None) -> Estimate:
    assert found is not None
    return found


def _random_labels(results: ControlsResults) -> Iterator[str]:
    """What keys tell of classes that the network was never shown, and of labels that it was."""
    hidden = [f"keys only, layer {layer}" for layer in results.layers[1:]]
    said = [
        f"{results.rate(BY_CLASS, read, 'target')} % in {read} (against the untrained network: "
        f"{_compared(_difference(results, read, BY_CLASS, UNTRAINED))})"
        for read in hidden
    ]
    yield (
        "In the network that learned random labels, summed by true classes that it never saw, "
        f"keys have the right class first for {listed(said)}."
    )
    learned = [results.rate("random labels, by label", read, "output") for read in hidden]
    yield (
        "Summed by the labels that it learned, they name the network's answer for "
        f"{listed([f'{one} %' for one in learned])}."
    )


def _what_is_asked(results: ControlsResults) -> Iterator[str]:
    for column, labels in ASKED.items():
        own = {read: _certain(results.rate(labels, read, "output")) for read in results.exact_reads}
        other = {read: results.asked(column, read, "asked for") for read in results.exact_reads}
        means = [[one.mean for one in found.values()] for found in (own, other)]
        last = results.exact_reads[-1]
        yield (
            f"{column.capitalize()}: asked about the network's answer, exact reads have that "
            f"answer first for {span(means[0])} % of test digits; asked about another class, they "
            f"have that other class first for {span(means[1])} % ({last}: {own[last]} and "
            f"{other[last]}). "
            + (
                "So the class with the largest total mostly repeats the question."
                if min(means[1]) > 50
                else "So it is not only the question that decides."
            )
        )


def _plain_formula(results: ControlsResults) -> Iterator[str]:
    for variant, words in (
        (PLAIN, "The formula of plain SGD, −η for every row,"),
        (SCALED, "Divided by 1 − μ, it"),
        ("momentum only", "Without clipping only, it"),
        ("clipping only", "Without momentum only, it"),
    ):
        errors = [results.error(variant, layer).mean for layer in results.layers]
        ranks = [results.agreement(variant, layer, "ranks").mean for layer in results.layers]
        yield (
            f"{words} misses the weights by {span(errors)} % of their change; ranked by it, "
            f"training images correlate with the exact order by ρ = {span(ranks, 3)}."
        )


def _retraining(results: ControlsResults) -> Iterator[str]:
    own = {name: found[0] for name, found in results.lds.items()}
    order = sorted(own, key=lambda name: -own[name].mean)
    said = [
        f"{name} {own[name].mean:.2f} ({own[name].interval[0]:.2f} to {own[name].interval[1]:.2f})"
        for name in order
    ]
    yield f"LDS, the rank correlation with retraining on halves: {listed(said)}."
    nothing = [name for name in order if own[name].interval[0] <= 0 <= own[name].interval[1]]
    if nothing:
        yield f"Of these, {listed(nothing)} may foretell nothing: their intervals hold 0."
    best, *rest = order
    below = [name for name in rest if own[name].interval[1] < own[best].interval[0]]
    if below:
        yield f"The interval of {best} is above those of {listed(below)}."
    signed = "cosine, sign of the label"
    better = [name for name in order if own[name].interval[0] > own[signed].interval[1]]
    above = f"above its interval is {listed(better)}" if better else "no interval is above its own"
    yield f"Cosine in input space with the sign of the label needs no training at all; {above}."


def _without_the_first(results: ControlsResults) -> Iterator[str]:
    for count in results.setting.removed:
        falls = {name: results.falls(name, count) for name in results.removers}
        reads = [name for name in falls if name not in (CHANCE, CLASS)]
        order = sorted(reads, key=lambda name: -falls[name].mean())
        best = order[0]
        chance, same = estimate(falls[CHANCE]), estimate(falls[CLASS])
        beyond = [
            name
            for name in order
            if differs(gap := estimate(falls[name] - falls[CLASS])) and gap.mean > 0
        ]
        flips = estimate(results.flips(best, count), 100)
        yield (
            f"Without the {count} images that it ranks first, margins fall most by {best}: by "
            f"{estimate(falls[best])}, and {flips} % of right answers turn wrong. {count} at "
            f"random take {chance}, {count} at random of its class {same}. "
            + (
                f"More than the latter take those of {listed(beyond)}."
                if beyond
                else "No read takes more than the latter, as far as these digits can tell."
            )
        )
