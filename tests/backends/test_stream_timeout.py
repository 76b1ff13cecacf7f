"""Network errors in words, without a network."""

from __future__ import annotations

import asyncio
import errno
import socket
from types import SimpleNamespace

import aiohttp
import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.aiohttp_client import translate_error
from bagent.backends.http.client import (
    NETWORK_ERRORS,
    StreamStalled,
    StreamTimeout,
    is_stale,
    network_failure,
    proxy_note,
)

HERE = Endpoint("here", "http://user:s3cret@127.0.0.1:1/v1", query={"key": "s3cret"})
KEY = SimpleNamespace(host="127.0.0.1", port=1, ssl=True)


def connector_error(number, words=None):
    return aiohttp.ClientConnectorError(KEY, OSError(number, words or "why"))


def response_error(kind=aiohttp.ClientResponseError, status=400, message="Bad status line"):
    url = URL("http://user:s3cret@127.0.0.1:1/v1?key=s3cret")
    headers = CIMultiDictProxy(CIMultiDict())
    info = aiohttp.RequestInfo(url, "POST", headers, url)
    return kind(info, (), status=status, message=message)


def own(error):
    """The error as it comes out of the transport."""
    return translate_error(error) if isinstance(error, aiohttp.ClientError) else error


@pytest.mark.parametrize(
    ("error", "kind", "passing", "words"),
    [
        (aiohttp.ConnectionTimeoutError(), "connect", True, "no connection to here within 3 s"),
        (StreamStalled("sent no first token within 5 s"), "timeout", True,
         "here sent no first token within 5 s"),
        (TimeoutError(), "timeout", True, "no whole answer from here within 9 s"),
        (aiohttp.ServerTimeoutError(), "timeout", True, "no whole answer from here within 9 s"),
        (connector_error(errno.ECONNREFUSED, "refused"), "connect", True,
         "cannot connect to here: refused"),
        (connector_error(errno.EHOSTUNREACH, "no route"), "connect", True,
         "cannot connect to here: no route"),
        (aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(-2, "unknown name")), "connect",
         True, "cannot connect to here: unknown name"),
        (aiohttp.ServerDisconnectedError(), "connect", True,
         "here closed the connection without an answer"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "connect", True,
         "here closed the connection without an answer"),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), "connect", True,
         "here closed the connection without an answer"),
        (aiohttp.ClientOSError(errno.EPIPE, "pipe"), "connect", True,
         "here closed the connection without an answer"),
        (aiohttp.ClientOSError(errno.ETIMEDOUT, "timed out"), "connect", True,
         "the connection to here broke: timed out"),
        (aiohttp.ClientPayloadError("not complete"), "bad_response", True,
         "the answer of here broke off: not complete"),
        (response_error(), "bad_response", True, "no HTTP from here: Bad status line"),
        (response_error(aiohttp.ClientHttpProxyError, 502), "connect", True,
         "the proxy refused to reach here: HTTP 502"),
        (response_error(aiohttp.ClientHttpProxyError, 407), "auth", False,
         "the proxy refused to reach here: HTTP 407"),
        (aiohttp.InvalidURL("http://user:s3cret@"), "rejected", False,
         "not an address to send to: http://127.0.0.1:1/v1"),
        (aiohttp.NonHttpUrlClientError("x"), "rejected", False,
         "not an address to send to: http://127.0.0.1:1/v1"),
        (ValueError("line break in header"), "rejected", False,
         "no request to here can be made: line break in header"),
    ],
)  # fmt: skip
def test_every_network_error_has_a_kind_and_words(error, kind, passing, words):
    assert isinstance(own(error), NETWORK_ERRORS)
    found = network_failure(own(error), HERE, Timeouts(connect=3, total=9))
    assert (found.kind, found.passing, found.message) == (kind, passing, words)
    assert found.status is None
    assert not found.busy


@pytest.mark.parametrize("error", [response_error(), connector_error(1), aiohttp.InvalidURL("x")])
def test_no_secret_of_an_address_is_shown(error):
    proxied = Endpoint("here", HERE.url, proxy="http://user:s3cret@proxy:3128")
    message = network_failure(own(error), proxied, Timeouts()).message
    assert "s3cret" not in message


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM]
)
def test_a_full_machine_is_waited_for_and_costs_no_try(number):
    for error in (connector_error(number), aiohttp.ClientOSError(number, "why")):
        found = network_failure(own(error), HERE, Timeouts())
        assert (found.kind, found.passing, found.busy) == ("overloaded", True, True)
        assert "this machine" in found.message


def test_limits_that_are_not_set_are_not_named():
    no_limits = Timeouts(connect=None, total=None)
    assert network_failure(TimeoutError(), HERE, no_limits).message == "no whole answer from here"
    error = aiohttp.ConnectionTimeoutError()
    assert network_failure(own(error), HERE, no_limits).message == "no connection to here"


@pytest.mark.parametrize(
    ("error", "stale"),
    [
        (aiohttp.ServerDisconnectedError(), True),
        (ConnectionResetError(), True),
        (aiohttp.ClientConnectionResetError(), True),
        (BrokenPipeError(), True),
        (aiohttp.ClientOSError(errno.ECONNRESET, "x"), True),
        (connector_error(errno.ECONNREFUSED), False),
        (aiohttp.ClientPayloadError(), False),
        (TimeoutError(), False),
        (aiohttp.ServerTimeoutError(), False),
    ],
)
def test_a_closed_connection_is_told_from_other_errors(error, stale):
    assert is_stale(own(error)) is stale


def test_a_proxy_is_named_without_its_password():
    assert proxy_note(HERE) == ""
    proxied = Endpoint("here", "http://x", proxy="http://user:s3cret@proxy:3128")
    assert proxy_note(proxied) == " through the proxy http://proxy:3128"


def test_a_time_limit_of_somebody_else_stays_what_it_is():
    async def main():
        async with StreamTimeout(5.0, 5.0):
            raise TimeoutError("not mine")

    with pytest.raises(TimeoutError, match="not mine") as error:
        asyncio.run(main())
    assert not isinstance(error.value, StreamStalled)


def test_patience_ends_with_its_own_words():
    async def main(lifted):
        async with StreamTimeout(0.01, 0.02) as patience:
            if lifted:
                patience.disable()
                await asyncio.sleep(0.05)
            patience.on_chunk()
            await asyncio.sleep(60)

    for lifted in (False, True):
        with pytest.raises(StreamStalled, match=r"sent nothing more for 0\.02 s"):
            asyncio.run(main(lifted))


def test_patience_looks_again_where_pieces_came_since_its_timer_was_set():
    async def main():
        async with StreamTimeout(0.05, 0.05) as patience:
            for _ in range(4):
                await asyncio.sleep(0.02)
                patience.on_chunk()
            patience.finish_within(0.01)  # earlier than the timer: it is set anew
            await asyncio.sleep(60)

    with pytest.raises(StreamStalled, match=r"sent nothing more for 0\.05 s"):
        asyncio.run(main())


def test_patience_that_is_over_ends_nothing_later():
    async def main():
        async with StreamTimeout(0.01, 0.01) as patience:
            patience.on_chunk()
        await asyncio.sleep(0.03)
        return "on"

    assert asyncio.run(main()) == "on"


def test_a_cancellation_of_somebody_else_is_no_lack_of_patience():
    async def wait():
        async with StreamTimeout(5.0, 5.0):
            await asyncio.sleep(60)

    async def main():
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(main())
