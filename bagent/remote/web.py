"""Files on web servers, read by byte ranges.

Proxies and certificates come from the environment.
"""

from __future__ import annotations

import http.client
import re
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from string import punctuation
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit

from bagent.remote.storage import CHANGED, RemoteError, RemoteStat
from bagent.remote.urls import is_web, scheme_of

_TIMEOUT = 60.0
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-[0-9]{1,18}|\*)/(?:([0-9]{1,18})|\*)")
_LENGTH = re.compile(r"[0-9]{1,18}")
_READ_ONLY = "a web server's files are only read: name a bucket or a folder"


class WebStorage:
    """Files that a server sends by HTTP."""

    def stat(self, url: str) -> RemoteStat:
        """Return the size and the ETag, else the time of the last change."""
        with _get(url, {"Range": "bytes=0-0"}) as reply:
            size = _size(reply)
            if size is None:
                raise RemoteError("the server does not report its size: download the file first")
            tag = reply.headers.get("ETag", "")
            return RemoteStat(url, size, tag or reply.headers.get("Last-Modified", ""))

    def find(self, prefix: str) -> Iterator[RemoteStat]:
        """Refuse: web servers do not list their files."""
        raise RemoteError("a web server does not list its files: name each file")

    def read(self, file: RemoteStat, start: int, end: int) -> bytes:
        """Return a range of the file, while its version is the same."""
        with _get(file.url, {"Range": f"bytes={start}-{end - 1}", **_condition(file)}) as reply:
            if _size(reply) not in (None, file.size) or _is_other_version(reply, file.version):
                raise RemoteError(CHANGED)
            if reply.status == 206 and _start(reply) != start:
                raise RemoteError("the server sends another range than the requested one")
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


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to web servers, from https to https only."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Return the next request; None, which makes the reply an error, for another scheme."""
        from_https = scheme_of(req.full_url) == "https"
        if not is_web(newurl) or (from_https and scheme_of(newurl) != "https"):
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(Redirects)


def _condition(file: RemoteStat) -> dict[str, str]:
    """Return headers that limit a reply to this version; none for a weak tag."""
    if file.version.startswith('"'):
        return {"If-Match": file.version}
    if file.version and not file.version.startswith("W/"):
        return {"If-Unmodified-Since": file.version}
    return {}


def _is_other_version(reply: Any, version: str) -> bool:
    """Return whether a reply reports another version; a weak tag equals its strong one."""
    seen = [reply.headers.get(name, "").removeprefix("W/") for name in ("ETag", "Last-Modified")]
    return bool(version) and any(seen) and version.removeprefix("W/") not in seen


def _get(url: str, headers: dict[str, str]) -> Any:
    parts = urlsplit(url)
    path, query = (quote(text, safe=punctuation) for text in (parts.path, parts.query))
    request = urllib.request.Request(
        parts._replace(path=path, query=query).geturl(),
        headers={"Accept-Encoding": "identity", "User-Agent": "bagent", **headers},
    )
    try:
        return _opener().open(request, timeout=_TIMEOUT)
    except HTTPError as error:
        if error.code == 416 and _size(error) == 0:
            return error
        with error:
            raise _refused(error.code, error.reason) from None
    except URLError as error:
        raise RemoteError(f"the server cannot be reached: {error.reason}", passing=True) from None
    except (http.client.InvalidURL, ValueError):
        raise RemoteError("the URL, or one that the server redirects to, is wrong") from None
    except (http.client.HTTPException, OSError) as error:
        raise RemoteError(f"the server cannot be reached: {error}", passing=True) from None


def _refused(status: int, reason: str) -> RemoteError:
    if status in (404, 410):
        return RemoteError("there is no such file", missing=True)
    if 300 <= status < 400:
        return RemoteError("the server redirects in a loop, or to an address that is not followed")
    if status == 412:
        return RemoteError(CHANGED)
    return RemoteError(f"the server answers {status} {reason}", passing=status in _PASSING)


def _start(reply: Any) -> int | None:
    """Return the offset of the first byte of a range."""
    match = _RANGE.fullmatch(reply.headers.get("Content-Range", ""))
    return int(match[1]) if match and match[1] else None


def _size(reply: Any) -> int | None:
    """Return the size of the whole file from the headers of a reply."""
    match = _RANGE.fullmatch(reply.headers.get("Content-Range", ""))
    if match:
        return int(match[2]) if match[2] else None
    length = _LENGTH.fullmatch(reply.headers.get("Content-Length", ""))
    return int(length[0]) if reply.status == 200 and length else None
