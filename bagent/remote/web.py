"""Files on web servers, read by byte ranges; proxies and certificates as the environment says."""

from __future__ import annotations

import http.client
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from bagent.remote.storage import CHANGED, RemoteError, RemoteStat

_TIMEOUT = 60.0
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_RANGE = re.compile(r"bytes (?:\d+-\d+|\*)/(\d+)")
_READ_ONLY = "a web server's files are only read: name a bucket or a folder"


class WebStorage:
    """Files that a server sends by HTTP."""

    def stat(self, url: str) -> RemoteStat:
        """Return the size and the ETag, else the time of the last change."""
        with _get(url, {"Range": "bytes=0-0"}) as reply:
            size = _size(reply)
            if size is None:
                raise RemoteError("the server does not tell its size: download the file first")
            tag = reply.headers.get("ETag", "")
            return RemoteStat(url, size, tag or reply.headers.get("Last-Modified", ""))

    def find(self, prefix: str) -> Iterator[RemoteStat]:
        """Refuse: web servers do not list their files."""
        raise RemoteError("a web server does not list its files: name each file")

    def read(self, file: RemoteStat, start: int, end: int) -> bytes:
        """Return a range of the file, while its version is the same."""
        with _get(file.url, {"Range": f"bytes={start}-{end - 1}", **_condition(file)}) as reply:
            if _size(reply) not in (None, file.size):
                raise RemoteError(CHANGED)
            if reply.status != 206 and (start, end) != (0, file.size):
                raise RemoteError("the server sends no byte ranges: download the file first")
            try:
                content: bytes = reply.read(end - start + 1)
            except (http.client.HTTPException, OSError) as error:
                raise RemoteError(f"the reply was cut off: {error}", passing=True) from error
            return content

    def write(self, url: str, path: Path) -> None:
        """Refuse."""
        raise RemoteError(_READ_ONLY)

    def remove(self, url: str) -> None:
        """Refuse."""
        raise RemoteError(_READ_ONLY)


def _condition(file: RemoteStat) -> dict[str, str]:
    """Return the headers that let a reply be of this version only; weak tags cannot."""
    if file.version.startswith('"'):
        return {"If-Match": file.version}
    if file.version and not file.version.startswith("W/"):
        return {"If-Unmodified-Since": file.version}
    return {}


def _get(url: str, headers: dict[str, str]) -> Any:
    request = urllib.request.Request(
        url, headers={"Accept-Encoding": "identity", "User-Agent": "bagent", **headers}
    )
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT)  # nosec B310
    except HTTPError as error:
        if error.code == 416 and _size(error) == 0:
            return error
        with error:
            raise _refused(error.code, error.reason) from None
    except URLError as error:
        raise RemoteError(f"the server cannot be reached: {error.reason}", passing=True) from None
    except (http.client.HTTPException, OSError) as error:
        raise RemoteError(f"the server cannot be reached: {error}", passing=True) from None


def _refused(status: int, reason: str) -> RemoteError:
    if status in (404, 410):
        return RemoteError("there is no such file", missing=True)
    if status == 412:
        return RemoteError(CHANGED)
    return RemoteError(f"the server answers {status} {reason}", passing=status in _PASSING)


def _size(reply: Any) -> int | None:
    """Return the size of the whole file by the headers of a reply."""
    match = _RANGE.fullmatch(reply.headers.get("Content-Range", ""))
    if match:
        return int(match[1])
    length = reply.headers.get("Content-Length", "")
    return int(length) if reply.status == 200 and length.isdigit() else None
