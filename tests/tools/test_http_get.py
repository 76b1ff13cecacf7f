"""Pages from a server on the loopback interface, their text, and which hosts may be asked."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from bagent.errors import UsageError
from bagent.tools import ToolFault, ToolResult
from bagent.tools.builtin.http_get import (
    HostAllowlist,
    HttpGet,
    as_address,
    is_public,
    page_text,
    read_entry,
)
from bagent.tools.threads import AbandonableThreads
from support.tool_pools import asked, once, opened

HERE = "http://127.0.0.1:{port}"


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


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    served = Site()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", served.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listening).start()
    served.port = listening.getsockname()[1]
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


def get(path: str, *hosts: str, base: str = HERE, **keys: Any) -> tuple[ToolResult, list[str]]:
    """What one call gives, and the paths that the server was asked for."""
    (result,), paths = get_all([base + path], *hosts, **keys)
    return result, paths


def test_a_page_is_given_as_its_text() -> None:
    result, paths = get("/page")
    assert (result.text, result.error) == ("T\nHello & you", None)
    assert paths == ["/page"]


def test_text_is_decoded_as_the_server_says() -> None:
    results, _ = get_all([f"{HERE}/plain?q=a%20b", f"{HERE}/latin", f"{HERE}/odd"])
    assert [result.text for result in results] == ["plain a b", "café", "odd"]


@pytest.mark.parametrize("hosts", [("localhost:{port}",), ("127.0.0.0/8", "localhost")])
def test_this_machine_is_asked_where_it_is_listed(hosts: tuple[str, ...]) -> None:
    assert get("/plain", *hosts, base="http://localhost:{port}")[0].error is None


FORMS = [
    *("http://127.0.0.1:{port}", "http://localhost:{port}", "http://LOCALHOST.:{port}"),
    *("http://127.1:{port}", "http://2130706433:{port}", "http://0x7f000001:{port}"),
    *("http://0177.0.0.1:{port}", "http://0.0.0.0:{port}", "http://0:{port}"),
    *("http://127.0.0.1.:{port}", "http://①②⑦.0.0.1:{port}", "http://127。0。0。1:{port}"),
    *("http://[::1]:{port}", "http://[::]:{port}", "http://[::ffff:127.0.0.1]:{port}"),
    *("http://[::127.0.0.1]:{port}", "http://[64:ff9b::7f00:1]:{port}"),
    *("http://169.254.169.254", "http://[::ffff:169.254.169.254]", "http://[fd00:ec2::254]"),
    *("http://metadata.google.internal", "http://instance-data"),
    *("http://example.org@127.0.0.1:{port}", "http://127.0.0.1:{port}\\@example.org"),
    *("http://127.0.0.1:{port}#@example.org/", "http://%31%32%37.0.0.1:{port}"),
]
"""Ways to write the address of this machine, and of the metadata of a cloud."""


def test_no_form_of_a_private_address_is_asked_unless_it_is_listed() -> None:
    urls = [f"{base}/plain" for base in FORMS]
    results, paths = get_all(urls, "*", "10.0.0.0/8", "127.0.0.1:1", timeout=20)
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
    paths = ("/to?where=/plain?q=1", "/to?where=http://example.org/x", "/circle")
    urls = [HERE + path for path in paths]
    (followed, elsewhere, circle), visited = get_all(urls)
    assert followed.text == "plain 1"
    assert "example.org may not be asked" in elsewhere.text
    assert "more than 5 times" in circle.text
    assert len(visited) == 2 + 1 + 6


def test_only_http_and_https_without_a_login_are_asked() -> None:
    urls = ["file:///etc/passwd", "ftp://127.0.0.1/", "gopher://x", "/x", "", "http://"]
    urls += ["http://[::1", "http://me:pw@127.0.0.1:{port}/plain"]
    results, paths = get_all(urls, "*", "127.0.0.1")
    assert {result.error for result in results} == {"failed"}
    assert paths == []


def test_an_error_status_and_what_is_not_text_are_faults() -> None:
    (missing, binary), _ = get_all([f"{HERE}/nope", f"{HERE}/binary"])
    assert (missing.error, binary.error) == ("failed", "failed")
    assert "404 Not Found: here" in missing.text
    assert "image/png, not text" in binary.text


@pytest.mark.parametrize("path", ["/endless", "/bomb"])
def test_a_body_is_read_up_to_a_bound(path: str) -> None:
    result, _ = get(path)
    assert result.text.endswith("[cut: only the first 2 MiB were read]")
    assert len(result.text) < (2 << 20) + 100


def test_a_server_that_is_silent_is_left_after_the_time_limit() -> None:
    assert get("/silent", timeout=0.5)[0].error == "timeout"


def test_hosts_must_be_listed_and_be_hosts(tmp_path: Path) -> None:
    for hosts, words in (([], "needs allow_hosts"), (["http://a.org/"], "is no host")):
        with pytest.raises(UsageError, match=words):
            once(tmp_path, {"builtin": "http_get", "allow_hosts": hosts}, {})


class Names(AbstractResolver):
    """Gives a name one address after the other, each time it is asked."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self.addresses[min(self.asked, len(self.addresses) - 1)]
        self.asked += 1
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        where = {"hostname": host, "host": address, "port": port}
        return [ResolveResult(**where, family=kind, proto=0, flags=socket.AI_NUMERICHOST)]

    async def close(self) -> None:
        """Nothing to close."""


def fault_of(names: Names) -> str:
    """What the tool says of a page that it may not have."""

    async def main() -> str:
        allowed = HostAllowlist.read(["pages.example"])
        tool = HttpGet(allowed, AbandonableThreads("pages"), names)
        try:
            with pytest.raises(ToolFault) as caught:
                await tool.run({"url": "http://pages.example:8000/x"})
        finally:
            await tool.close()
        return caught.value.message

    return asyncio.run(main())


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "169.254.169.254", "::ffff:127.0.0.1", "10.0.0.1"]
)
def test_a_listed_name_that_leads_to_a_private_address_is_not_asked(address: str) -> None:
    names = Names(address, "8.8.8.8")
    assert f"{address} is a private address" in fault_of(names)
    assert names.asked == 1, "the address that is checked is the one connected to"


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>One</p><p>Two <i>three</i></p>", "One\nTwo three"),
        ("<head><style>b{}</style><title>T</title></head><body>x</body>", "T\nx"),
        ("<head><script>if (a < b) {}</script><body>x", "x"),
        ("<ul><li>a<li>b</ul>", "a\nb"),
        ("<table><tr><td>1</td><td>2</td></tr></table>", "1\t2"),
        ('see <a href="/x">here</a> and <a href="#top">up</a>', "see here (/x) and up"),
        ("5 &lt; 6 &copy; &nbsp;x", "5 < 6 © x"),
        ("<svg><title>no</title></svg>yes", "yes"),
        ("</p></body>odd</html>", "odd"),
    ],
)
def test_a_page_is_its_visible_text(html: str, text: str) -> None:
    assert page_text(html) == text


@pytest.mark.parametrize("piece", ["<a ", "<!--", '<a b="', "<svg></style>", "<p>x"])
def test_a_page_that_takes_too_much_of_the_processor_is_cut_with_a_note(piece: str) -> None:
    seconds = itertools.count()
    text = page_text(piece * 400, lambda: float(next(seconds)))
    assert text.endswith("[cut: the rest of this page takes too long to read]")


def test_silent_elements_nested_deeper_than_any_page_has_them_cost_no_more_each() -> None:
    assert page_text("<p>before" + "<svg>" * 5_000 + "hidden") == "before"


PRIVATE = [
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
    *("169.254.169.254", "100.64.0.1", "168.63.129.16", "192.0.0.1", "192.0.2.1", "198.18.0.1"),
    *("224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "::ffff:0:127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b:1::1", "2002:a9fe:a9fe::1", "2001:db8::1", "2001:0:7f00:1::"),
]
PUBLIC = ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("text", PRIVATE)
def test_private_addresses_of_every_form_are_not_public(text: str) -> None:
    address = as_address(text)
    assert address is not None
    assert not is_public(address)
    for listed in ("*", "example.org", "8.8.8.8"):
        assert not HostAllowlist.read([listed]).allows_address(text, 80)


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_public(text: str) -> None:
    address = as_address(text)
    assert address is not None
    assert is_public(address)
    assert HostAllowlist.read(["example.org"]).allows_address(text, 80)


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("example.org", "EXAMPLE.org.", 443, True),
        ("example.org", "www.example.org", 443, False),
        ("example.org", "example.org.evil.net", 443, False),
        ("*.example.org", "www.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("example.org:8080", "example.org", 8080, True),
        ("*", "anything.net", 80, True),
        ("10.0.0.0/8", "10.9.8.7", 80, True),
        ("10.0.0.0/8", "ten.example.org", 80, False),
        ("127.0.0.1:81", "127.0.0.1", 80, False),
        ("[::1]:81", "::1", 81, True),
        ("::1", "::1", 80, True),
    ],
)
def test_names_are_allowed_by_entries(entry: str, host: str, port: int, allowed: bool) -> None:
    assert HostAllowlist.read([entry]).allows_host(host, port) is allowed


@pytest.mark.parametrize(
    ("entry", "address", "port", "allowed"),
    [
        ("127.0.0.1", "::ffff:127.0.0.1", 80, True),
        ("127.0.0.1", "127.0.0.2", 80, False),
        ("127.0.0.1:81", "127.0.0.1", 80, False),
        ("localhost", "127.0.0.1", 80, True),
        ("localhost", "::1", 80, True),
        ("localhost", "10.0.0.1", 80, False),
        ("intern.example.org", "10.0.0.1", 80, False),
        ("fd00::/8", "fd00::5", 80, True),
    ],
)
def test_private_addresses_are_allowed_only_where_they_are_listed(
    entry: str, address: str, port: int, allowed: bool
) -> None:
    assert HostAllowlist.read([entry]).allows_address(address, port) is allowed


@pytest.mark.parametrize("entry", ["", "user@host", "a*b", "*.*.org", "http://a.org/"])
def test_an_entry_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(entry)}$"):
        read_entry(entry)
