"""Start llmock, a mock of hosted providers that injects faults and judges its clients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from real.parts import LlmServer, venv

READY_WITHIN = 60.0


class Llmock(LlmServer):
    """A context manager; ``options`` are those of ``llmock serve``."""

    def __init__(self, options: Sequence[str], *, log: Path) -> None:
        super().__init__(log)
        self._options = options

    @property
    def verdict(self) -> dict[str, Any]:
        """What it thinks of its clients so far."""
        found: dict[str, Any] = msgspec.json.decode(self.get("/_llmock/verdict") or "{}")
        return found

    @property
    def requests(self) -> list[dict[str, Any]]:
        """What it was asked, oldest first."""
        found: dict[str, Any] = msgspec.json.decode(self.get("/_llmock/requests") or "{}")
        told: list[dict[str, Any]] = found.get("requests", [])
        return told

    def start(self) -> Self:
        """Start it and wait until it answers."""
        program = venv("llmock") / "bin" / "llmock"
        command = [program, "serve", "-h", "127.0.0.1", "-p", str(self.port), *self._options]
        self.launch([*command, "--log-level", "error"], os.environ)
        self.wait_until(lambda: self.get("/_llmock/verdict") is not None, READY_WITHIN)
        return self
