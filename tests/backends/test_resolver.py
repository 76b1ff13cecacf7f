"""Looking up host names without waiting for the slow ones."""

from __future__ import annotations

import asyncio
import socket

import pytest

from bagent.backends.http.resolver import ResolverLoop


async def look_up(host: str) -> set[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, 80, type=socket.SOCK_STREAM)
    return {entry[4][0] for entry in found if isinstance(entry[4][0], str)}


def run(host: str) -> set[str]:
    with asyncio.Runner(loop_factory=ResolverLoop) as runner:
        return runner.run(look_up(host))


def test_a_number_needs_no_look_up() -> None:
    assert run("127.0.0.1") == {"127.0.0.1"}
    assert run("::1") == {"::1"}


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "\udc80"])
def test_what_can_be_no_name_is_an_unknown_one(host: str) -> None:
    with pytest.raises(socket.gaierror):
        run(host)


def test_giving_up_is_at_once_and_leaves_the_loop_whole() -> None:
    async def give_up() -> set[str]:
        task = asyncio.ensure_future(look_up("localhost"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await look_up("localhost")

    with asyncio.Runner(loop_factory=ResolverLoop) as runner:
        assert runner.run(give_up())
