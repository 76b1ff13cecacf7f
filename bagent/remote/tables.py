"""Remote Parquet files for DuckDB, which reads their row groups and columns by ranges."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, BinaryIO

from bagent.errors import MissingPackage
from bagent.remote.drivers import INSTALL
from bagent.remote.files import RemoteFile

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_SCHEME = "bagentfile"
_PATH = f"{_SCHEME}://input.parquet"


def serve_file(connection: DuckDBPyConnection, file: RemoteFile) -> str:
    """Let a connection read one remote file; return its name as an SQL string.

    Raises:
        MissingPackage: fsspec is not installed.
    """
    try:
        from fsspec import AbstractFileSystem
    except ImportError as error:
        raise MissingPackage("a Parquet file from afar needs fsspec", hint=INSTALL) from error

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
            """Return a time: the version is compared by who reads."""
            return datetime(2000, 1, 1, tzinfo=UTC)

        def open(self, path: str, mode: str = "rb", **options: Any) -> BinaryIO:
            """Open the file."""
            return file.open()

    connection.register_filesystem(OneFile())
    return f"'{_PATH}'"
