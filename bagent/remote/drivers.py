"""Stores behind drivers of fsspec: Google (gs), Azure (az), Hugging Face (hf)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bagent.errors import MissingPackage
from bagent.remote.storage import CHANGED, RemoteError, RemoteStat

DRIVERS = {"gs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub"}
"""Scheme -> package."""

INSTALL = "pip install 'bagent-batch[remote]', in a checkout pip install '.[remote]'"
"""How to install all drivers."""

_OPTIONS: dict[str, dict[str, Any]] = {"az": {"anon": False}}
_VERSIONS = ("etag", "ETag", "generation", "blob_id", "md5Hash", "last_modified", "mtime")


def check_driver(scheme: str) -> None:
    """See that the driver of a scheme is installed.

    Raises:
        MissingPackage: it is not.
    """
    driver = DRIVERS.get(scheme)
    if driver and not (find_spec("fsspec") and find_spec(driver)):
        raise MissingPackage(f"{scheme}:// needs {driver}", hint=INSTALL)


class DriverStorage:
    """Files of a store that an fsspec driver serves; the driver looks for keys itself.

    Args:
        scheme: the scheme of its URLs.

    Raises:
        MissingPackage: the driver is not installed.
    """

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        check_driver(scheme)
        import fsspec

        with _errors():
            self._files: Any = fsspec.filesystem(scheme, **_OPTIONS.get(scheme, {}))

    def stat(self, url: str) -> RemoteStat:
        """Return the size and the version."""
        with _errors():
            self._files.invalidate_cache()
            return _stat(url, self._files.info(url))

    def find(self, prefix: str) -> Iterator[RemoteStat]:
        """Yield the files below the folder of a prefix."""
        folder = prefix.rpartition("/")[0]
        with _errors():
            self._files.invalidate_cache()
            entries = self._files.find(folder, detail=True)
        for path, info in entries.items():
            url = f"{self._scheme}://{str(path).lstrip('/')}"
            if url.startswith(prefix):
                yield _stat(url, info)

    def read(self, file: RemoteStat, start: int, end: int) -> bytes:
        """Return a range; the first one of a file is preceded by a check of the version."""
        if start == 0 and self.stat(file.url).version != file.version:
            raise RemoteError(CHANGED)
        with _errors():
            content: bytes = self._files.cat_file(file.url, start=start, end=end)
            return content

    def write(self, url: str, path: Path) -> None:
        """Upload a file."""
        with _errors():
            self._files.put_file(str(path), url)

    def remove(self, url: str) -> None:
        """Delete a file."""
        with _errors(), suppress(FileNotFoundError):
            self._files.rm_file(url)


def _stat(url: str, info: dict[str, Any]) -> RemoteStat:
    if info.get("type") == "directory":
        raise RemoteError("this is a folder: name its files with a pattern")
    version = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
    return RemoteStat(url, int(info.get("size") or 0), version)


@contextmanager
def _errors() -> Iterator[None]:
    """Turn the errors of any driver into :class:`RemoteError`."""
    try:
        yield
    except (RemoteError, ImportError):
        raise
    except FileNotFoundError as error:
        raise RemoteError("there is no such file", missing=True) from error
    except PermissionError as error:
        raise RemoteError(f"the store refuses it: {error}") from error
    except OSError as error:
        raise RemoteError(f"the store cannot be reached: {error}", passing=True) from error
    except Exception as error:
        raise RemoteError(f"the store answers: {type(error).__name__}: {error}") from error
