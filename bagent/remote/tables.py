"""Remote Parquet files for DuckDB, which reads their row groups and columns by ranges."""

from __future__ import annotations

import io
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bagent.errors import MissingPackage
from bagent.remote.drivers import INSTALL
from bagent.remote.files import RemoteFile

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

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
