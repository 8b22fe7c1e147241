"""Runs the whole grid and writes docs/grid.md: `python -m tests.laws.write_table`."""

from __future__ import annotations

import platform
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path

import torch
from tests.cases.layers import CASES
from tests.cases.optimizers import OPTIMIZERS
from tests.laws.grid import Cell, run_cell, tolerance, whole_grid

OUTPUT = Path(__file__).parents[2] / "docs" / "grid.md"
COMMAND = "python -m tests.laws.write_table"
OTHER_SEEDS = (0, 2, 3)
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
Cells = Mapping[tuple[str, str], Cell]

PAGE = """# The grid

The grid trains every case of a layer with every optimizer. Each cell is a small model. It is
trained for six steps of two micro-batches, once recorded and once unrecorded. The number in a
cell is the largest relative remainder of the model's books, `‖W_T − books‖ / ‖W_T − initial
part‖`, in float32. A number above 1e-6 would be **bold**.

{tables}

**step** means that all parameters are kept by step. That is exact, but it does not tell samples
apart. A raised number points to the parameters that are kept by step, or that changed by no more
than rounding:

{notes}

Recorded training is {identical} in all {count} cells, in float32 and in float64. The largest
remainder in float64 is {double}, without Muon.

**Other seeds.** A remainder is relative to the change of the weights, so the problems are chosen
such that weights move steadily. With other seeds ({seeds}), in float32, {others}

**Muon** takes matrices only. torch runs its Newton–Schulz iteration in bfloat16. dualform
describes a step by the matrix that is nearest to the exact one and gives torch's own step. Some
of what bfloat16 adds is not a matrix times gradients, and it stays in the remainder: {muon}.
With the other seeds it is up to {muon_others}, because there some momenta lack rank and rounding
fills it. The tests allow 1e-2 in float32 and 5e-2 in float64 (the problems in float64 are other
ones).

**Shampoo** and **SOAP** divide each direction of a gradient by the size of what they saw along
it. Some directions see only rounding: the errors of a softmax add up to zero, and so do errors
before a layer normalization. There ε decides on the step. The table uses ε = 40 and ε = 0.03,
which are large for these gradients. With the package's defaults, 1e-6 and 1e-8, the same cells
leave up to 2e-2 (Shampoo, lr 0.1) and 4e-2 (SOAP) in float32, and 8e-11 and 6e-10 in float64.
With its default, Shampoo finds no roots for "Linear, tokens", and stops.

## Under bfloat16 autocast

The ledger holds the rows that the kernels saw. The kernels round gradients to 16 bits, and that
rounding stays in the remainder, which may then be 1e-2. The largest remainder over all
optimizers is:

{half}

- **Recurrent layers** are computed again without autocast, because their kernels do not show
  single time steps. The kernels' gradients are not the sum of these time steps, so the
  parameters are kept by step.
- **Computed weights** (orthogonal weights, pruning) are kept by step too: the kernel rounds the
  weight's gradient before autograd hands it to the parameters. A spectral norm is by row.
- **Rprop and Lion** use only the sign of a gradient, and a rounding across zero changes a whole
  step. dualform rounds the sums of rows as the kernel did, and leaves at most {signs}.

Above 1e-2: {over}.

Written on {today} with torch {torch} on {machine} by `{command}`. `make test-long` checks the
cells.
"""

SEEDS = """{over} of {count} cells are above 1e-6. The largest is {largest}. In {rounded} of
these cells a parameter changed little for its size, and rounding of the stored weights alone
explains the remainder: one unit in the last place for each step. (An audit prints this bound as
`rounding`.) In the other cells gradients nearly cancel, and small divisors magnify what float32
rounds: {beyond}."""


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
