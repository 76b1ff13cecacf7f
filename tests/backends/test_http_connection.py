"""Answers of the HTTP/1.1 client as RFC 9112 reads them."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from bagent.backends.http.connection import Connection, PlainResponse
from bagent.backends.http.errors import HttpError, SwitchedProtocol

GZIP = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s"


class Wire(asyncio.Transport):
    """A transport that keeps nothing."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop the bytes of the request."""

    def abort(self) -> None:
        """Do nothing: the test ends the connection."""


def read(*pieces: bytes, closed: bool = False) -> bytes:
    """Return the body of an answer that comes in these pieces."""

    async def answer() -> bytes:
        connection = Connection()
        connection.connection_made(Wire())
        connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
        for piece in pieces:
            connection.data_received(piece)
        if closed:
            connection.connection_lost(None)
        if connection.error is not None:
            raise connection.error
        return await PlainResponse(connection).read()

    return asyncio.run(answer())


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_every_member_of_a_gzip_body_counts(size: int) -> None:
    body = gzip.compress(b"one ") + gzip.compress(b"") + gzip.compress(b"two")
    raw = GZIP % (len(body), body)
    assert read(*(raw[i : i + size] for i in range(0, len(raw), size))) == b"one two"


def test_a_coding_that_is_not_chunked_ends_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\n"
    assert read(head, b"whole", closed=True) == b"whole"


def test_an_answer_of_101_is_called_what_it_is() -> None:
    with pytest.raises(SwitchedProtocol):
        read(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")
    with pytest.raises(HttpError):
        read(b"SSH-2.0-OpenSSH\r\n")
