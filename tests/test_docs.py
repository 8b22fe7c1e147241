"""Documents that run: every ```python block of README and docs, each on its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dualform.ledger.codecs import CODECS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}:{number}")
    for path in sorted(DOCUMENTS)
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S), 1
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    codecs = dict(CODECS)
    try:
        exec(compile(block, "<document>", "exec"), {"__name__": "document"})
    finally:
        for added in CODECS.keys() - codecs.keys():  # a page shows how to add one
            del CODECS[added]


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_verb_and_front_door_name_is_in_the_readme() -> None:
    import dualform
    from dualform.cli import cli

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for verb in cli.commands:
        assert f"dualform {verb}" in text, f"README does not mention `dualform {verb}`"
    for name in dualform.__all__:
        assert name in text, f"README does not mention {name}"
