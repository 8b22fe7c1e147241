"""A browser is found or installed on any machine; where it cannot be, a message says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.explore import browser


def script(folder: Path, name: str, body: str = "exit 0") -> Path:
    """A program on a machine that has nothing else."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def make_browser(folder: Path) -> subprocess.CompletedProcess[str]:
    """What `make browser` does where only `folder` has programs, and nothing can be downloaded."""
    folder.mkdir(exist_ok=True)
    machine = {
        "PATH": str(folder),
        "HOME": str(folder),
        "PLAYWRIGHT_BROWSERS_PATH": str(folder / "browsers"),
        "PLAYWRIGHT_DOWNLOAD_HOST": "http://127.0.0.1:9",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "tests.explore.browser"]
    return subprocess.run(
        command, env=machine, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", browser.NAMES)
def test_a_browser_of_any_name_is_taken(name: str, tmp_path: Path) -> None:
    there = script(tmp_path, name)
    assert make_browser(tmp_path).stdout == f"{there}\n"


def test_a_browser_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    """Some packages put a script in its place that says to install something else."""
    script(tmp_path, "chromium", "echo 'install the snap' >&2; exit 1")
    there = script(tmp_path, "google-chrome")
    assert make_browser(tmp_path).stdout == f"{there}\n"


def test_playwright_s_own_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = script(tmp_path / "own", "chrome")
    playwright: Any = SimpleNamespace(chromium=SimpleNamespace(executable_path=str(own)))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert browser.find(playwright) == str(own)
    systems = script(tmp_path, "chromium")
    assert browser.find(playwright) == str(systems)


def test_root_installs_debian_s_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of packages come first: on a fresh machine they are empty."""
    script(tmp_path, "apt-get", f'echo "$1" >> {tmp_path}/asked')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert next(browser.ways(user=0)).succeeds()
    assert (tmp_path / "asked").read_text().split() == ["update", "install"]


@pytest.mark.parametrize(("sudo", "expected"), [("exit 0", "sudo"), ("exit 1", sys.executable)])
def test_a_user_installs_it_by_sudo_without_a_password_only(
    sudo: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "apt-get")
    script(tmp_path, "sudo", sudo)
    monkeypatch.setenv("PATH", str(tmp_path))
    first = next(browser.ways(user=1000))
    assert all(Path(command[0]).name == Path(expected).name for command in first.commands)


def test_without_browser_apt_and_network_a_message_says_what_to_do(tmp_path: Path) -> None:
    tried = make_browser(tmp_path)
    assert tried.returncode == 1
    assert "playwright install chromium" in tried.stderr  # tried, and failed
    assert tried.stderr.endswith(f"{browser.MISSING}\n")
    assert "install Debian's `chromium` or Google Chrome, or run" in browser.MISSING
