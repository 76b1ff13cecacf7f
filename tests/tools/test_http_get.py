"""Pages from a real server on the loopback interface."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bagent.errors import UsageError
from bagent.tools import ToolResult
from support.tool_pools import asked, once, opened

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SIZE = 2 << 20


class Site:
    """What the server was asked, and where it is."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.port = 0
        self.endless_closed = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path_qs)
        answer = getattr(self, request.path.strip("/").replace("-", "_"), None)
        if answer is None:
            return web.Response(text="here", status=404)
        made: web.StreamResponse = await answer(request)
        return made

    async def page(self, _: web.Request) -> web.StreamResponse:
        html = "<html><head><title>T</title><script>x()</script></head><body><p>Hello &amp; <b>you"
        return web.Response(text=html, content_type="text/html")

    async def plain(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=f"plain {request.query.get('q', '')}")

    async def latin(self, _: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "text/plain; charset=iso-8859-1"}
        return web.Response(body="café".encode("latin-1"), headers=headers)

    async def odd(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=b"odd", headers={"Content-Type": "text/plain; charset=nope"})

    async def binary(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=b"\x89PNG\0\0", content_type="image/png")

    async def to(self, request: web.Request) -> web.StreamResponse:
        status = int(request.query.get("status", "302"))
        return web.Response(status=status, headers={"Location": request.query["where"]})

    async def circle(self, _: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": "/circle"})

    async def bomb(self, _: web.Request) -> web.StreamResponse:
        body = gzip.compress(b"x" * (64 << 20))
        headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
        return web.Response(body=body, headers=headers)

    async def endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"y" * 65536)
        finally:
            self.endless_closed.set()

    async def silent(self, request: web.Request) -> web.StreamResponse:
        await self.endless_closed.wait()
        return web.Response()

    async def cookie(self, request: web.Request) -> web.StreamResponse:
        response = web.Response(text=f"cookies: {dict(request.cookies)}")
        response.set_cookie("a", "b")
        return response


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    served = Site()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", served.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    both = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, both).start()
    served.port = both.getsockname()[1]
    try:
        yield served
    finally:
        served.endless_closed.set()
        await runner.cleanup()


def get_all(urls: Sequence[str], *hosts: str, **keys: Any) -> tuple[list[ToolResult], list[str]]:
    """What calls of ``http_get`` give, and the paths that the server was asked for."""

    async def main() -> tuple[list[ToolResult], list[str]]:
        async with site() as served:
            allow = [host.format(port=served.port) for host in hosts or ("127.0.0.1",)]
            entry = {"builtin": "http_get", "allow_hosts": allow, "max_tokens": 10_000_000, **keys}
            async with opened(Path("/nonexistent"), entry) as pool:
                calls = [asked("http_get", url=url.format(port=served.port)) for url in urls]
                return [await pool.call(one) for one in calls], served.paths

    return asyncio.run(main())


def get(
    path: str, *hosts: str, base: str = "http://127.0.0.1:{port}", **keys: Any
) -> tuple[ToolResult, list[str]]:
    """What one call gives, and the paths that the server was asked for."""
    (result,), paths = get_all([base + path], *hosts, **keys)
    return result, paths


def test_a_page_is_given_as_its_text() -> None:
    result, paths = get("/page")
    assert (result.text, result.error) == ("T\nHello & you", None)
    assert paths == ["/page"]


def test_text_is_decoded_as_the_server_says() -> None:
    base = "http://127.0.0.1:{port}"
    results, _ = get_all([f"{base}/plain?q=a%20b", f"{base}/latin", f"{base}/odd"])
    assert [result.text for result in results] == ["plain a b", "café", "odd"]


@pytest.mark.parametrize(
    "hosts",
    [
        ("localhost:{port}",),
        ("127.0.0.0/8", "localhost"),
    ],
)
def test_this_machine_is_asked_where_it_is_listed(hosts: tuple[str, ...]) -> None:
    assert get("/plain", *hosts, base="http://localhost:{port}")[0].error is None


FORMS = [
    "http://127.0.0.1:{port}",
    "http://localhost:{port}",
    "http://127.1:{port}",
    "http://2130706433:{port}",
    "http://0x7f000001:{port}",
    "http://0177.0.0.1:{port}",
    "http://0.0.0.0:{port}",
    "http://[::1]:{port}",
    "http://[::ffff:127.0.0.1]:{port}",
    "http://[::ffff:7f00:1]:{port}",
    "http://[::127.0.0.1]:{port}",
    "http://[64:ff9b::7f00:1]:{port}",
    "http://127.0.0.1.:{port}",
    "http://LOCALHOST.:{port}",
    "http://①②⑦.0.0.1:{port}",
    "http://169.254.169.254",
    "http://[::ffff:169.254.169.254]",
    "http://[fd00:ec2::254]",
]
ODD_FORMS = [
    "http://0:{port}",
    "http://0x7f.1:{port}",
    "http://017700000001:{port}",
    "http://[::]:{port}",
    "http://[0:0:0:0:0:ffff:127.0.0.1]:{port}",
    "http://127。0。0。1:{port}",
    "http://example.org@127.0.0.1:{port}",
    "http://127.0.0.1:{port}\\@example.org",
    "http://127.0.0.1:{port}#@example.org/",
    "http://%31%32%37.0.0.1:{port}",
    "http://metadata.google.internal",
    "http://instance-data",
]


@pytest.mark.parametrize("hosts", [("*", "10.0.0.0/8", "127.0.0.1:1")])
def test_no_form_of_a_private_address_is_asked_unless_it_is_listed(hosts: tuple[str, ...]) -> None:
    urls = [f"{base}/plain" for base in (*FORMS, *ODD_FORMS)]
    results, paths = get_all(urls, *hosts, timeout=20)
    assert [url for url, one in zip(urls, results, strict=True) if one.error != "failed"] == []
    assert paths == []


def test_no_redirect_leads_to_a_private_address_that_is_not_listed() -> None:
    # Only the first hop's own address and port are listed, "*" stands for every public host.
    urls = []
    for number, base in enumerate(FORMS):
        where = base.replace("{port}", "1").replace("127.0.0.1:1", "127.0.0.2:1")
        status = (301, 302, 303, 307, 308)[number % 5]
        urls.append(f"http://127.0.0.1:{{port}}/to?status={status}&where={where}/x")
    urls.append("http://127.0.0.1:{port}/to?where=http://127.0.0.1:1/x")
    results, paths = get_all(urls, "127.0.0.1:{port}", "*", timeout=20)
    assert [url for url, one in zip(urls, results, strict=True) if one.error != "failed"] == []
    assert "private" in results[-1].text
    assert len(paths) == len(urls)


def test_redirects_lead_a_few_times_and_only_to_hosts_that_are_listed() -> None:
    urls = [
        f"http://127.0.0.1:{{port}}{path}"
        for path in ("/to?where=/plain?q=1", "/to?where=http://example.org/x", "/circle")
    ]
    (followed, elsewhere, circle), paths = get_all(urls)
    assert followed.text == "plain 1"
    assert "example.org may not be asked" in elsewhere.text
    assert "more than 5 times" in circle.text
    assert len(paths) == 2 + 1 + 6


def test_only_http_and_https_without_a_login_are_asked() -> None:
    urls = ["file:///etc/passwd", "ftp://127.0.0.1/", "gopher://x", "/x", "", "http://"]
    urls += ["http://[::1", "http://me:pw@127.0.0.1:{port}/plain"]
    results, paths = get_all(urls, "*", "127.0.0.1")
    assert {result.error for result in results} == {"failed"}
    assert paths == []


def test_an_error_status_and_what_is_not_text_are_faults() -> None:
    base = "http://127.0.0.1:{port}"
    (missing, binary), _ = get_all([f"{base}/nope", f"{base}/binary"])
    assert (missing.error, binary.error) == ("failed", "failed")
    assert "404 Not Found: here" in missing.text
    assert "image/png, not text" in binary.text


@pytest.mark.parametrize("path", ["/endless", "/bomb"])
def test_a_body_is_read_up_to_a_bound(path: str) -> None:
    result, _ = get(path)
    assert result.text.endswith("[cut: only the first 2 MiB were read]")
    assert len(result.text) < SIZE + 100


def test_a_server_that_is_silent_is_left_after_the_time_limit() -> None:
    assert get("/silent", timeout=0.5)[0].error == "timeout"


@pytest.mark.parametrize(
    ("hosts", "words"), [([], "needs allow_hosts"), (["http://a.org/"], "is no host")]
)
def test_hosts_must_be_listed_and_be_hosts(tmp_path: Path, hosts: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        once(tmp_path, {"builtin": "http_get", "allow_hosts": hosts}, {})
