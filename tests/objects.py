"""A server that speaks S3, in a process of its own, and a proxy that cuts connections to it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dualform.ledger.object_path import ObjectPath

BUCKET = "runs"
_numbers = count()


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of a server with an empty bucket, over HTTP."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as process:  # type: ignore[call-overload]
        try:
            for _ in range(600):
                with suppress(OSError), closing(HTTPConnection("127.0.0.1", port)) as connection:
                    connection.request("PUT", f"/{BUCKET}")
                    assert connection.getresponse().status == 200
                    break
                assert process.poll() is None, "the server did not start"
                time.sleep(0.1)
            yield port
        finally:
            process.kill()


class CuttingProxy:
    """Passes connections on to a server; the next few are cut after so many bytes of answers."""

    def __init__(self, port: int) -> None:
        self._server = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.cuts, self.after = 0, 0
        """How many connections are cut, and after how many bytes."""
        self.upwards = False
        """Whether it is the bytes of requests that are counted."""
        self.passed = 0
        """How many bytes of answers came through."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._server))
                for given in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pass_on, args=given, daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket, upwards: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := one.recv(65536):
                passed += len(data)
                self.passed += 0 if upwards else len(data)
                if self.cuts and upwards == self.upwards and passed > self.after:
                    self.cuts -= 1
                    break
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> ObjectPath:
    """An empty folder in a bucket; the environment says how it is reached."""
    from dualform.ledger.object_path import ObjectPath  # once the tests' own import hook is there

    use(s3_port, monkeypatch)
    return ObjectPath(f"s3://{BUCKET}/{os.getpid()}-{next(_numbers)}")


@pytest.fixture
def proxy(
    s3_port: int, bucket: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CuttingProxy]:
    """What stands between `bucket` and its server from here on."""
    with closing(CuttingProxy(s3_port)) as between:
        use(between.port, monkeypatch)
        yield between


def access(port: int) -> dict[str, str]:
    """What the environment says of a server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
    }


def use(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in access(port).items():
        monkeypatch.setenv(name, value)


def put_folder(folder: os.PathLike[str], to: ObjectPath) -> None:
    """Copies a folder, file by file."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir():
            put_folder(entry, to / entry.name)
        elif not entry.name.endswith(".lock"):
            with open(entry, "rb") as file:
                (to / entry.name).write_bytes(file.read())


def get_folder(folder: ObjectPath, to: Path) -> None:
    """Copies a folder the other way."""
    to.mkdir()
    for entry in folder.iterdir():
        if entry.is_dir():
            get_folder(entry, to / entry.name)
        else:
            (to / entry.name).write_bytes(entry.read_bytes())
