"""A name that leads elsewhere from one moment to the next leads nowhere private."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from bagent.tools.builtin.http_get import HostAllowlist, HttpGet
from bagent.tools.threads import AbandonableThreads
from bagent.tools.types import ToolFault
from support.fake_server import FakeServer


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
