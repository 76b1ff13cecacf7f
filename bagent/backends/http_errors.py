"""Errors of HTTP requests, whichever client sent them.

They are the project's own, since to import aiohttp takes 0.2 s, which a run over plain HTTP need
not spend.

::

    HttpError                 the connection or the answer was bad
    ├── PayloadError          the answer broke off, or cannot be unpacked
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

_SEVERAL = re.compile(r"Multiple exceptions: \[Errno (\d+)\]")


class HttpError(Exception):
    """The connection or the answer was bad."""


class PayloadError(HttpError):
    """The answer broke off, or cannot be unpacked."""


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
        OSError.__init__(self, os_error.errno, _words(os_error))
        self.os_error = os_error


class CertificateRefused(NotConnected):
    """The server's certificate is not trusted."""

    def __init__(self, words: str) -> None:
        super().__init__(OSError(words))
        self.words = words


class NoTls(NotConnected):
    """The server does not speak TLS, or not in a way that both know."""


def _words(error: OSError) -> str:
    """What went wrong, in a few words: a name with several addresses tells it for each of them."""
    words = error.strerror or str(error)
    several = _SEVERAL.match(words)
    return os.strerror(int(several[1])) if several else words
