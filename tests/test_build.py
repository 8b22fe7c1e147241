"""The package as it is built: the explorer's page is in it, and is built again when it is old."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import hatch_build
import pytest
from hatch_build import ASSETS, build, is_fresh

ROOT = Path(__file__).parents[1]
PLACE = "dualform/explore/assets"


def run(*command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and a source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), folder=ROOT)
    return folder


def test_an_installed_wheel_has_the_page(built: Path, tmp_path: Path) -> None:
    wheel = next(built.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", str(tmp_path / "site"), str(wheel), folder=tmp_path)
    script = (
        "import dualform; from dualform.explore.page import asset, served_page; served_page();"
        f"print(dualform.__file__, *(len(asset(name)) for name in {ASSETS}))"
    )
    found, *sizes = run(
        sys.executable, "-c", script, folder=tmp_path, PYTHONPATH=str(tmp_path / "site")
    ).split()
    assert Path(found).is_relative_to(tmp_path)
    assert all(int(size) > 1000 for size in sizes)
    assert {f"{PLACE}/{name}" for name in ASSETS} <= set(zipfile.ZipFile(wheel).namelist())


def test_the_sources_can_build_a_wheel_without_node(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        assert not any("node_modules" in name for name in archive.getnames())
        archive.extractall(tmp_path, filter="data")
    source = next(tmp_path.iterdir())
    assert (source / "frontend/package-lock.json").is_file()
    assert is_fresh(source / "frontend", source / "src" / PLACE)


def test_the_page_is_built_again_when_a_source_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "frontend", tmp_path / "src" / PLACE
    (source / "src").mkdir(parents=True)
    target.mkdir(parents=True)
    for name in ("package-lock.json", "vite.config.ts", "src/main.tsx"):
        (source / name).touch()
    ran: list[tuple[str, ...]] = []

    def npm(folder: Path, *arguments: str) -> None:
        ran.append(arguments)
        for name in ASSETS:
            (target / name).touch()

    monkeypatch.setattr(hatch_build, "npm", npm)
    build(tmp_path)
    assert ran == [("ci",), ("run", "build")]
    build(tmp_path)
    assert len(ran) == 2
    os.utime(source / "src/main.tsx", (2e9, 2e9))
    build(tmp_path)
    assert len(ran) == 4


def test_a_build_that_fails_says_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match=r"`npm ci` failed.*npm_config_registry.*hatch_build"):
        hatch_build.npm(tmp_path, "ci")
    assert "package-lock.json" in capfd.readouterr().err


def test_no_registry_is_named() -> None:
    """So that whoever installs uses the registry they are set to."""
    lock = (ROOT / "frontend/package-lock.json").read_text("utf-8")
    assert '"resolved"' not in lock
    assert '"integrity"' in lock


@pytest.mark.long
def test_a_wheel_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    """With what it declares, and nothing else: the demo runs, and its report has the page."""
    wheel, place = next(built.glob("*.whl")), tmp_path / "venv"
    run(sys.executable, "-m", "venv", str(place), folder=tmp_path)
    python = str(place / "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    run(*pip, "torch==2.13.0", folder=tmp_path)
    run(*pip, f"{wheel}[demo,explore]", folder=tmp_path)
    said = run(str(place / "bin/dualform"), "demo", "--epochs", "1", folder=tmp_path, PYTHONPATH="")
    assert "Explore it with: dualform view runs/digits" in said
    assert 'id="carried"' in (tmp_path / "runs/digits.html").read_text("utf-8")
    server = "from dualform.explore.server import make_app; from dualform.explore.page import *;"
    assert "<div id" in run(python, "-c", server + "print(served_page())", folder=tmp_path)
