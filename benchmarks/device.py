"""What CI cannot check: every layer of the grid on an accelerator, exact and bit-identical.

`python -m benchmarks.device --device cuda` prints one line a case and optimizer. `--cases lstm gru`
takes those with such names.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path

import torch
from tests.cases.case import Case, cast
from tests.cases.layers import CASES
from torch import Tensor, nn

import dualform

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def problem(case: Case, dtype: torch.dtype, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A case's model, inputs and targets on the device."""
    torch.manual_seed(0)
    model, x = case.make().to(dtype), cast(case.inputs(0), dtype).to(device)
    model = model.to(device)
    with torch.no_grad():
        return model, x, torch.randn_like(model(x)) * 3


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Six steps on four samples each."""
    torch.manual_seed(1)
    for number in range(6):
        part = slice(4 * (number % 2), 4 * (number % 2) + 4)
        ((model(x[part]) - y[part]).square().sum() / 8).backward()
        optimizer.step()
        optimizer.zero_grad()


def cell(case: Case, name: str, dtype: torch.dtype, device: str) -> str:
    """Trains with and without recording; the remainder, and what was kept by step."""
    model, x, y = problem(case, dtype, device)
    twin = copy.deepcopy(model)
    steps(twin, OPTIMIZERS[name](twin.parameters()), x, y)
    path = Path(tempfile.mkdtemp()) / "run"
    optimizer = OPTIMIZERS[name](model.parameters())
    with dualform.record(model, optimizer, path):
        steps(model, optimizer, x, y)
    audit = dualform.open(path, device=device).audit()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    kept = {book.reason for book in audit.books if book.granularity == "step"}
    marks = [] if same else ["NOT BIT-IDENTICAL"]
    return f"{audit.remainder:.0e} {audit.coverage:.0%} {' '.join([*marks, *kept])}"


def main() -> None:
    """All cases, in float64 and float32."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of their names")
    options = parser.parse_args()
    device = options.device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    for title, case in CASES.items():
        if not any(name.lower() in title.lower() for name in options.cases):
            continue
        for dtype in (torch.float64, torch.float32):
            for name in OPTIMIZERS:
                try:
                    line = cell(case, name, dtype, device)
                except Exception as error:
                    line = f"{type(error).__name__}: {error}"
                print(f"{title:28} {str(dtype)[6:]:8} {name:13} {line}", flush=True)


if __name__ == "__main__":
    main()
