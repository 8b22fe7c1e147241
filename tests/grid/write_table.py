"""Runs the whole grid and writes docs/grid.md: `python -m tests.grid.write_table`."""

from __future__ import annotations

import platform
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path

import torch
from tests.grid.cases import CASES
from tests.grid.grid import Cell, run_cell, tolerance, whole_grid
from tests.grid.optimizers import OPTIMIZERS

OUTPUT = Path(__file__).parents[2] / "docs" / "grid.md"
COMMAND = "python -m tests.grid.write_table"
OTHER_SEEDS = (0, 2, 3)
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
Cells = Mapping[tuple[str, str], Cell]

PAGE = """# The grid

Every case of a layer × every optimizer. Each cell is a small model trained for six steps of two
micro-batches, recorded and unrecorded. The numbers are the largest relative remainder of its books,
`‖W_T − books‖ / ‖W_T − initial part‖`, in float32; one above 1e-6 would be **bold**.

{tables}

**step**: all parameters are kept by step, which is exact, but tells no samples apart. A raised
number: these of them are, or changed by no more than rounding, and why.

{notes}

In all {count} cells, in float32 and in float64, recorded training is {identical}. The largest
remainder in float64 is {double}, without Muon.

The problems are posed so that weights move steadily, because the remainder is relative to their
change. Other seeds of them ({seeds}) in float32: {others}

**Muon** takes matrices only. torch runs its Newton–Schulz iteration in bfloat16; the matrix of a
step is the one nearest to the exact one that gives torch's own step. What bfloat16 adds outside the
span of the momentum is no matrix times gradients, and is left: {muon};
in the other seeds up to {muon_others}, where a momentum lacks rank and rounding fills it.
With exact matrices it was 5e-3 to 4e-2. Allowed are 1e-2 in float32 and 5e-2 in float64, whose
problems are others.

**Shampoo** and **SOAP** divide each direction of a gradient by what was seen of it. Where that is
only rounding (errors of a softmax, or before a layer normalization, add up to zero), ε decides what
becomes of it. In the table ε is 40 and 0.03, large enough for these gradients. With the package's
own, 1e-6 and 1e-8, the same cells leave up to 2e-2 (Shampoo, lr 0.1) and 4e-2 (SOAP) in float32,
8e-11 and 6e-10 in float64; of "Linear, tokens" the package finds no roots then, and breaks off.

## Under bfloat16 autocast

Rows are what the kernels saw. What they round on the way to the gradient is left as the remainder,
which may be 1e-2. The largest over all optimizers:

{half}

Recurrent layers are computed again, without autocast, to see their time steps; the gradients of
their kernels are not the sum of those, and the parameters are kept by step. So are parameters that
a weight is computed from, except by a spectral norm: the weight's gradient is rounded before it
goes on to them. Rprop and Lion follow
the sign of a gradient, and rounding it to or across zero counts as a whole step: they are replayed
from the sums of rows as the kernel rounded them, and leave at most {signs}. Above 1e-2: {over}.

Written on {today} with torch {torch} on {machine} by `{command}`;
`make test-long` checks the cells.
"""

SEEDS = """{over} of {count} cells are above 1e-6, the
largest {largest}. In {rounded} of them a parameter changed little for its size: the remainder is no
more than rounding of the stored weights alone can be, a unit in the last place for each step, which
an audit gives beside it (`rounding`). The others have gradients that nearly cancel, and what
float32 rounds of those is magnified by small divisors: {beyond}."""


def cells(dtype: torch.dtype, autocast: torch.dtype | None = None, seed: int = 1) -> Cells:
    """The whole grid in one precision."""
    found = {}
    for case, optimizer in whole_grid():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            found[case, optimizer] = run_cell(case, optimizer, dtype, path, autocast, seed)
    return found


class Notes:
    """Footnotes, numbered as they come up: a reason, and the parameters it is given for."""

    def __init__(self) -> None:
        self._books: dict[str, list[str]] = {}

    def marks(self, reasons: Mapping[str, str]) -> str:
        """The numbers of the reasons that a cell gives, raised."""
        for book, reason in reasons.items():
            known = self._books.setdefault(reason, [])
            known += [] if book in known else [book]
        order = list(self._books)
        return "\u2009".join(sorted({raised(order.index(r) + 1) for r in reasons.values()}))

    def lines(self) -> str:
        """All notes."""
        return "\n".join(
            f"- {raised(number)} {', '.join(f'`{book}`' for book in books)}: {reason}."
            for number, (reason, books) in enumerate(self._books.items(), start=1)
        )


def raised(number: int) -> str:
    """¹ for 1."""
    return str(number).translate(SUPERSCRIPTS)


def table(found: Cells, optimizers: Iterable[str], notes: Notes) -> str:
    """Cases × some of the optimizers."""
    names = list(optimizers)
    rows = [["", *names]]
    for case in CASES:
        entries = [found.get((case, name)) for name in names]
        pairs = zip(names, entries, strict=True)
        rows.append([case, *("–" if c is None else entry(name, c, notes) for name, c in pairs)])
    return markdown(rows)


def entry(optimizer: str, cell: Cell, notes: Notes) -> str:
    """The remainder, or "step", with footnotes; bold where it is too large."""
    shown = "step" if cell.coverage == 0 else short(cell.remainder)
    if not cell.remainder <= tolerance(optimizer, torch.float32):
        shown = f"**{short(cell.remainder)}**"
    return shown + notes.marks(cell.reasons)


def short(number: float) -> str:
    """2e-7 rather than 2e-07."""
    return f"{number:.0e}".replace("e-0", "e-") if number else "0"


def markdown(rows: list[list[str]]) -> str:
    """A table whose numbers stand to the right."""
    rule = ["---", *["--:"] * (len(rows[0]) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]])


def half_table(half: Cells) -> str:
    """For each case its largest remainder, in three columns."""
    worst = dict.fromkeys(CASES, 0.0)
    for (case, _), cell in half.items():
        worst[case] = max(worst[case], cell.remainder)
    by_step = {case for (case, _), cell in half.items() if cell.coverage == 0}
    pairs = [[case, "step" if case in by_step else short(w)] for case, w in worst.items()]
    pairs += [["", ""]] * (-len(pairs) % 3)
    third = len(pairs) // 3
    lines = zip(pairs[:third], pairs[third : 2 * third], pairs[2 * third :], strict=True)
    return markdown([["", "remainder"] * 3, *([*a, *b, *c] for a, b, c in lines)])


def too_large(half: Cells) -> str:
    """The cells under autocast whose remainder is over 1e-2."""
    found = [
        f"{case} with {optimizer} ({short(cell.remainder)})"
        for (case, optimizer), cell in half.items()
        if cell.remainder > 1e-2
    ]
    return ", ".join(found) or "none"


def other_seeds(found: list[Cells]) -> str:
    """How many cells have a remainder that is too large, how large, and what it may be."""
    cells = {
        (seed, *key): cell
        for seed, single in zip(OTHER_SEEDS, found, strict=True)
        for key, cell in single.items()
        if key[1] != "Muon"
    }
    over = {key: cell for key, cell in cells.items() if cell.remainder > 1e-6}
    beyond = {f"{case} with {name}": None for (_, case, name), c in over.items() if not c.rounding}
    return SEEDS.format(
        over=len(over),
        count=len(cells),
        largest=short(max((cell.remainder for cell in over.values()), default=0)),
        rounded=sum(cell.rounding for cell in over.values()),
        beyond=", ".join(beyond) or "none",
    )


def worst(found: Iterable[Cells], optimizers: tuple[str, ...]) -> float:
    """The largest remainder that some optimizers leave."""
    return max(c.remainder for f in found for (_, name), c in f.items() if name in optimizers)


def spread(single: Cells) -> str:
    """From the smallest to the largest remainder that Muon leaves by row."""
    rows = [c.remainder for (_, name), c in single.items() if name == "Muon" and c.coverage]
    return f"{short(min(rows))} to {short(max(rows))}"


def page(single: Cells, double: Cells, half: Cells, again: list[Cells]) -> str:
    """The document."""
    notes, names = Notes(), list(OPTIMIZERS)
    middle = len(names) // 2
    tables = [table(single, part, notes) for part in (names[:middle], names[middle:])]
    different = [key for found in (single, double) for key in found if not found[key].identical]
    muon = [f"{spread(f)} in {n}" for f, n in ((single, "float32"), (double, "float64"))]
    others = [cell.remainder for (_, name), cell in double.items() if name != "Muon"]
    return PAGE.format(
        tables="\n\n".join(tables),
        notes=notes.lines(),
        count=len(single),
        identical=f"not bit-identical in {different}" if different else "bit-identical",
        double=short(max(others)),
        muon=", ".join(muon),
        muon_others=short(worst(again, ("Muon",))),
        signs=short(worst([half], ("Rprop", "Lion"))),
        seeds=", ".join(map(str, OTHER_SEEDS)),
        others=other_seeds(again),
        half=half_table(half),
        over=too_large(half),
        today=date.today().isoformat(),
        command=COMMAND,
        torch=torch.__version__,
        machine=platform.machine(),
    )


def main() -> None:
    """Everything, on one core."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "LSTM with projections", UserWarning)
    again = [cells(torch.float32, seed=seed) for seed in OTHER_SEEDS]
    half = cells(torch.float32, torch.bfloat16)
    text = page(cells(torch.float32), cells(torch.float64), half, again)
    OUTPUT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
