"""A web server with byte ranges that is also a bucket of S3, as far as readers and writers go."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from bagent.remote import s3, storage

PAGE = 1000
"""Objects in one page of a listing."""


@dataclass
class FileServer:
    """Its files by path, such as ``bucket/rows.jsonl``, and how it misbehaves."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: list[int | str] = field(default_factory=list)
    """For the next requests that read or write a file: a status code, ``cut``, or ``ok``."""
    faulty: dict[str, int] = field(default_factory=dict)
    """The status code of each request that reads a file of this name."""
    ranges: bool = True
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""
    page: int = PAGE
    notify_at: int = 0
    """The number of the written file at which :attr:`reached` is set, before the reply."""
    reached: threading.Event = field(default_factory=threading.Event)

    @property
    def read(self) -> int:
        """How many bytes of files were requested by ranges."""
        return sum(
            int(match[2]) - int(match[1]) + 1
            for _, _, text in self.requests
            if (match := re.fullmatch(r"bytes=(\d+)-(\d+)", text))
        )

    @property
    def env(self) -> dict[str, str]:
        """Variables that make this the address of S3, with a key."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: FileServer

    def log_message(self, *args) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        name = unquote(parts.path).lstrip("/")
        if "list-type" in query:
            self._list(name.rstrip("/"), query)
            return
        self.site.requests.append((self.command, name, self.headers.get("Range", "")))
        fault = self.site.faults.pop(0) if self.site.faults else self.site.faulty.get(name, "ok")
        if isinstance(fault, int):
            self._reply(fault, b"<Error><Code>Fault</Code></Error>")
            return
        content = self.site.files.get(name)
        if content is None:
            self._reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        tag = _tag(content)
        if self.headers.get("If-Match", tag) != tag:
            self._reply(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        headers = {"ETag": tag, "Last-Modified": "Sun, 29 Nov 2026 12:00:00 GMT"}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None or not self.site.ranges:
            self._reply(200, content, headers, cut=fault == "cut")
            return
        start, end = int(match[1]), min(int(match[2]) + 1, len(content))
        if start >= len(content):
            self._reply(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self._reply(206, content[start:end], headers, cut=fault == "cut")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = unquote(urlsplit(self.path).path).lstrip("/")
        self.site.requests.append(("PUT", name, ""))
        fault = self.site.faults.pop(0) if self.site.faults else "ok"
        if isinstance(fault, int):
            self._reply(fault, b"<Error><Code>Fault</Code></Error>")
            return
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            body = _unchunked(body)
        self.site.files[name] = body
        self.site.notify_at -= 1
        if not self.site.notify_at:
            self.site.reached.set()
        self._reply(200, b"", {"ETag": _tag(body)})

    def do_DELETE(self) -> None:
        self.site.files.pop(unquote(urlsplit(self.path).path).lstrip("/"), None)
        self._reply(204, b"")

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix, after = query["prefix"][0], query.get("continuation-token", [""])[0]
        names = sorted(
            name.partition("/")[2] for name in self.site.files if name.startswith(f"{bucket}/")
        )
        names = [name for name in names if name.startswith(prefix) and name > after]
        page = names[: self.site.page]
        more = (
            f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
            if names[len(page) :]
            else ""
        )
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.site.files[f'{bucket}/{name}'])}</Size>"
            f"<ETag>{escape(_tag(self.site.files[f'{bucket}/{name}']))}</ETag></Contents>"
            for name in page
        )
        body = (
            f"<ListBucketResult><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{items}"
            "</ListBucketResult>"
        )
        self._reply(200, body.encode(), {"Content-Type": "application/xml"})

    def _reply(self, status: int, body: bytes, headers=None, *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _unchunked(body: bytes) -> bytes:
    content = b""
    while body:
        head, _, body = body.partition(b"\r\n")
        size = int(head.partition(b";")[0], 16)
        if not size:
            break
        content, body = content + body[:size], body[size + 2 :]
    return content


@contextmanager
def serving_buckets() -> Iterator[FileServer]:
    """Make a file server the S3 of this process, without waits between retries.

    All tests of a process share its address and the client of S3, which takes boto3 long to make.
    """
    site, s3_storage = _shared_server()
    site.__init__(site.url)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in site.env.items():
            patch.setenv(name, value)
        for name in ("http_proxy", "HTTP_PROXY", "AWS_PROFILE"):
            patch.delenv(name, raising=False)
        patch.setattr(storage, "WAITS", (0.0, 0.0, 0.0))
        patch.setattr(s3, "S3Storage", s3_storage)
        storage.storage_of.cache_clear()
        yield site
        storage.storage_of.cache_clear()


_OPEN = ExitStack()


@cache
def _shared_server() -> tuple[FileServer, Callable[[], s3.S3Storage]]:
    """Start a server that lives as long as the process."""
    return _OPEN.enter_context(file_server()), cache(s3.S3Storage)


@contextmanager
def file_server() -> Iterator[FileServer]:
    """Serve files on a free port of the loopback, in threads."""
    site = FileServer()
    handler = type("Handler", (_Handler,), {"site": site})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a reader may leave before the end of a file
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
