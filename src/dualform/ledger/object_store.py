"""Requests to object storage: each is repeated while connections fail, and errors are in words.

An object has a key and bytes. It is put whole, and read in ranges; nothing is appended to it. It
can be put on condition that there is none, or that it still is the version that was read. The
requests are obstore's, which speaks to S3, to servers that speak like it, and to Google's storage.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar

from dualform.errors import LedgerError

T = TypeVar("T")
Version = Mapping[str, Any]
"""What a store calls the bytes that an object has now."""

READING, WRITING = 20.0, 180.0
"""For how many seconds a request is repeated; a training can wait longer than a person."""
LONGEST_PAUSE = 10.0
WHOLE = 16 << 20
"""What is larger is put in parts."""
PART = 8 << 20
SETTINGS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL for other "
    "servers than Amazon's",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
"""The kinds of stores, and the environment variables that say how they are reached."""
ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL"}
"""The variables that name another server than the provider's."""
MACHINE = ("/latest/api/token", "/latest/meta-data", "/computeMetadata/")
"""Where credentials are asked for last: the machine's own, which others than providers' lack."""


class TakenError(LedgerError):
    """There is such an object already, or it is another one by now."""


@dataclass(frozen=True)
class FoundObject:
    """An object as it was found: how many bytes it has, and which they are."""

    size: int
    version: Version


@cache
def connected(scheme: str, bucket: str, settings: tuple[tuple[str, str], ...]) -> ObjectStore:
    """A bucket; requests by the same settings share their connections."""
    return ObjectStore(scheme, bucket, dict(settings))


def connect(scheme: str, bucket: str) -> ObjectStore:
    """A bucket, reached as the environment says now."""
    named = ("AWS_", "GOOGLE_")
    settings = {name: value for name, value in os.environ.items() if name.startswith(named)}
    return connected(scheme, bucket, tuple(sorted(settings.items())))


class ObjectStore:
    """One bucket."""

    def __init__(self, scheme: str, bucket: str, settings: Mapping[str, str]) -> None:
        self.url = f"{scheme}://{bucket}"
        self._scheme, self._bucket = scheme, bucket
        try:
            import obstore
        except ImportError as error:
            raise LedgerError(
                f"'{self.url}' is in object storage, which is reached through the package obstore: "
                "pip install 'dualform[cloud]'."
            ) from error
        self._requests: Any = obstore
        plain = settings.get(ENDPOINTS[scheme], "").startswith("http://")
        second = timedelta(seconds=1)
        self._store: Any = obstore.store.from_url(
            self.url,
            client_options={"timeout": "60s", "connect_timeout": "5s", "allow_http": plain},
            retry_config={
                "max_retries": 3,
                "retry_timeout": 30 * second,
                "backoff": {"init_backoff": 0.1 * second, "max_backoff": 2 * second, "base": 2},
            },
        )

    def entries(self, folder: str) -> tuple[list[str], list[str]]:
        """The names of the objects and of the folders in a folder."""
        listed = self._tried(
            "list", folder, lambda: self._requests.list_with_delimiter(self._store, folder or None)
        )
        files = [entry["path"] for entry in listed["objects"] if entry["path"] != folder]
        names = (
            [key.rpartition("/")[2] for key in keys] for keys in (files, listed["common_prefixes"])
        )
        objects, folders = map(sorted, names)
        return objects, folders

    def find(self, key: str) -> FoundObject:
        """How large an object is."""
        return _found(self._tried("read", key, lambda: self._requests.head(self._store, key)))

    def begin(self, key: str, count: int | None = None) -> tuple[bytes, FoundObject]:
        """The first bytes of an object, or all, as it is now."""
        some = None if count is None else {"range": (0, count)}

        def request() -> tuple[bytes, FoundObject]:
            try:
                got = self._requests.get(self._store, key, options=some)
            except self._requests.exceptions.GenericError as error:
                if "416" not in str(error):
                    raise
                got = self._requests.get(self._store, key)  # it is empty
            return got.bytes().to_bytes(), _found(got.meta)

        return self._tried("read", key, request)

    def read(self, key: str, start: int, stop: int, found: FoundObject) -> bytes:
        """Some bytes of an object, which is the one that was found."""
        options: dict[str, Any] = {"range": (start, stop)}
        if found.version.get("e_tag"):
            options["if_match"] = found.version["e_tag"]

        def request() -> bytes:
            data: bytes = self._requests.get(self._store, key, options=options).bytes().to_bytes()
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data)} bytes of {stop - start} came")
            return data

        try:
            return self._tried("read", key, request)
        except TakenError as error:
            raise LedgerError(
                f"'{self.url}/{key}' was replaced while it was read; open the run again."
            ) from error

    def put(self, key: str, chunks: Sequence[bytes | memoryview]) -> None:
        """Puts an object, in place of one that may be there."""
        if sum(map(len, chunks)) <= WHOLE:
            data = b"".join(chunks)
            self._tried("write", key, lambda: self._requests.put(self._store, key, data), WRITING)
            return

        def request() -> Any:
            parts = iter(chunks)
            return self._requests.put(
                self._store, key, parts, use_multipart=True, chunk_size=PART, max_concurrency=4
            )

        self._tried("write", key, request, WRITING)

    def create(self, key: str, data: bytes) -> Version:
        """Puts an object where there is none."""
        return self._put_if(key, data, "create")

    def replace(self, key: str, data: bytes, version: Version) -> Version:
        """Puts an object in place of one that is still as it was read."""
        return self._put_if(key, data, {name: value for name, value in version.items() if value})

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes some objects, as far as they are there."""
        for key in keys:
            with suppress(FileNotFoundError):
                self._tried("delete", key, partial(self._requests.delete, self._store, [key]))

    def under(self, folder: str) -> list[str]:
        """The keys of all objects in a folder and in those below it."""
        return self._tried("list", folder, lambda: list(self._keys(folder)))

    def _keys(self, folder: str) -> Iterator[str]:
        for page in self._requests.list(self._store, f"{folder}/"):
            yield from (str(entry["path"]) for entry in page)

    def _put_if(self, key: str, data: bytes, mode: Any) -> Version:
        """Where an answer is lost, the object may be ours already: then that is the answer."""
        try:
            put = partial(self._requests.put, self._store, key, data, mode=mode)
            return dict(self._tried("write", key, put, WRITING))
        except TakenError:
            there, found = self.begin(key, len(data) + 1)
            if there != data:
                raise
            return found.version

    def _tried(self, what: str, key: str, request: Callable[[], T], seconds: float = 0.0) -> T:
        """What a request gives, after as many tries as its time allows."""
        until, pause = time.monotonic() + (seconds or READING), 0.1
        while True:
            try:
                return request()
            except Exception as error:
                self._refuse(what, key, error)
                if time.monotonic() + pause > until:
                    raise self._unreachable(what, key, error, seconds or READING) from error
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _refuse(self, what: str, key: str, error: Exception) -> None:
        """Raises what does not get better by another try."""
        known, said = self._requests.exceptions, str(error)
        at = f"cannot {what} '{self.url}/{key}'"
        if "NoSuchBucket" in said:
            raise LedgerError(
                f"{at}: there is no bucket '{self._bucket}' where it was looked for "
                f"({self._where()}); make it, or give another URL."
            ) from error
        if isinstance(error, FileNotFoundError | known.NotFoundError):
            raise FileNotFoundError(2, "No such object", f"{self.url}/{key}") from error
        if isinstance(error, known.AlreadyExistsError | known.PreconditionError):
            raise TakenError(f"'{self.url}/{key}' is there already, or was replaced.") from error
        denied = isinstance(error, known.PermissionDeniedError | known.UnauthenticatedError)
        if denied or any(name in said for name in MACHINE):
            found = "they are not allowed to" if denied else "there are none"
            raise LedgerError(
                f"{at}: with the credentials of this process, {found}. "
                f"They are read from the environment: {SETTINGS[self._scheme]}."
            ) from error
        if not isinstance(error, known.GenericError | OSError):
            raise LedgerError(f"{at}: {_first_line(error)}") from error

    def _unreachable(self, what: str, key: str, error: Exception, seconds: float) -> LedgerError:
        return LedgerError(
            f"cannot {what} '{self.url}/{key}': {_first_line(error)} "
            f"It was tried for {seconds:g} seconds, {self._where()}."
        )

    def _where(self) -> str:
        endpoint = os.environ.get(ENDPOINTS[self._scheme])
        return f"at {endpoint}" if endpoint else f"at the provider of {self._scheme}://"


def _found(meta: Mapping[str, Any]) -> FoundObject:
    return FoundObject(int(meta["size"]), {name: meta[name] for name in ("e_tag", "version")})


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0].removesuffix(".")
    return f"{line or type(error).__name__}."
