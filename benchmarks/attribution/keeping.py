"""What is left of LDS when a run keeps less: `python -m benchmarks.attribution.keeping`.

Every task is trained and recorded once for each policy. Its queries are asked of that run, and the
scores are held against the ground truth (`python -m benchmarks.attribution.truth`). Scores and what
a run took stay in `--runs`: called again, only what is missing is trained. Printed are tables; the
same goes to `--json`, and the curves to `--picture`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import dualform
from benchmarks.attribution import truth
from benchmarks.attribution.tasks import TASKS, Task
from benchmarks.attribution.trained import SEED
from dualform.evaluate import GroundTruth, lds
from dualform.evaluate.ranks import Ranks, correlation
from dualform.ledger.reader import Ledger
from dualform.memory.forms import form_named
from dualform.recording.keep import Keep, summaries

EXACT = "rows"
POLICIES: dict[str, Keep] = {
    EXACT: "rows",
    "half": "half",
    "int8": "int8",
    "summaries": "summaries",
    **{
        f"{outputs} × {inputs}{said}": summaries(outputs, inputs, offsets=offsets)
        for outputs, inputs in ((32, 256), (16, 128), (8, 64))
        for offsets, said in (
            ("sums", ""),
            ("steps", ", offsets by step"),
            ("summaries", ", offsets along errors"),
        )
    },
    "16 × 128, head 512 × 16": {"head": summaries(512, 16), "*": summaries(16, 128)},
    "convolutions 8 × 64, others 16 × 128, offsets by step": {
        "[0-3]": summaries(8, 64, offsets="steps"),
        "*": summaries(16, 128, offsets="steps"),
    },
    "convolutions 8 × 48, others 16 × 128, offsets by step": {
        "[0-3]": summaries(8, 48, offsets="steps"),
        "*": summaries(16, 128, offsets="steps"),
    },
}
ONLY = {
    "16 × 128, head 512 × 16": ("text",),
    "convolutions 8 × 64, others 16 × 128, offsets by step": ("cnn", "cnn-adamw"),
    "convolutions 8 × 48, others 16 × 128, offsets by step": ("cnn", "cnn-adamw"),
}
"""Policies that name layers are for the tasks that have them."""
PARTS = ("entries", "offsets", "bases", "residuals", "changes", "divisors", "accounts", "weights")
"""What a run consists of, beside small columns and logs: `rest`."""
SUFFIXES = {
    "outputs": "bases",
    "inputs": "bases",
    **{part: part for part in ("residuals", "changes", "divisors", "accounts")},
}
RESAMPLES = 1000
HEADER = "| keep | LDS | 95 % | of exact | 95 % | bytes | of exact | seconds: training, influence |"


@dataclass(frozen=True)
class Taken:
    """What one run took."""

    bytes: dict[str, int]
    """By part."""
    training: float
    """Seconds, with the recording."""
    influence: float
    """Seconds of all queries together."""

    @property
    def total(self) -> int:
        """Bytes of the run."""
        return sum(self.bytes.values())


def recorded(task: Task, keep: Keep, path: Path) -> tuple[NDArray[np.float64], Taken]:
    """Trains, records and asks: scores (samples, queries) in the order of the samples."""
    shutil.rmtree(path, ignore_errors=True)
    began = time.perf_counter()
    model = task.train(range(len(task.samples()[0])), SEED, path, keep=keep)
    trained = time.perf_counter()

    def output(out: Tensor, label: Tensor) -> Tensor:
        return task.output(out, label).sum()

    x, y = task.queries()
    found = dualform.open(path).influence(model, x, (output, y))
    taken = Taken(bytes_by_part(path), trained - began, time.perf_counter() - trained)
    shutil.rmtree(path)
    return found.values[np.argsort(np.array(found.ids))], taken


def bytes_by_part(path: Path) -> dict[str, int]:
    """Where the bytes of a run are."""
    ledger = Ledger(path)
    forms = {
        stream.name: {
            term.form
            for book in ledger.info.books
            for name, term in book.terms.items()
            if name == stream.name
        }
        for stream in ledger.info.streams
    }
    found = dict.fromkeys(PARTS, 0)
    for shard in ledger.shards:
        for name, place in shard.file.arrays.items():
            owner, _, kind = name.rpartition("/")
            part = SUFFIXES.get(kind)
            if part is None and owner in forms:
                wide = any(form_named(form).has_width for form in forms[owner])
                part = "entries" if wide else "offsets"
            if part is not None:
                found[part] += place.nbytes
    whole = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    found["weights"] = ledger.nbytes - sum(int(s.record["bytes"]) for s in ledger.shards)
    return {**found, "rest": whole - sum(found.values())}


def measured(task: Task, policy: str, runs: Path) -> tuple[NDArray[np.float64], Taken]:
    """The scores under a policy, from `runs` if they are there."""
    folder = runs / "keeping" / task.name / policy.replace(" ", "")
    scores, taken = folder / "scores.npy", folder / "taken.json"
    if not taken.exists():
        folder.mkdir(parents=True, exist_ok=True)
        found, spent = recorded(task, POLICIES[policy], folder / "run")
        np.save(scores, found.astype(np.float32))
        taken.write_text(json.dumps(asdict(spent)), encoding="utf-8")
        print(f"{task.name}, {policy}: {spent.total / 1e6:,.1f} MB", flush=True)
    return np.load(scores).astype(np.float64), Taken(**json.loads(taken.read_text()))


def share_of_exact(
    scores: NDArray[np.float64], exact: NDArray[np.float64], known: GroundTruth
) -> tuple[float, tuple[float, float]]:
    """LDS relative to that of exact scores, and its interval of 95 %.

    The same subsets and queries are drawn for both, as `lds` draws them.
    """
    measured = Ranks(known.outputs)
    foretold = [Ranks(known.members @ values) for values in (scores, exact)]
    subsets, queries = known.outputs.shape

    def ratio(counts: NDArray[np.float64], asked: NDArray[np.float64]) -> float:
        own, other = (
            correlation(ranks.counting(counts), measured.counting(counts), counts) @ asked
            for ranks in foretold
        )
        return float(own / other)

    def drawn(count: int) -> NDArray[np.float64]:
        chosen = chance.integers(count, size=count)
        return np.bincount(chosen, minlength=count).astype(np.float64)

    chance = np.random.default_rng(0)
    mean = ratio(np.ones(subsets), np.ones(queries))
    resampled = [ratio(drawn(subsets), drawn(queries)) for _ in range(RESAMPLES)]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return mean, (float(2 * mean - high), float(2 * mean - low))


def lines(task: Task, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is known of each policy of a task."""
    chosen = [policy for policy in options.policies if task.name in ONLY.get(policy, TASKS)]
    found = {policy: measured(task, policy, options.runs) for policy in chosen}
    if not (options.truth / task.name / "report" / "truth.npz").exists():
        print(f"{task.name}: no ground truth in {options.truth}, so no LDS")
        return []
    known = truth.load(task.name, "report", options.truth, task.asked)
    exact, whole = found[EXACT]
    rows = []
    for policy, (scores, taken) in found.items():
        quality = lds(scores, known)
        share, interval = share_of_exact(scores, exact, known)
        rows.append(
            {
                "task": task.name,
                "keep": policy,
                "lds": quality.mean,
                "lds_interval": quality.interval,
                "of_exact": share,
                "of_exact_interval": interval,
                "bytes_of_exact": taken.total / whole.total,
                "total": taken.total,
                **asdict(taken),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of one task for people."""
    text = [f"\n{rows[0]['task']}\n", HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    for row in rows:
        (low, high), (least, most) = row["lds_interval"], row["of_exact_interval"]
        text.append(
            f"| {row['keep']} | {row['lds']:.3f} | {low:.3f} to {high:.3f} | {row['of_exact']:.1%} "
            f"| {least:.1%} to {most:.1%} | {row['total'] / 1e6:,.1f} MB "
            f"| {row['bytes_of_exact']:.1%} | {row['training']:.1f}, {row['influence']:.1f} |"
        )
    parts = [*PARTS, "rest"]
    text += ["", "MB: | " + " | ".join(parts) + " |", "|" + "---|" * (len(parts) + 1)]
    for row in rows:
        cells = (f"{row['bytes'][part] / 1e6:,.1f}" for part in parts)
        text.append(f"| {row['keep']} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def draw(results: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """The curves: LDS kept against bytes kept, for each task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.4), layout="constrained")
    markers = dict(zip(POLICIES, "osD^vPX<>pdhHs8*", strict=True))
    for color, (task, rows) in enumerate(results.items()):
        ordered = sorted(rows, key=lambda row: -row["bytes_of_exact"])
        x, y = ([row[key] for row in ordered] for key in ("bytes_of_exact", "of_exact"))
        axes.plot(x, y, color=f"C{color}", lw=1, alpha=0.6, label=task)
        for row, at, height in zip(ordered, x, y, strict=True):
            axes.plot(at, height, markers[row["keep"]], color=f"C{color}", ms=7)
    for policy in dict.fromkeys(row["keep"] for rows in results.values() for row in rows):
        axes.plot([], [], markers[policy], color="gray", label=policy)
    axes.set(xscale="log", xlabel="bytes of the run / bytes with all rows")
    axes.set_ylabel("LDS / LDS with all rows")
    axes.axhline(1, color="gray", lw=0.8, ls=":")
    axes.plot([0.03, 0.05, 0.05], [0.97, 0.97, 1], color="gray", lw=0.8)  # the aim: above, and left
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--truth", type=Path, default=Path("truth"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if EXACT not in options.policies:
        parser.error(f"--policies without {EXACT!r}, to which all others are compared")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {name: lines(TASKS[name], options) for name in options.tasks}
    results = {name: rows for name, rows in results.items() if rows}
    for rows in results.values():
        print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if options.picture and results:
        draw(results, options.picture)


if __name__ == "__main__":
    main()
