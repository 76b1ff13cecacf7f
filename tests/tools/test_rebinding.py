"""A name that leads elsewhere from one moment to the next leads nowhere private."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from bagent.tools.builtin.host_allowlist import HostAllowlist
from bagent.tools.builtin.http_get import HttpGet
from bagent.tools.threads import AbandonableThreads
from bagent.tools.types import ToolFault
from support.fake_server import FakeServer
from support.jumping_loop import in_event_loop


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
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=kind, proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]  # fmt: skip

    async def close(self) -> None:
        """Nothing to close."""


def fault_of(names: Names, url: str, *allowed: str) -> str:
    """What the tool says of a page that it may not have."""

    async def main() -> str:
        tool = HttpGet(
            HostAllowlist.read(["pages.example", *allowed]), AbandonableThreads("pages"), names
        )
        try:
            with pytest.raises(ToolFault) as caught:
                await tool.run({"url": url})
        finally:
            await tool.close()
        return caught.value.message

    return asyncio.run(main())


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "::1", "169.254.169.254", "::ffff:127.0.0.1", "10.0.0.1", "0.0.0.0", "fe80::1"],
)
def test_a_listed_name_that_leads_to_a_private_address_is_not_asked(address: str) -> None:
    names = Names(address)
    assert "is a private address" in fault_of(names, "http://pages.example:8000/x")


def test_the_address_that_is_checked_is_the_one_connected_to() -> None:
    with FakeServer() as fs:
        port = int(fs.url.rsplit(":", 1)[1].split("/")[0])
        names = Names("127.0.0.1", "127.0.0.2")
        words = fault_of(names, f"http://pages.example:{port}/x")
        assert "127.0.0.1 is a private address" in words
        assert names.asked == 1
        assert not fs.requests


@in_event_loop
async def test_a_redirect_to_a_name_that_leads_home_is_not_followed() -> None:
    async def hop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        where = b"http://pages.example:%d/again" % port_of[0]
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: " + where + b"\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        asked.append(1)
        writer.close()

    asked: list[int] = []
    port_of = [0]
    server = await asyncio.start_server(hop, "127.0.0.1", 0)
    port_of[0] = server.sockets[0].getsockname()[1]
    tool = HttpGet(
        HostAllowlist.read([f"127.0.0.1:{port_of[0]}", "pages.example"]),
        AbandonableThreads("pages"),
        Names("169.254.169.254"),
    )
    async with server:
        with pytest.raises(ToolFault) as caught:
            await tool.run({"url": f"http://127.0.0.1:{port_of[0]}/"})
    await tool.close()
    assert "169.254.169.254 is a private address" in caught.value.message
    assert asked == [1]
