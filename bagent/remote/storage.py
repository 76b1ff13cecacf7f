"""The protocol of a store of remote files, its errors and retries, and local folders as one."""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

from bagent.remote.urls import is_remote, scheme_of

T = TypeVar("T")

WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each retry of a request that failed for a passing reason."""

CHANGED = "it was changed while it was read: give the same command again"
"""The message for a file whose version is another than the one that was found."""


class RemoteError(OSError):
    """A request for a remote file failed.

    Args:
        message: what is wrong, one line.
        passing: whether the same request may succeed.
        missing: whether there is no such file.
    """

    def __init__(self, message: str, *, passing: bool = False, missing: bool = False) -> None:
        super().__init__(errno.ENOENT if missing else errno.EIO, message)
        self.passing = passing
        self.missing = missing


@dataclass(frozen=True, slots=True)
class RemoteStat:
    """One file as its store describes it: ``version`` changes with its content, if known."""

    url: str
    size: int
    version: str = ""


class Storage(Protocol):
    """One kind of store. Each method makes one attempt and raises :class:`RemoteError`."""

    def stat(self, url: str) -> RemoteStat:
        """Return the size and the version of a file."""

    def find(self, prefix: str) -> Iterator[RemoteStat]:
        """Yield all files whose URL begins with ``prefix``."""

    def read(self, file: RemoteStat, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end`` of this version of a file."""

    def write(self, url: str, path: Path) -> None:
        """Write a local file to ``url``, whole or not at all."""

    def remove(self, url: str) -> None:
        """Delete a file; one that is not there is no error."""


@cache
def storage_of(scheme: str) -> Storage:
    """Return the store of a scheme; an empty one means local folders.

    Raises:
        MissingPackage: its driver is not installed.
    """
    if scheme == "s3":
        from bagent.remote.s3 import S3Storage

        return S3Storage()
    if scheme in ("http", "https"):
        from bagent.remote.web import WebStorage

        return WebStorage()
    if not scheme:
        return LocalStorage()
    from bagent.remote.drivers import DriverStorage

    return DriverStorage(scheme)


def storage_for(url: str) -> Storage:
    """Return the store of a URL or a path; raises as :func:`storage_of`."""
    return storage_of(scheme_of(url) if is_remote(url) else "")


def retrying(call: Callable[[], T]) -> T:
    """Return what ``call`` returns; make it again while it fails for a passing reason.

    Raises:
        RemoteError: the last failure, after one call more than there are :data:`WAITS`.
    """
    for wait in WAITS:
        try:
            return call()
        except RemoteError as error:
            if not error.passing:
                raise
        time.sleep(wait)
    return call()


class LocalStorage:
    """Files by their path."""

    def stat(self, url: str) -> RemoteStat:
        """Return the size and the time of the last change."""
        with _errors():
            status = Path(url).stat()
        return RemoteStat(url, status.st_size, str(status.st_mtime_ns))

    def find(self, prefix: str) -> Iterator[RemoteStat]:
        """Refuse: a publication lists no local files."""
        raise RemoteError("a folder to publish to is not listed")

    def read(self, file: RemoteStat, start: int, end: int) -> bytes:
        """Return a range of the file."""
        with _errors(), Path(file.url).open("rb") as opened:
            opened.seek(start)
            return opened.read(end - start)

    def write(self, url: str, path: Path) -> None:
        """Copy a file; readers see it complete or not at all."""
        target = Path(url)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        with _errors():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("rb") as source, temporary.open("xb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
                    copy.flush()
                    os.fsync(copy.fileno())
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)

    def remove(self, url: str) -> None:
        """Delete a file, and its folder once it is empty."""
        with _errors():
            Path(url).unlink(missing_ok=True)
        with suppress(OSError):
            Path(url).parent.rmdir()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise RemoteError("there is no such file", missing=True) from error
    except OSError as error:
        raise RemoteError((error.strerror or str(error)).lower()) from error
