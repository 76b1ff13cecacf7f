"""Local folders as a store, to publish to."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bagent.remote.storage import RemoteError, RemoteStat


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
