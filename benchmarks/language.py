"""A language model at real size, end to end: trained, recorded, and asked where a sentence is from.

`python -m benchmarks.language --data DIR` trains GPT-2-small from a random start on the characters
of Tiny Shakespeare (DIR/text/tinyshakespeare.txt), in windows of 1,024, records it as summaries,
lets it write a sentence, and prints the training windows that the sentence owes most to; with the
time and the bytes of each part.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch
from tests.cases.architectures import gpt2
from torch import Tensor, nn

import dualform

WORDS = 50257


def windows(data: Path, length: int) -> Tensor:
    """(windows, length): the text's bytes, one token each."""
    text = (data / "text" / "tinyshakespeare.txt").read_bytes()
    count = len(text) // length
    return torch.tensor(list(text[: count * length])).reshape(count, length)


def sync() -> float:
    """Now, when the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def train(given: argparse.Namespace, text: Tensor, path: Path | None) -> tuple[nn.Module, float]:
    """Trains a model; recorded at a path, if there is one. With the seconds of all steps."""
    torch.manual_seed(0)
    heads = max(1, given.width // 64)
    model = gpt2(WORDS, given.length, given.width, given.layers, heads, 0.02).to(given.device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=given.device == "cuda")
    order = torch.Generator().manual_seed(0)
    queue: list[int] = []

    def step(recorder: dualform.Recorder | None) -> Tensor:
        while len(queue) < given.batch:
            queue.extend(torch.randperm(len(text), generator=order).tolist())
        ids = [queue.pop() for _ in range(given.batch)]
        if recorder is not None:
            recorder.samples(ids)
        x = text[ids].to(given.device)
        with torch.autocast(given.device, torch.bfloat16):
            loss: Tensor = model(x, labels=x, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    began = sync()
    if path is None:
        losses = [step(None) for _ in range(given.steps)]
    else:
        keep = dualform.summaries(offsets="steps")
        with dualform.record(model, optimizer, path, keep=keep) as recorder:
            losses = [step(recorder) for _ in range(given.steps)]
        assert recorder.failure is None, recorder.failure
    seconds = sync() - began
    print(f"{'plain' if path is None else 'recorded'}: {given.steps} steps in {seconds:.1f} s, "
          f"loss {losses[0]:.2f} to {losses[-1]:.2f}", flush=True)  # fmt: skip
    return model, seconds


def write(model: nn.Module, prompt: bytes, length: int) -> Tensor:
    """(1, words): a prompt, and what the model writes after it."""
    device = next(model.parameters()).device
    x = torch.tensor([list(prompt)], device=device)
    torch.manual_seed(1)
    with torch.no_grad():
        for _ in range(length):
            odds = torch.softmax(model(x, use_cache=False).logits[:, -1, :256].float() / 0.7, -1)
            x = torch.cat([x, torch.multinomial(odds, 1)], 1)
    return x


def main() -> None:
    """Trains, records, writes, and explains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--plain", type=int, default=100, help="steps without recording")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    text = windows(given.data, given.length)
    path = Path(tempfile.mkdtemp(dir=given.folder)) / "run"
    model, recorded = train(given, text, path)
    steps, given.steps = given.steps, given.plain
    _, plain = train(given, text, None)
    stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    print(f"all of it × {recorded / steps / (plain / given.plain):.3f}, {stored / 1e9:.2f} GB")
    model.eval()
    sentence = write(model, b"KING HENRY:\n", min(60, given.length - 12))
    print(repr(bytes(sentence[0].tolist())))
    run = dualform.open(path, device=given.device)
    began = sync()
    found = run.explain(
        model, {"input_ids": sentence, "labels": sentence}, lambda out: -out.loss.reshape(1)
    )
    print(f"explain: {sync() - began:.1f} s; check {found.check}")
    for ranked in found.top(5):
        print(f"{ranked.value:+.4f} window {ranked.id}: {bytes(text[ranked.id, :60].tolist())!r}")
    began = sync()
    audit = run.audit()
    shares = sorted((b.attributed, b.name) for b in audit.books if b.residual)
    mean = sum(share for share, _ in shares) / len(shares)
    print(f"audit: {sync() - began:.1f} s, remainder {audit.remainder:.1e}, attributed "
          f"{shares[0]} to {shares[-1]}, mean {mean:.2f}")  # fmt: skip
    shutil.rmtree(path.parent)


if __name__ == "__main__":
    main()
