"""Remote files, with the interface of local ones, and for DuckDB, which reads ranges of Parquet."""

from __future__ import annotations

import io
import threading
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from bagent.errors import MissingPackage
from bagent.remote.drivers import INSTALL
from bagent.remote.storage import RemoteError, RemoteStat, Storage, retrying, storage_for
from bagent.remote.urls import fixed_prefix, is_web, pattern_matches, plain_url, with_lower_scheme

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


AHEAD = 4 << 20
"""Bytes of one request while a file is read from its start to its end."""

LEAST = 64 << 10
"""Bytes of one request at another offset of a file, at least."""

_BUFFER = 1 << 18


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One version of a remote file; has the properties of a ``Path`` that readers use."""

    stat: RemoteStat

    def __str__(self) -> str:
        return plain_url(self.stat.url)

    @property
    def url(self) -> str:
        """The whole URL."""
        return self.stat.url

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.name

    @property
    def suffix(self) -> str:
        """The last suffix of the name."""
        return self._path.suffix

    @property
    def suffixes(self) -> list[str]:
        """All suffixes of the name."""
        return self._path.suffixes

    @property
    def _path(self) -> PurePosixPath:
        url = self.stat.url
        path = unquote(urlsplit(url).path) if is_web(url) else url.partition("://")[2]
        return PurePosixPath(path)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file for reading; the mode is always ``rb``."""
        assert mode == "rb"
        return io.BufferedReader(RangeReader(self.stat, storage_for(self.stat.url)), _BUFFER)


InputFile = Path | RemoteFile
"""A file to read rows from."""


def open_remote(url: str) -> RemoteFile:
    """Return the file at a URL as it is now.

    Raises:
        RemoteError: it is not there, or may not be read.
        MissingPackage: the driver of its store is not installed.
    """
    storage = storage_for(url)
    return RemoteFile(retrying(lambda: storage.stat(url)))


def find_remote_files(pattern: str) -> list[RemoteFile]:
    """Return the files that a pattern over a bucket matches, sorted by URL.

    Raises:
        RemoteError: the bucket cannot be listed.
        MissingPackage: the driver of its store is not installed.
    """
    pattern = with_lower_scheme(pattern)
    storage = storage_for(pattern)
    matches = pattern_matches(pattern).fullmatch
    stats = retrying(lambda: list(storage.find(fixed_prefix(pattern))))
    chosen = [stat for stat in stats if matches(stat.url) and not stat.url.endswith("/")]
    return [RemoteFile(stat) for stat in sorted(chosen, key=lambda stat: stat.url)]


class RangeReader(io.RawIOBase):
    """Reads a file by ranges: large ones in sequence, small ones after a seek.

    A request that fails for a passing reason, or returns too few bytes, is retried for the missing
    bytes. Memory: two ranges.

    Args:
        stat: the version of the file.
        storage: its store.
    """

    def __init__(self, stat: RemoteStat, storage: Storage) -> None:
        self._stat = stat
        self._storage = storage
        self._position = 0
        self._windows: deque[tuple[int, bytes]] = deque(maxlen=2)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the offset of the next byte; nothing is read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stat.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read bytes into a buffer, as many as one range holds; 0 at the end."""
        start = self._position
        if start >= self._stat.size or not len(buffer):
            return 0
        window_start, content = self._window(start, len(buffer))
        count = min(len(buffer), window_start + len(content) - start)
        buffer[:count] = content[start - window_start : start - window_start + count]
        self._position += count
        return count

    def _window(self, start: int, size: int) -> tuple[int, bytes]:
        """Return a range that holds the byte at ``start``."""
        for window_start, content in self._windows:
            if window_start <= start < window_start + len(content):
                return window_start, content
        last = self._windows[-1] if self._windows else (0, b"")
        goes_on = start == last[0] + len(last[1])
        end = min(self._stat.size, start + max(size, AHEAD if goes_on else LEAST))
        window = start, self._fetch(start, end)
        self._windows.append(window)
        return window

    def _fetch(self, start: int, end: int) -> bytes:
        content = b""

        def fetch_missing() -> bytes:
            nonlocal content
            content += self._storage.read(self._stat, start + len(content), end)
            if len(content) != end - start:
                message = f"{len(content):,} of {end - start:,} bytes were received"
                raise RemoteError(message, passing=len(content) < end - start)
            return content

        return retrying(fetch_missing)


_SCHEME = "bagentfile"
_PATH = f"{_SCHEME}://input.parquet"


class ThreadSafeFile:
    """An open remote file with a position for each thread.

    DuckDB reads one handle from several threads, each time by a seek and a read.
    """

    closed = False

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._threads = threading.local()

    def _reader(self) -> io.BufferedReader:
        reader: io.BufferedReader | None = getattr(self._threads, "reader", None)
        if reader is None:
            reader = self._threads.reader = self._file.open()
        return reader

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of this thread."""
        return self._reader().seek(offset, whence)

    def tell(self) -> int:
        """Return the position of this thread."""
        return self._reader().tell()

    def read(self, size: int = -1) -> bytes:
        """Read from the position of this thread."""
        return self._reader().read(size)

    def close(self) -> None:
        """Drop the buffered ranges."""
        self._threads = threading.local()


def serve_file(connection: DuckDBPyConnection, file: RemoteFile) -> str:
    """Let a connection read one remote file; return its name as an SQL string.

    Raises:
        MissingPackage: fsspec is not installed.
    """
    try:
        from fsspec import AbstractFileSystem
    except ImportError as error:
        raise MissingPackage("a remote Parquet file needs fsspec", hint=INSTALL) from error

    class OneFile(AbstractFileSystem):  # type: ignore[misc]
        """The file system of one file."""

        protocol = _SCHEME
        cachable = False

        def info(self, path: str, **options: Any) -> dict[str, Any]:
            """Return its size."""
            return {"name": path, "size": file.stat.size, "type": "file"}

        def glob(self, path: str, **options: Any) -> list[str]:
            """Return its name."""
            return [path]

        def modified(self, path: str) -> datetime:
            """Return a fixed time: the reader compares the version."""
            return datetime(2000, 1, 1, tzinfo=UTC)

        def open(self, path: str, mode: str = "rb", **options: Any) -> ThreadSafeFile:
            """Open the file."""
            return ThreadSafeFile(file)

    connection.register_filesystem(OneFile())
    return f"'{_PATH}'"
