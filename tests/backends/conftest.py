"""Fixtures of the tests of backends."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def unused_port() -> int:
    """A port of 127.0.0.1 at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
