"""``http_get``: one page by its URL, from the hosts that the job allows.

A public name may resolve to this machine, or to another address the next moment. So names are
checked before a request, and addresses when the socket is made.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from bagent.tools.threads import AbandonableThreads
from bagent.tools.types import Arguments, ToolFault
from bagent.types import Json

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))

_METADATA = frozenset({ipaddress.ip_address("168.63.129.16")})
"""Public addresses that clouds answer with secrets (Azure's WireServer). The others, such as
169.254.169.254, 100.100.100.200 and fd00:ec2::254, are not global anyway."""

_NOT_PUBLIC = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("192.0.0.0/24", "192.88.99.0/24"),
        *("64:ff9b:1::/48", "::ffff:0:0:0/96", "fec0::/10", "2002::/16", "2001::/32"),
    )
)
"""Networks that some versions of Python call global: protocol assignments, local translation,
site-local addresses, and tunnels (6to4, Teredo) to any address."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")

_SILENT = frozenset({"script", "style", "noscript", "template", "svg", "head"})
_BREAKS = frozenset(
    {"p", "div", "br", "li", "ul", "ol", "tr", "table", "section", "article", "header", "footer"}
    | {"h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote", "hr", "dt", "dd", "title"}
)
_VOID = frozenset({"br", "hr", "img", "input", "meta", "link", "base", "col", "source", "wbr"})

MOST_SECONDS = 8.0
"""Seconds of CPU for one page: a few kilobytes of hostile markup take the parser minutes, in a
thread that cannot be stopped. An ordinary page of 2 MiB takes two or three."""

_DEEPEST = 64
"""Nested silent elements that are tracked; no page has more."""


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """One entry of ``allow_hosts``; ``port`` None: any."""

    port: int | None = None
    name: str = ""
    network: Network | None = None

    def takes_port(self, port: int | None) -> bool:
        """Return whether the entry allows ``port``."""
        return self.port is None or self.port == port


def read_entry(entry: str) -> AllowedHost:
    """Read ``example.org``, ``*.example.org``, ``*``, an address or a network, or these with
    ``:PORT`` (an IPv6 address then in brackets).

    Raises:
        ValueError: it is none of these.
    """
    text = entry.strip().lower()
    network = as_network(text)
    if network is not None:
        return AllowedHost(network=network)
    host, colon, port_text = text.rpartition(":")
    port = None
    if colon and port_text.isascii() and port_text.isdigit() and 0 < int(port_text) < 65536:
        text, port = host, int(port_text)
    network = as_network(text.removeprefix("[").removesuffix("]"))
    if network is not None:
        return AllowedHost(port, network=network)
    name = text.rstrip(".")
    bad = not name or set(name) & set("/:@[]?# ") or "*" in name.removeprefix("*.")
    if bad and name != "*":
        raise ValueError(entry)
    return AllowedHost(port, name)


def as_network(text: str) -> Network | None:
    """Return the network of an address or network in text, None if it is neither."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def as_address(text: str) -> Address | None:
    """Return an IP address without its zone (``%eth0``), None if it is none."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def inner_addresses(address: Address) -> list[Address]:
    """Return the address, and the IPv4 address inside a mapped, compatible or NAT64 one.

    Sources: RFC 4291, RFC 6052.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return [address, address.ipv4_mapped]
        if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
            return [address, ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return [address]


def is_public(address: Address) -> bool:
    """Return whether the address, and every address inside it, is public."""
    inner = inner_addresses(address)
    # A mapped address is reserved itself; the one inside decides.
    checked = inner[1:] if getattr(address, "ipv4_mapped", None) else inner
    return all(map(_is_public, checked))


def _is_public(address: Address) -> bool:
    return (
        address.is_global
        and not address.is_multicast
        and address not in _METADATA
        and not any(_in(network, address) for network in _NOT_PUBLIC)
    )


@dataclass(frozen=True, slots=True)
class HostAllowlist:
    """The entries of ``allow_hosts``."""

    entries: tuple[AllowedHost, ...]
    _shown: str = field(default="")

    @classmethod
    def read(cls, entries: Iterable[str]) -> HostAllowlist:
        """Read the entries.

        Raises:
            ValueError: one is wrong; its text is the argument.
        """
        listed = tuple(entries)
        return cls(tuple(read_entry(entry) for entry in listed), ", ".join(listed))

    def __str__(self) -> str:
        return self._shown

    def allows_host(self, host: str, port: int) -> bool:
        """Return whether a URL may name ``host``; its address is checked apart."""
        name = host.lower().rstrip(".")
        address = as_address(name)
        return any(
            entry.takes_port(port) and _names(entry, name, address) for entry in self.entries
        )

    def allows_address(self, text: str, port: int) -> bool:
        """Return whether a socket may connect to an address.

        Public addresses are allowed. Others need an entry for the address, its network, or
        ``localhost``; an entry for a name does not allow its addresses.
        """
        address = as_address(text)
        if address is None:
            return False
        if is_public(address):
            return True
        inner = inner_addresses(address)[-1]
        return any(
            entry.takes_port(port) and _holds(entry, address, inner) for entry in self.entries
        )


def _names(entry: AllowedHost, name: str, address: Address | None) -> bool:
    if entry.network is not None:
        return address is not None and _in(entry.network, address)
    if entry.name == "*":
        return True
    if entry.name.startswith("*."):
        return name.endswith(entry.name[1:])
    return name == entry.name


def _holds(entry: AllowedHost, address: Address, inner: Address) -> bool:
    if entry.network is not None:
        return _in(entry.network, address) or _in(entry.network, inner)
    return entry.name == "localhost" and any(
        candidate in network for candidate in (address, inner) for network in _LOOPBACK
    )


def _in(network: Network, address: Address) -> bool:
    return address.version == network.version and address in network


class _TooLongError(Exception):
    """The page takes too much CPU."""


class _Reader(HTMLParser):
    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._clock = clock
        self._end = clock() + MOST_SECONDS
        self._silent: list[str] = []
        self._links: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._check_time()
        shown_title = tag == "title" and self._silent == ["head"]
        if shown_title or tag in _SILENT:
            if len(self._silent) < _DEEPEST:
                self._silent.append(tag)
        elif tag == "body":
            self._silent.clear()  # also an unclosed head
        if tag == "a":
            self._links.append(dict(attrs).get("href"))
        if tag in _BREAKS:
            self.parts.append("\n")
        if tag in ("td", "th"):
            self.parts.append("\t")

    def _check_time(self) -> None:
        if self._clock() > self._end:
            raise _TooLongError

    def handle_endtag(self, tag: str) -> None:
        self._check_time()
        if tag in self._silent:
            del self._silent[self._silent.index(tag) :]
        if tag == "a" and self._links:
            target = self._links.pop()
            if target and not self._silent and not target.startswith(("#", "javascript:")):
                self.parts.append(f" ({target})")
        if tag in _BREAKS and tag not in _VOID:
            self.parts.append("\n")

    def handle_comment(self, data: str) -> None:
        self._check_time()

    def handle_data(self, data: str) -> None:
        self._check_time()
        if not self._silent or self._silent[-1] == "title":
            self.parts.append(re.sub(r"\s+", " ", data))


def page_text(html: str, clock: Callable[[], float] = time.thread_time) -> str:
    """Return the visible text, one line per block, with links in brackets after their text.

    A page that takes too much CPU, by ``clock`` in seconds, is cut.
    """
    reader = _Reader(clock)
    try:
        reader.feed(html)
        reader.close()
    except _TooLongError:
        reader.parts.append("\n[cut: the rest of this page takes too long to read]")
    lines = (
        re.sub(r" *\t *", "\t", re.sub(r" +", " ", line)).strip()
        for line in "".join(reader.parts).split("\n")
    )
    return "\n".join(line for line in lines if line)


MOST_BYTES = 2 << 20
"""Bytes of a page that are read."""

MOST_HOPS = 5
FAULT_BYTES = 500

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TEXT = ("text/", "application/json", "application/xml", "application/xhtml", "application/yaml")

SCHEMA: Json = {
    "type": "object",
    "properties": {"url": {"type": "string", "description": "An http or https address."}},
    "required": ["url"],
    "additionalProperties": False,
}
DESCRIPTION = "Get the text of a web page or file by its address."


class _Forbidden(OSError):
    """The address may not be connected to."""


class HttpGet:
    """Requests pages from allowed hosts at public or allowed addresses; checks every redirect.

    Args:
        hosts: the allowed hosts.
        threads: run the HTML parser.
        resolver: resolves names; None: the system's.
    """

    def __init__(
        self,
        hosts: HostAllowlist,
        threads: AbandonableThreads,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._hosts = hosts
        self._resolver = resolver
        self._threads = threads
        self._session: aiohttp.ClientSession | None = None

    async def run(self, arguments: Arguments) -> str:
        """Return the text at ``url``, at most 2 MiB.

        Raises:
            ToolFault: it is not allowed, cannot be reached, or answers with an error or no text.
        """
        url = _url(arguments["url"])
        try:
            return await self._follow(url)
        except aiohttp.ClientConnectorError as error:
            raise ToolFault(f"{url.host}: {_reason(error.os_error)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ToolFault(f"{url}: {error or type(error).__name__}") from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _follow(self, url: URL) -> str:
        for _ in range(MOST_HOPS + 1):
            self._check(url)
            async with self._opened().get(url, allow_redirects=False) as response:
                target = response.headers.get("Location")
                if response.status not in _REDIRECTS or target is None:
                    return await self._text(response)
            url = _url(str(url.join(URL(target))))
        raise ToolFault(f"{url} leads on more than {MOST_HOPS} times")

    async def _text(self, response: aiohttp.ClientResponse) -> str:
        kind = response.content_type
        ok = response.status < 400
        body, more = await _body(response, MOST_BYTES if ok else FAULT_BYTES)
        is_text = kind.startswith(_TEXT) or kind.endswith(("+json", "+xml"))
        if not is_text and b"\0" in body[:1024]:
            raise ToolFault(f"{response.url} is {kind}, not text")
        try:
            text = body.decode(response.get_encoding(), "replace")
        except (LookupError, RuntimeError):
            text = body.decode("utf-8", "replace")
        if "html" in kind:
            page = text
            text = await self._threads.run(lambda: page_text(page))
        if not ok:
            raise ToolFault(f"{response.url} answers {response.status} {response.reason}: {text}")
        return f"{text}\n[cut: only the first {MOST_BYTES >> 20} MiB were read]" if more else text

    def _check(self, url: URL) -> None:
        if not self._hosts.allows_host(url.host or "", url.port or 0):
            raise ToolFault(f"{url.host} may not be asked; allowed are: {self._hosts}")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,
                use_dns_cache=False,
                resolver=self._resolver,
                socket_factory=self._socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"User-Agent": "bagent"},
            )
        return self._session

    def _socket(self, info: Any) -> socket.socket:
        """Make the socket for one address; the address checked is the one connected to."""
        family, kind, protocol, _, target = info
        if not self._hosts.allows_address(str(target[0]), int(target[1])):
            raise _Forbidden(f"{target[0]} is a private address and not in allow_hosts")
        return socket.socket(family, kind, protocol)


def _url(text: str) -> URL:
    try:
        url = URL(text.strip())
        host, _ = url.host, url.port
    except ValueError as error:
        raise ToolFault(f"not an address: {error}") from None
    if url.scheme not in ("http", "https") or not host:
        raise ToolFault(f"not an http or https address: {text[:200]!r}")
    if url.user is not None or url.password is not None:
        raise ToolFault("an address with a user name is not asked")
    return url


def _reason(error: OSError) -> str:
    if isinstance(error, _Forbidden) or error.errno is None or error.errno < 0:
        return error.strerror or str(error)
    return os.strerror(error.errno)


async def _body(response: aiohttp.ClientResponse, most: int) -> tuple[bytes, bool]:
    """Return the first bytes, and whether there are more."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most:
            response.close()
            return bytes(body[:most]), True
    return bytes(body), False
