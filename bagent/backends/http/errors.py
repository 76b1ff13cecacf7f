"""Errors of HTTP requests, independent of the client.

They do not derive from aiohttp's, because importing it takes 0.2 s, which a run over plain HTTP
saves.

::

    HttpError                 the connection or the answer was bad
    ├── PayloadError          the answer broke off, or cannot be unpacked
    ├── EndlessBody           the answer is longer than any
    ├── SwitchedProtocol      the server answered 101 without a request to switch
    ├── ServerClosed          the server closed the connection before it answered a byte
    ├── ProxyRefused          the proxy refused to reach the server
    ├── BadAddress            not an address to send to (a ValueError too)
    ├── ConnectTimeout        no connection within its limit (a TimeoutError too)
    └── NotConnected          no connection could be made (an OSError too)
        ├── CertificateRefused
        └── NoTls
"""

from __future__ import annotations

import os
import re

MAX_BODY = 1 << 27
"""Bytes of a decompressed body: half a million streamed tokens, or two thousand embeddings. An
endless response would fill the memory."""

_SEVERAL = re.compile(r"Multiple exceptions: \[Errno (\d+)\]")


class HttpError(Exception):
    """The connection or the answer was bad."""


class PayloadError(HttpError):
    """The answer broke off, or cannot be unpacked."""


class EndlessBody(HttpError):
    """The body exceeds :data:`MAX_BODY`."""

    def __init__(self) -> None:
        super().__init__(f"an answer of more than {MAX_BODY >> 20} MiB")


class SwitchedProtocol(HttpError):
    """The server answered 101 (Switching Protocols)."""


class ServerClosed(HttpError):
    """The server closed the connection before it answered a byte."""


class ProxyRefused(HttpError):
    """The proxy refused to reach the server."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


class BadAddress(HttpError, ValueError):
    """The address is invalid."""


class ConnectTimeout(HttpError, TimeoutError):
    """The connection was not made within its limit."""


class NotConnected(HttpError, OSError):
    """The connection could not be made; ``os_error`` is the cause."""

    def __init__(self, os_error: OSError) -> None:
        OSError.__init__(self, os_error.errno, os_error_text(os_error))
        self.os_error = os_error


class CertificateRefused(NotConnected):
    """The server's certificate is not trusted."""

    def __init__(self, message: str) -> None:
        super().__init__(OSError(message))
        self.message = message


class NoTls(NotConnected):
    """The TLS handshake failed."""


def os_error_text(error: OSError) -> str:
    """Return the error's message without the addresses that were tried."""
    text = error.strerror or str(error)
    several = _SEVERAL.match(text)
    if several:
        return os.strerror(int(several[1]))
    return os.strerror(error.errno) if error.errno and text.startswith("Connect call") else text
