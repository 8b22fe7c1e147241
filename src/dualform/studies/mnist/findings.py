"""What the numbers say, in sentences that they decide."""

from __future__ import annotations

from collections.abc import Iterator

from dualform.studies.balance import BOUND
from dualform.studies.estimate import Estimate
from dualform.studies.mnist.results import MnistResults
from dualform.studies.mnist.setting import WATCHED
from dualform.studies.mnist.votes import MEASURES, NETWORK, STRONGEST


def findings(results: MnistResults) -> tuple[str, ...]:
    """All of them, in the order of the questions."""
    return (
        *_keys(results),
        *_own(results),
        *_evidence(results),
        *_given(results),
        *_influence(results),
        *_alike(results),
        *_watched(results),
        *_books(results),
    )


def _keys(results: MnistResults) -> Iterator[str]:
    layers = results.layers[:-1]
    right = [results.votes("keys", layer, "right") for layer in layers]
    yield (
        f"Keys only: of right images, the class with the largest total is theirs for "
        f"{_listed(right, layers)}."
    )
    unscaled = results.votes("keys unscaled", layers[0], "right")
    yield (
        f"The score depends on how pixels are scaled: if they went from −1 to 1, it would be "
        f"{unscaled} % in layer {layers[0]}, in place of {right[0]} %."
    )
    own, output = (
        [results.votes("keys", layer, side) for layer in layers]
        for side in ("wrong, its class", "wrong, the output")
    )
    if any(one is None for one in (*own, *output)):
        return
    yield (
        f"Of wrong images, it is their class for {_listed(own, layers)}, and the output for "
        f"{_listed(output, layers)}."
    )


def _own(results: MnistResults) -> Iterator[str]:
    plain, relative = (
        [results.votes(measure, layer, "right") for layer in results.layers]
        for measure in ("own", "own relative")
    )
    yield (
        "Of the exact contributions of each class to its own output, the largest is that of the "
        f"image's class for {_listed(plain, results.layers)} of right images; relative to each "
        f"class's mean, for {_listed(relative, results.layers)}."
    )


def _evidence(results: MnistResults) -> Iterator[str]:
    right, output = (
        [results.votes("evidence", layer, side) for layer in results.layers]
        for side in ("right", "wrong, the output")
    )
    yield (
        "Which output gained most by training through a layer alone, of right images: the right "
        f"one for {_listed(right, results.layers)}."
    )
    if all(one is not None for one in output):
        yield f"Of wrong images: the output that was given for {_listed(output, results.layers)}."


def _given(results: MnistResults) -> Iterator[str]:
    found = [
        one
        for layer in results.layers
        for side in ("right", "wrong, the output")
        if (one := results.votes("given", layer, side)) is not None
    ]
    least = min(found, key=lambda one: one.mean)
    word = "always largest" if least.mean == 100 else f"largest for at least {least} %"
    yield (
        "Of the exact contributions to the output that was given, those of its own class are "
        f"{word}, in every layer and through the network."
    )


def _influence(results: MnistResults) -> Iterator[str]:
    right, own, output = (
        results.votes("own influence", NETWORK, side)
        for side in ("right", "wrong, its class", "wrong, the output")
    )
    if right is not None and own is not None and output is not None:
        yield (
            "Estimated influence of a class on its own output is largest for the image's class for "
            f"{right} % of right images; of wrong ones it is their class for {own} %, and the "
            f"output for {output} %."
        )


def _alike(results: MnistResults) -> Iterator[str]:
    layers = results.layers[:-1]
    keys, exact = (
        [results.alike(measure, layer, "right") for layer in layers]
        for measure in ("keys", "given")
    )
    yield (
        f"Of the {STRONGEST} strongest training images of a right image, by keys only "
        f"{_listed(keys, layers)} have its class, by exact contributions to the output given "
        f"{_listed(exact, layers)}."
    )


def _watched(results: MnistResults) -> Iterator[str]:
    """In which order classes come for the watched class."""
    layers, name = results.layers[:-1], results.classes[WATCHED]
    for measure in ("keys", "keys strongest", "keys unscaled"):
        found = {layer: own for layer in layers if (own := results.places(measure, layer))}
        if not found:
            continue
        orders = (
            f"{', '.join(results.first(own, 3))} (layer {layer})" for layer, own in found.items()
        )
        said = f"For right images of {name}, {MEASURES[measure]}: the first are {'; '.join(orders)}"
        for label in results.looked:
            each = ", ".join(str(own[label]) for own in found.values())
            said += f"; the mean place of {results.classes[label]} is {each}"
        yield f"{said}."


def _books(results: MnistResults) -> Iterator[str]:
    found = {
        name: max(seed["audit"]["books"][name]["remainder"] for seed in results.seeds)
        for name in results.seeds[0]["audit"]["books"]
    }
    over = {name: worst for name, worst in found.items() if worst > BOUND}
    if not over:
        yield f"The books balance to {max(found.values()):.1e} of the change of each parameter."
        return
    rounding = all(
        seed["audit"]["books"][name]["remainder"] <= seed["audit"]["books"][name]["rounding"]
        for seed in results.seeds
        for name in over
    )
    names = ", ".join(f"{name} ({worst:.1e})" for name, worst in over.items())
    yield (
        f"Of {len(over)} of {len(found)} parameters the remainder is above {BOUND:.0e} of their "
        f"change: {names}. "
        + ("Rounding of the stored weights can be all of it." if rounding else "It is no rounding.")
    )


def _listed(found: list[Estimate | None], layers: list[str]) -> str:
    """Percentages of layers: 76 ± 2 % (layer 0), …"""
    return ", ".join(
        f"{one} % ({'whole network' if layer == NETWORK else f'layer {layer}'})"
        for one, layer in zip(found, layers, strict=True)
        if one is not None
    )
