"""Reads do not depend on how many ranks recorded: a run, dealt out to two, gives the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.ledger import Ledger, LedgerWriter, SampleTable, Shard, ShardBlock
from dualform.ledger.codecs import CODECS
from dualform.ledger.ids import encode_ids
from dualform.recording.recorder import Recorder

RANKS = 2


def record(path: Path, codec: str) -> tuple[nn.Module, Tensor]:
    """Ten steps of six samples of three tokens, in four shards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.randint(9, (12, 3))
    with Recorder(model, optimizer, path, keep=CODECS[codec].policy, strict=True) as recorder:
        for step in range(10):
            own = [(6 * step + at + step // 3) % 12 for at in range(6)]
            recorder.samples([f"sample {at}" for at in own])
            (model(x[own]) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                recorder.checkpoint()
    return model, x


def deal(source: Path, path: Path) -> None:
    """Writes the same run by two ranks: each has every other sample of each batch.

    Rank 0 has the shards of the source; rank 1 has one that is as long as all of them.
    """
    ledger = Ledger(source)
    start = {"buffers": ledger.starts[0]["buffers"]}
    kept = {step: ledger.kept(step) for step in ledger.kept_steps}
    first = kept[0].read_all(kept[0].arrays)
    zero = LedgerWriter.create(path, ledger.info, first, start=start, of=RANKS)
    for rank, writer in enumerate([zero, LedgerWriter.join(path, 1)]):
        table = SampleTable()
        for shard in ledger.shards:
            arrays = {name: [array] for name, array in dealt(ledger, shard, rank, table).items()}
            writer.append(ShardBlock(shard.first, shard.last, arrays, streams=list(shard.declared)))
            if rank == 0:
                writer.flush()
                if (file := kept.get(shard.last)) is not None:
                    writer.weights(shard.last, file.read_all(file.arrays), "checkpoint")
        writer.close()


def dealt(ledger: Ledger, shard: Shard, rank: int, table: SampleTable) -> dict[str, Tensor]:
    """A rank's part of a shard."""
    arrays = {name: shard.file.read(name) for name in shard.file.arrays if name != "ids"}
    sizes = dict(arrays["batches"].tolist())
    names, at, mine = ledger.ids.strings or [], 0, list[str]()
    for size in sizes.values():
        mine += [names[n] for n in arrays["samples"][at : at + size][rank::RANKS].tolist()]
        at += size
    for stream in shard.codecs:
        segments = arrays[f"{stream}/segments"].tolist()
        rows, at = list[int](), 0
        for _, batch, each in segments:
            for sample in range(sizes[batch]):
                rows += range(at, at + each) if sample % RANKS == rank else ()
                at += each
        for side in ("keys", "values"):
            arrays[f"{stream}/{side}"] = arrays[f"{stream}/{side}"][rows]
    counts = [(n, len(range(size)[rank::RANKS])) for n, size in sizes.items()]
    arrays |= {"batches": torch.tensor(counts), "samples": table.numbers(mine)}
    arrays |= {n: a * (0.25, 0.75)[rank] for n, a in arrays.items() if n.endswith("/residuals")}
    new = table.take_new()
    return arrays | ({"ids": encode_ids(new)} if new else {})


Read = Callable[[dualform.Run, nn.Module, Tensor], Any]


def by_id(scores: Any) -> dict[Any, np.ndarray]:
    return dict(zip(scores.ids, scores.values, strict=True))


def corner(output: Tensor) -> Tensor:
    """One number of what the model gives for one query."""
    return output[0, -1, 1]


READS: dict[str, Read] = {
    "audit": lambda run, model, x: {b.name: np.array(b.rows) for b in run.audit().books},
    "residual": lambda run, model, x: {b.name: np.array(b.residual) for b in run.audit().books},
    "ids": lambda run, model, x: {name: np.array(1) for name in run.ids},
    "between": lambda run, model, x: run.at(5).state_dict(),
    "subtract": lambda run, model, x: run.subtract(["sample 3"]),
    "spotlight": lambda run, model, x: by_id(run.spotlight(model, x[:2])["3"].samples()),
    "explain": lambda run, model, x: by_id(run.explain(model, x[:2], target=corner)),
    "influence": lambda run, model, x: by_id(run.influence(model, x[:2], target=corner)),
    "timeline": lambda run, model, x: {
        by: run.spotlight(model, x[:2])["3"].timeline(by).values for by in ("step", "epoch")
    },
    "revisit": lambda run, model, x: {
        layer: reading.check.total for layer, reading in run.revisit(["sample 3"]).items()
    },
}


@pytest.fixture(scope="module", params=["exact", "bfloat16"])
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dualform.Run], nn.Module, Tensor]:
    folder = tmp_path_factory.mktemp("ranks")
    model, x = record(folder / "one", request.param)
    deal(folder / "one", folder / "two")
    return [dualform.open(folder / name) for name in ("one", "two")], model, x


def test_the_run_is_dealt_out(runs: tuple[list[dualform.Run], nn.Module, Tensor]) -> None:
    one, two = (run.source.ledger for run in runs[0])
    assert (one.last_step, two.last_step) == (10, 10)
    assert [(s.rank, s.first, s.last) for s in two.shards if s.rank] == [(1, 1, 10)]
    assert len(two.shards) == len(one.shards) + 1 == 5
    assert list(two.check()) == []
    assert runs[0][1].audit().remainder < 3e-6


@pytest.mark.parametrize("read", READS)
def test_two_ranks_give_what_one_gives(
    read: str, runs: tuple[list[dualform.Run], nn.Module, Tensor]
) -> None:
    one, two = (READS[read](run, *runs[1:]) for run in runs[0])
    assert one.keys() == two.keys()
    for name, expected in one.items():
        np.testing.assert_allclose(two[name], expected, rtol=1e-5, atol=1e-7, err_msg=str(name))
