"""Processes of their own, forked from one that has imported torch and dualform once for all."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

PARTS = ("cli", "compaction", "demo", "evaluate", "explore", "read", "recording")
SERVER = multiprocessing.get_context("forkserver")
# A process that runs tests has one such server, and the list that was given last counts.
SERVER.set_forkserver_preload(
    ["torch._dynamo", "sklearn.datasets", *(f"dualform.{part}" for part in PARTS)]
)


@contextmanager
def started(target: Callable[..., Any], *args: Any) -> Iterator[tuple[BaseProcess, IO[str]]]:
    """A process that runs a function, and what it prints; it is killed if it has not ended."""
    reading, writing = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=_print_to, args=(writing, target, args))
    process.start()
    writing.close()
    try:
        with os.fdopen(os.dup(reading.fileno()), encoding="utf-8") as printed:
            reading.close()
            yield process, printed
    finally:
        process.kill()
        process.join()


def _print_to(writing: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.dup2(writing.fileno(), 1)
    writing.close()
    target(*args)


def dualform(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What `python -m dualform …` does in a folder."""
    with TemporaryDirectory() as folder:
        printed = Path(folder, "stdout"), Path(folder, "stderr")
        given = (arguments, cwd, dict(os.environ), *printed)
        process = SERVER.Process(target=_run_command, args=given)
        process.start()
        process.join()
        out, err = (path.read_text(encoding="utf-8") for path in printed)
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, out, err)


def _run_command(
    arguments: tuple[str, ...], cwd: Path, environment: Mapping[str, str], out: Path, err: Path
) -> None:
    for path, place in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), place)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.path.insert(0, str(cwd))
    sys.argv = ["dualform", *arguments]
    runpy.run_module("dualform", run_name="__main__", alter_sys=True)
