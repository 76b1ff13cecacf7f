"""Errors of HTTP requests, whichever client sent them.

They are the project's own, since to import aiohttp takes 0.2 s, which a run over plain HTTP need
not spend.

::

    HttpError                 the connection or the answer was bad
    ├── PayloadError          the answer broke off, or cannot be unpacked
    ├── EndlessBody           the answer is longer than any
    ├── SwitchedProtocol      the server answered 101, which nobody asked for
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
"""Bytes that the body of an answer may have, unpacked. Half a million streamed tokens take as many,
or two thousand embeddings; a server that never ends would fill the memory."""

_SEVERAL = re.compile(r"Multiple exceptions: \[Errno (\d+)\]")


class HttpError(Exception):
    """The connection or the answer was bad."""


class PayloadError(HttpError):
    """The answer broke off, or cannot be unpacked."""


class EndlessBody(HttpError):
    """The answer is longer than any."""

    def __init__(self) -> None:
        super().__init__(f"an answer of more than {MAX_BODY >> 20} MiB")


class SwitchedProtocol(HttpError):
    """The server answered 101: it speaks another protocol from here on."""


class ServerClosed(HttpError):
    """The server closed the connection before it answered a byte."""


class ProxyRefused(HttpError):
    """The proxy refused to reach the server, with an HTTP ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


class BadAddress(HttpError, ValueError):
    """Not an address to send to."""


class ConnectTimeout(HttpError, TimeoutError):
    """No connection within its limit."""


class NotConnected(HttpError, OSError):
    """No connection could be made; ``os_error`` says why."""

    def __init__(self, os_error: OSError) -> None:
        OSError.__init__(self, os_error.errno, os_error_text(os_error))
        self.os_error = os_error


class CertificateRefused(NotConnected):
    """The server's certificate is not trusted."""

    def __init__(self, message: str) -> None:
        super().__init__(OSError(message))
        self.words = message


class NoTls(NotConnected):
    """The server does not speak TLS, or not in a way that both know."""


def os_error_text(error: OSError) -> str:
    """What went wrong, without the addresses that were tried: a name may have several of them."""
    text = error.strerror or str(error)
    several = _SEVERAL.match(text)
    if several:
        return os.strerror(int(several[1]))
    return os.strerror(error.errno) if error.errno and text.startswith("Connect call") else text
