"""A web server with byte ranges that is also a bucket of S3, as far as readers and writers go."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from xml.sax.saxutils import escape

import pytest
from aiohttp import web

from bagent.remote import s3, storage
from support.http_servers import in_thread, serve_app


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
    page: int = 1000
    """Objects in one page of a listing."""
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

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        name, method = request.path.lstrip("/"), request.method
        if "list-type" in request.query:
            return self._list(name.rstrip("/"), request.query)
        if method == "DELETE":
            self.files.pop(name, None)
            return web.Response(status=204)
        wanted = request.headers.get("Range", "")
        self.requests.append((method, name, wanted))
        body = await request.read()
        fault = self.faults.pop(0) if self.faults else "ok"
        if method != "PUT" and fault == "ok":
            fault = self.faulty.get(name, "ok")
        if isinstance(fault, int):
            return web.Response(status=fault, body=b"<Error><Code>Fault</Code></Error>")
        if method == "PUT":
            return self._write(name, body, request.headers.get("Content-Encoding", ""))
        content = self.files.get(name)
        if content is None:
            return web.Response(status=404, body=b"<Error><Code>NoSuchKey</Code></Error>")
        tag = _tag(content)
        if request.headers.get("If-Match", tag) != tag:
            return web.Response(status=412, body=b"<Error><Code>PreconditionFailed</Code></Error>")
        headers = {"ETag": tag, "Last-Modified": "Sun, 29 Nov 2026 12:00:00 GMT"}
        status, size = 200, len(content)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted) if self.ranges else None
        if match is not None:
            start, end = int(match[1]), min(int(match[2]) + 1, size)
            if start >= size:
                return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            status, content = 206, content[start:end]
        if fault != "cut" or request.transport is None:
            return web.Response(status=status, body=content, headers=headers)
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(content)
        await response.prepare(request)
        if method == "GET":
            await response.write(content[: len(content) // 2])
        request.transport.close()
        return response

    def _write(self, name: str, body: bytes, encoding: str) -> web.Response:
        self.files[name] = _unchunked(body) if "aws-chunked" in encoding else body
        self.notify_at -= 1
        if not self.notify_at:
            self.reached.set()
        return web.Response(headers={"ETag": _tag(self.files[name])})

    def _list(self, bucket: str, query: Mapping[str, str]) -> web.Response:
        prefix, after = query["prefix"], query.get("continuation-token", "")
        names = sorted(
            name.partition("/")[2] for name in self.files if name.startswith(f"{bucket}/")
        )
        names = [name for name in names if name.startswith(prefix) and name > after]
        page = names[: self.page]
        items = ""
        for name in page:
            content = self.files[f"{bucket}/{name}"]
            fields = {"Key": name, "Size": len(content), "ETag": _tag(content)}
            parts = (f"<{key}>{escape(str(value))}</{key}>" for key, value in fields.items())
            items += f"<Contents>{''.join(parts)}</Contents>"
        if names[len(page) :]:
            items += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        more = str(len(names) > len(page)).lower()
        head = f"<IsTruncated>{more}</IsTruncated>"
        return web.Response(
            text=f"<ListBucketResult>{head}{items}</ListBucketResult>",
            content_type="application/xml",
        )


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
    """Serve files on a free port of the loopback, in a thread."""
    site = FileServer()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", site.handle)
    with in_thread(serve_app(app)) as site.url:
        yield site
