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
    network_failure,
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


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM]
)
def test_a_full_machine_is_waited_for_and_costs_no_try(number):
    for error in (connector_error(number), aiohttp.ClientOSError(number, "why")):
        found = network_failure(own(error), HERE, Timeouts())
        assert (found.kind, found.passing, found.busy) == ("overloaded", True, True)
        assert "this machine" in found.message


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
