"""Tables with sparse gradients are recorded as those with dense ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.told import told
from torch import Tensor, nn

import dualform

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3),
}


class Words(nn.Module):
    def __init__(self, words: int, width: int, sparse: bool, bags: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = nn.EmbeddingBag if bags else nn.Embedding
        self.table = kind(words, width, sparse=sparse, padding_idx=0)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).flatten(1)


def train(
    model: Words, optimizer: torch.optim.Optimizer, path: Path | None, **options: Any
) -> None:
    torch.manual_seed(1)
    recording = (
        nullcontext() if path is None else dualform.record(model, optimizer, path, **options)
    )
    with recording as recorder:
        for number in range(6):
            x = torch.randint(0, model.table.num_embeddings, (4, 3))
            if recorder is not None:
                recorder.samples(range(number, number + 4))
            (model(x) - torch.rand(4, 1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("words", "width"), [(50, 8), (300, 3), (20, 1)])
@pytest.mark.parametrize("bags", [False, True])
def test_sparse_gradients_leave_the_rows_of_dense_ones(
    name: str, words: int, width: int, bags: bool, tmp_path: Path
) -> None:
    """Samples are worth the same, by row; training is what it is without a recorder."""
    worth = {}
    for sparse in (False, True):
        path = tmp_path / f"{sparse}"
        model, twin = (Words(words, width, sparse, bags) for _ in range(2))
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, optimizer, path, strict=True)
        train(twin, OPTIMIZERS[name](twin.parameters()), None)
        assert torch.equal(model.table.weight, twin.table.weight)
        train(model, optimizer, path, strict=True, resume=True)  # momentum may be sparse by now
        run = dualform.open(path)
        audit = run.audit()
        assert audit.coverage == 1.0
        assert audit.remainder <= 1e-10
        worth[sparse] = run.subtract([3])["table.weight"]
    assert torch.allclose(worth[True], worth[False], rtol=0, atol=1e-12)


def test_sparse_adam_is_kept_by_step(tmp_path: Path) -> None:
    model = Words(50, 8, sparse=True)
    adam = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    with told(tmp_path / "run"):
        train(model, adam, tmp_path / "run", strict=True)
    (book,) = dualform.open(tmp_path / "run").audit().books
    assert book.reason == "SparseAdam has no rule yet"
    assert book.granularity == "step"
