"""The lock of a rank in object storage: an object that its holder renews every few seconds.

Nothing frees it when its holder dies. So who wants it watches it: if it is renewed, another process
records; if it is not, it is taken. A process that was only slow may wake up later. It cannot commit
any more: whoever takes a lock puts an object where the next line of the old log would be.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import threading
import time
from contextlib import suppress
from typing import Any

from filelock import Timeout

from dualform.errors import LedgerError, RunLockedError
from dualform.ledger.object_log import close_log
from dualform.ledger.object_path import ObjectPath
from dualform.ledger.object_store import TakenError, Version

RENEWED, DEAD = 5.0, 20.0
"""How often a lock is renewed, and for how long one is watched that is not, in seconds."""


class ObjectLock:
    """A lock as an object, replaced only by who has seen its last version."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._state: dict[str, Any] = {
            "holder": secrets.token_hex(8),
            "folder": "",
            "renewed": 0,
            "node": platform.node(),
            "process": os.getpid(),
        }
        self._version: Version = {}
        self._before = ""
        """The folder of the holder before, which was not heard of any more."""
        self._renewing = threading.Lock()
        self._ended = threading.Event()

    def acquire(self) -> None:
        """Takes the lock, or raises `Timeout` where another process has it."""
        try:
            try:
                self._version = self._path.create(self._said())
            except TakenError:
                self._take()
        except TakenError:
            raise Timeout(str(self._path)) from None
        threading.Thread(target=self._renew_again, name="dualform-lock", daemon=True).start()

    def claim(self, folder: str) -> None:
        """Says which log is to be closed, if this process should die; fails if the lock is lost."""
        self._close_before()  # again: a new run begins by deleting what was there
        self._state["folder"] = folder
        try:
            self._renew()
        except TakenError as error:
            raise RunLockedError(
                f"another process has taken over '{self._path.parent}', since the lock of this one "
                "was not renewed for a while"
            ) from error

    def release(self) -> None:
        """Lets others record; where that fails, they watch the lock first."""
        self._ended.set()
        self._state |= {"holder": "", "folder": ""}
        with suppress(LedgerError):
            self._renew()

    def _take(self) -> None:
        before, version = self._abandoned()
        self._version = self._path.replace_version(self._said(), version)
        self._before = str(before.get("folder", ""))
        self._close_before()

    def _close_before(self) -> None:
        if self._before:
            close_log(self._path.parent, self._before)

    def _abandoned(self) -> tuple[dict[str, Any], Version]:
        """The lock as another process has left it."""
        found, version = self._read()
        until = time.monotonic() + DEAD
        while found.get("holder"):
            time.sleep(RENEWED / 10)
            now, version = self._read()
            if now.get("holder") and now != found:
                raise Timeout(str(self._path))
            if time.monotonic() > until:
                return now, version
            found = now
        return found, version

    def _read(self) -> tuple[dict[str, Any], Version]:
        data, version = self._path.read_version()
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {}, version

    def _renew_again(self) -> None:
        while not self._ended.wait(RENEWED):
            try:
                self._renew()
            except TakenError:
                return
            except LedgerError:
                continue  # the next line of the log will tell

    def _renew(self) -> None:
        with self._renewing:
            self._state["renewed"] = self._state["renewed"] + 1
            self._version = self._path.replace_version(self._said(), self._version)

    def _said(self) -> bytes:
        return json.dumps(self._state).encode()
