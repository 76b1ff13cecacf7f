"""Fixtures of the tests of backends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.http_servers import refusing_port


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port of 127.0.0.1 at which nobody listens."""
    with refusing_port() as port:
        yield port
