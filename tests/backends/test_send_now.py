"""A plain call over an open connection needs no task, and fares as one with a task."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from bagent.backends.keys import KeySource
from bagent.backends.request import Request
from bagent.backends.wrappers import KeyRotatingBackend
from bagent.money.gpu_time import GpuTimeBackend
from bagent.types import Reply
from support.backend_calls import PLAIN, QUICK, backend, endpoint, failure, reply, request
from support.replies import close, hang, ok, status


async def send_now(of, to, call: Request):
    """The exchange of a call without a task, None if it needs one."""
    ended = asyncio.Event()
    sent = of.send_now(to, call, QUICK, ended.set)
    if sent is None:
        return None
    await asyncio.wait_for(ended.wait(), 10.0)
    return sent.exchange()


def without_times(exchange):
    """An exchange without what differs from request to request."""
    (result,) = exchange.results
    if isinstance(result, Reply):
        result = msgspec.structs.replace(result, request_id=None)
    return msgspec.structs.replace(
        exchange, results=[result], sent=0.0, first_byte=0.0, done=0.0, request_id=None
    )


@pytest.mark.parametrize("answer", [ok("good"), status(429), status(400)])
async def test_a_call_without_a_task_has_the_exchange_of_one_with_a_task(fs, answer):
    fs.set_script({"r0": [ok()], "r1": [answer, answer]})
    to = endpoint(fs.url)
    async with backend() as of:
        assert await send_now(of, to, request("r0")) is None  # no connection is open
        reply(await of.send(to, [request("r0")], QUICK))
        exchanges = [
            await send_now(of, to, request("r1")),
            await of.send(to, [request("r1")], QUICK),
        ]
    first, second = map(without_times, exchanges)
    assert first == second
    assert fs.connections == 1


@pytest.mark.parametrize("reset", [False, True])
async def test_a_call_on_a_connection_that_was_closed_is_worth_another_try_for_free(fs, reset):
    fs.set_script({"r0": [ok()], "r1": [close(reset=reset), ok("good")]})
    to = endpoint(fs.url)
    async with backend() as of:
        await of.send(to, [request("r0")], QUICK)
        stale = await send_now(of, to, request("r1"))
        assert failure(stale).kind == "connect"
        assert stale.stale_connection
        assert await send_now(of, to, request("r1")) is None
        assert reply(await of.send(to, [request("r1")], QUICK)).text == "good"


async def test_a_call_ends_when_it_is_cancelled(fs):
    fs.set_script({"r0": [ok()], "r1": [hang()]})
    to = endpoint(fs.url)
    async with backend() as of:
        await of.send(to, [request("r0")], QUICK)
        ended = asyncio.Event()
        sent = of.send_now(to, request("r1"), QUICK, ended.set)
        sent.cancel()
        await asyncio.wait_for(ended.wait(), 10.0)
        assert failure(sent.exchange()).kind == "bad_response"


async def test_a_call_that_is_cancelled_after_its_end_leaves_the_connection_to_others(fs):
    fs.set_script({"r0": [ok()], "r1": [ok()], "r2": [ok("good")]})
    to = endpoint(fs.url)
    async with backend() as of:
        await of.send(to, [request("r0")], QUICK)
        ended = asyncio.Event()
        sent = of.send_now(to, request("r1"), QUICK, ended.set)
        await ended.wait()
        sent.cancel()
        reply(sent.exchange())
        assert reply(await send_now(of, to, request("r2"))).text == "good"
    assert fs.connections == 1


@pytest.mark.parametrize(
    "call",
    [
        request(stream=True),
        request(returning=1),
        request(settings=msgspec.structs.replace(PLAIN, schema_excludes_tools=True)),
    ],
    ids=["streamed", "returning from tools", "a schema beside tools"],
)
async def test_a_call_with_optional_features_has_a_task(fs, call):
    to = endpoint(fs.url)
    async with backend() as of:
        await of.send(to, [request()], QUICK)
        assert await send_now(of, to, call) is None


async def test_a_key_that_was_refused_is_renewed_before_the_call_is_sent_again(fs):
    fs.set_script({"r0": [ok()], "r1": [status(401), ok("good")]})
    to = msgspec.structs.replace(endpoint(fs.url), headers={"Authorization": "Bearer old"})
    keys = KeySource("old", lambda: "new")
    async with backend() as inner:
        of = KeyRotatingBackend(inner, keys)
        await of.send(to, [request("r0")], QUICK)
        refused = await send_now(of, to, request("r1"))
        assert refused is not None and refused.new_key
        assert await send_now(of, to, request("r1")) is None  # renewal takes a task
        assert reply(await of.send(to, [request("r1")], QUICK)).text == "good"
    assert keys.key == "new"


async def test_a_call_without_a_task_gets_its_share_of_gpu_time(fs):
    fs.set_script({"r0": [ok()], "r1": [ok()]})
    to = endpoint(fs.url)
    times = iter(range(100))
    async with backend() as inner:
        of = GpuTimeBackend(inner, lambda: float(next(times)))
        await of.send(to, [request("r0")], QUICK)
        assert reply(await send_now(of, to, request("r1"))).usage.gpu_seconds == 1.0
