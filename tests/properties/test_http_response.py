"""Responses of HTTP/1.1, in whatever pieces they come and whatever they hold."""

from __future__ import annotations

import asyncio
import gzip
import zlib

from hypothesis import example, given
from hypothesis import strategies as st

from bagent.backends.http.connection import Connection, PlainResponse
from bagent.backends.http.errors import HttpError, SwitchedProtocol
from support.strategies import CUTS, pieces

BODIES = st.binary(max_size=300) | st.sampled_from([b'{"a":1}' * 50, b"\r\n0\r\n\r\n"])
NAMES = st.text("abcXYZ-", min_size=1, max_size=8).map(lambda name: f"x-{name}")
VALUES = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=12)


class Wire(asyncio.Transport):
    """A transport that keeps nothing."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop the bytes of the request."""

    def abort(self) -> None:
        """Do nothing: the test ends the connection."""


Result = tuple[int, dict[str, str], bytes] | type[HttpError]


def respond(parts: list[bytes]) -> Result:
    """Return status, headers and body of a response in these parts, or the class of its error."""

    async def read() -> tuple[int, dict[str, str], bytes]:
        connection = Connection()
        connection.connection_made(Wire())
        connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
        response = None
        for part in parts:
            connection.data_received(part)
            if connection.headed and response is None:
                response = PlainResponse(connection)
            if connection.error is not None:
                break
        connection.connection_lost(None)
        if response is None:
            assert connection.error is not None
            raise connection.error
        body = await asyncio.wait_for(response.read(), 5)
        return response.status, dict(response.headers), body

    try:
        return asyncio.run(read())
    except HttpError as error:
        return type(error)


def chunked(body: bytes, cuts: list[int], trailers: bytes) -> bytes:
    parts = [b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in pieces(body, cuts)]
    return b"".join(parts) + b"0\r\n" + trailers + b"\r\n"


PACKINGS = {
    "": lambda body: body,
    "gzip": gzip.compress,
    "gzip, in members": lambda body: b"".join(map(gzip.compress, (body[:4], b"", body[4:]))),
    "deflate": zlib.compress,
}


@example(200, {}, b"", "", "chunked", False, True, [], [40, 80])
@example(200, {}, b"one two", "gzip, in members", "length", False, False, [], [90, 120])
@example(200, {}, b"whole", "", "identity", False, False, [], [])
@given(
    status=st.sampled_from([200, 201, 400, 404, 429, 500, 503, 529]),
    headers=st.dictionaries(NAMES, VALUES, max_size=3),
    body=BODIES,
    packing=st.sampled_from(sorted(PACKINGS)),
    framing=st.sampled_from(["length", "chunked", "identity", "close"]),
    interim=st.booleans(),
    trailers=st.booleans(),
    chunks=CUTS,
    cuts=CUTS,
)
def test_any_cut_of_a_response_gives_its_status_and_body(
    status, headers, body, packing, framing, interim, trailers, chunks, cuts
):
    packed = PACKINGS[packing](body)
    fields = dict(headers)
    if packing:
        fields["content-encoding"] = packing.partition(",")[0]
    if framing == "length":
        fields["content-length"] = str(len(packed))
    elif framing == "chunked":
        fields["transfer-encoding"] = "chunked"
        packed = chunked(packed, chunks, b"x-late: 1\r\n" * trailers)
    elif framing == "identity":
        fields["transfer-encoding"] = "identity"
    head = f"HTTP/1.1 {status} Some Reason\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    raw = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * interim
    raw += head.encode() + b"\r\n" + packed
    assert respond(pieces(raw, cuts)) == (status, fields, body)


@given(body=BODIES, framing=st.sampled_from(["length", "chunked"]), cut=st.integers(0, 10_000))
def test_a_response_that_breaks_off_is_an_error(body, framing, cut):
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    if framing == "chunked":
        head, body = (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            chunked(body, [], b""),
        )
    raw = head + body
    result = respond([raw[: cut % len(raw)]])
    assert isinstance(result, type)


def test_an_answer_of_101_is_called_what_it_is():
    upgrade = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    assert respond([upgrade]) is SwitchedProtocol
    assert issubclass(respond([b"SSH-2.0-OpenSSH\r\n"]), HttpError)


@given(body=BODIES, packing=st.sampled_from(["gzip", "deflate"]), cut=st.integers(0, 10_000))
@example(body=b"", packing="deflate", cut=0)
def test_a_packed_body_that_is_damaged_is_an_error_or_its_beginning(body, packing, cut):
    """Servers that flush a stream may leave its end out."""
    packed = PACKINGS[packing](body)
    packed = packed[: cut % len(packed)]
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: %s\r\ncontent-length: %d\r\n\r\n"
    result = respond([head % (packing.encode(), len(packed)), packed])
    assert isinstance(result, type) or body.startswith(result[2])


LINES = (
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.0 200\r\n",
    b"HTTP/1.1 204 No Content\r\n",
    b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/2 200\r\n",
    b"content-length: 5\r\n",
    b"content-length: 99999999999999999999999\r\n",
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: gzip, chunked\r\n",
    b"content-encoding: gzip\r\n",
    b"content-encoding: deflate\r\n",
    b"connection: close\r\n",
    b"x-a: \xff\r\n",
    b"\r\n",
    b"\n",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"fffffffffffffffff\r\n",
    b"hello",
    b"SSH-2.0\r\n",
    gzip.compress(b"hello"),
)


@given(
    st.lists(st.sampled_from(LINES) | st.binary(max_size=6), max_size=10).map(b"".join),
    CUTS,
)
def test_whatever_a_server_sends_ends_in_a_response_or_an_http_error(raw, cuts):
    """Neither other exceptions nor a wait for ever; and the pieces make no difference."""
    whole, cut = respond([raw] if raw else []), respond(pieces(raw, cuts))
    assert isinstance(whole, type) == isinstance(cut, type)
    if not isinstance(whole, type):
        assert whole == cut
