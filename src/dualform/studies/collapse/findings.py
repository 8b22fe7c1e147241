"""What the numbers say, in sentences that they decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from dualform.studies.collapse.results import (
    FLOOR,
    CollapseResults,
    at,
    distance_factor,
    last_share,
    loss,
    relative_factor,
    size,
    together_factor,
)
from dualform.studies.collapse.setting import MASKS, NORMS, Architecture
from dualform.studies.estimate import differs, estimate

ONE = 1e-6
"""Tokens whose differences are less than this share of their size are called one."""


def findings(results: CollapseResults) -> tuple[str, ...]:
    """All of them, in the order of the questions."""
    return (
        *_attention_alone(results),
        *_bounds(results),
        *_norms(results),
        *_residuals(results),
        *_scale(results),
        *_widths(results),
        *_trained(results),
    )


def _attention_alone(results: CollapseResults) -> Iterator[str]:
    depth = results.setting.depth
    factors = {mask: results.random(Architecture(mask), relative_factor) for mask in MASKS}
    each = ", ".join(f"{mask} {found}" for mask, found in factors.items())
    yield f"Attention alone multiplies μ/‖X‖ by so much a block: {each}."
    ends = {
        mask: fmean(one["relative"][-1] for one in results.each(Architecture(mask)))
        for mask in MASKS
    }
    one, not_one = (
        [mask for mask, end in ends.items() if (end < ONE) == want] for want in (True, False)
    )
    kept = ", ".join(f"{mask} {ends[mask]:.2g}" for mask in not_one)
    yield (
        f"After {depth} blocks of it all tokens are one under {_list(one)}; left of μ/‖X‖ is "
        f"otherwise: {kept or 'nothing'}."
    )


def _bounds(results: CollapseResults) -> Iterator[str]:
    """Whether the bound holds, how far off it is, and how it ranks masks."""
    checked, held = 0, 0
    for mask in MASKS:
        radius = results.graph(mask).radius or 1
        for found in results.each(Architecture(mask)):
            for blocks in range(radius, results.setting.depth + 1, radius):
                allowed = results.bound(mask, found, blocks)
                held += found["together"][blocks - 1] <= allowed + FLOOR
                checked += 1
    yield (
        f"The bound holds in {held:,} of {checked:,} cases (mask, seed, whole radii): the "
        "product of all attention contracts at least as much."
    )
    promised = {m: results.random(Architecture(m), results.promise(m)).mean for m in MASKS}
    real = {m: results.random(Architecture(m), together_factor).mean for m in MASKS}
    wrong = [
        (a, b) for a in MASKS for b in MASKS if promised[a] > promised[b] and real[a] > real[b]
    ]
    pairs = len(MASKS) * (len(MASKS) - 1) // 2
    each = "; ".join(f"{a} ({real[a]:.3g}) before {b} ({real[b]:.3g})" for a, b in wrong)
    each = f": {each}. In brackets is what all attention contracts by, a block" if wrong else ""
    yield f"Of {pairs} pairs of masks the bound ranks {len(wrong)} wrongly{each}."
    blocked = [
        mask
        for mask in MASKS
        if results.random(Architecture(mask), lambda found: min(found["contraction"])).mean > 0.999
    ]
    if blocked:
        yield (
            f"The contraction of single blocks says nothing under {_list(blocked)}: two tokens see "
            "no token in common, so it is 1, and yet the product of all attention contracts."
        )


def _norms(results: CollapseResults) -> Iterator[str]:
    for norm in ("pre", "post"):
        gaps = {
            mask: results.gap(Architecture(mask), Architecture(mask, norm), relative_factor)
            for mask in MASKS
        }
        clear = [f"{mask} {gap}" for mask, gap in gaps.items() if differs(gap)]
        most = max(abs(gap.mean) for gap in gaps.values())
        yield (
            f"Without residuals, {norm}-norm changes the factor a block by at most {most:.2g}"
            f"{'; beyond chance: ' + ', '.join(clear) if clear else ', nowhere beyond chance'}."
        )


def _residuals(results: CollapseResults) -> Iterator[str]:
    depth = results.setting.depth
    for norm in ("pre", "post"):
        ends = {
            mask: results.random(Architecture(mask, norm, residual=True), last_share)
            for mask in MASKS
        }
        each = ", ".join(f"{mask} {end}" for mask, end in ends.items())
        yield f"With residuals and {norm}-norm, log₁₀ μ/‖X‖ is after {depth} blocks: {each}."


def _scale(results: CollapseResults) -> Iterator[str]:
    """Where μ rises and μ/‖X‖ falls."""
    misled = []
    for mask in MASKS:
        one = Architecture(mask, residual=True)
        grown, share = (results.random(one, f) for f in (distance_factor, relative_factor))
        if grown.mean - 1 > grown.interval and 1 - share.mean > share.interval:
            sizes = results.random(one, lambda found: size(found["distance"][-1]))
            misled.append(f"{mask} (log₁₀ μ {sizes}, μ/‖X‖ times {share} a block)")
    if misled:
        yield (
            "With residuals and no norm, μ alone misleads: it grows while tokens become alike "
            f"under {_list(misled)}."
        )


def _widths(results: CollapseResults) -> Iterator[str]:
    widths, sharpnesses = results.setting.widths_qk, results.setting.sharpnesses
    clear, looked = [], 0
    for mask in MASKS:
        for norm, residual in (("none", False), ("pre", True)):
            few, many = (
                Architecture(mask, norm, residual, width) for width in (widths[0], widths[-1])
            )
            gap, looked = results.gap(few, many, relative_factor), looked + 1
            if differs(gap):
                kind = "attention alone" if norm == "none" else "pre-norm with residuals"
                clear.append(f"{mask}, {kind}: {gap}")
    yield (
        f"From d_qk {widths[0]} to {widths[-1]} the factor a block changes beyond chance in "
        f"{len(clear)} of {looked} cases{' (' + '; '.join(clear) + ')' if clear else ''}."
    )
    gaps = {
        mask: results.gap(
            Architecture(mask, "pre", sharpness=sharpnesses[0]),
            Architecture(mask, "pre", sharpness=sharpnesses[-1]),
            relative_factor,
        )
        for mask in MASKS
    }
    each = ", ".join(f"{mask} {gap}" for mask, gap in gaps.items())
    yield (
        f"Scores {sharpnesses[-1] / sharpnesses[0]:g} times as large (pre-norm, no residual) "
        f"change the factor a block by: {each}."
    )


def _trained(results: CollapseResults) -> Iterator[str]:
    usual = Architecture(norm="pre", residual=True)
    changes = {}
    for mask in MASKS:
        pairs = results.trained_found[replace(usual, mask=mask)]
        changes[mask] = estimate(
            one["after"]["relative"][-1] - one["before"]["relative"][-1] for one in pairs
        )
    each = ", ".join(f"{mask} {change}" for mask, change in changes.items())
    yield f"Training changes μ/‖X‖ after the last block (pre-norm, residuals) by: {each}."
    for residual, name in ((True, "with"), (False, "without")):
        kinds = [Architecture(norm=norm, residual=residual) for norm in NORMS]
        each = "; ".join(
            f"{one.norm if one.norm != 'none' else 'no'} norm: loss "
            f"{results.trained(one, at('after', loss))}, log₁₀ μ/‖X‖ "
            f"{results.trained(one, at('after', last_share))}"
            for one in kinds
        )
        yield f"Trained {name} residuals (complete mask): {each}."
    yield _learned(results)


def _learned(results: CollapseResults) -> str:
    """Which trained networks use more than how often characters are."""
    baseline = results.loss_of_frequencies
    losses = {one: results.trained(one, at("after", loss)) for one in results.setting.trained()}
    learned = {a: found for a, found in losses.items() if found.mean + found.interval < baseline}
    each = "; ".join(f"{one.name_in_words}: {found}" for one, found in learned.items())
    return (
        f"How often each character is gives a loss of {baseline:.3f}. Beyond chance below it, so "
        f"that they use other tokens, are {len(learned)} of {len(losses)} trained networks"
        f"{': ' + each if each else ''}."
    )


def _list(words: Sequence[str]) -> str:
    return ", ".join(words) if words else "no mask"
