"""What the scripted server saw: one record per request, and a ledger that tests can wait on."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Json = Any


@dataclass(slots=True)
class ReceivedRequest:
    """One request. Times are seconds of ``time.monotonic()``, comparable across processes.

    ``rows`` are the row ids found in its prompts, one per prompt; ``prompts`` the prompt texts.
    ``answered`` and ``status`` stay None where no answer was sent. ``cancelled`` says that the
    client went away first, ``reused`` that the connection had carried a request before.
    """

    number: int
    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    received: float
    peer: int = 0
    reused: bool = False
    body: Json = None
    rows: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    answered: float | None = None
    status: int | None = None
    cancelled: bool = False

    @property
    def row_id(self) -> str | None:
        """The row id of a request with one prompt; of a list call the first."""
        return self.rows[0] if self.rows else None


@dataclass(slots=True)
class RequestLog:
    """Every request so far, safe to read from another thread."""

    requests: list[ReceivedRequest] = field(default_factory=list)
    probes: list[ReceivedRequest] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    received: int = 0
    in_flight: int = 0
    peak: int = 0
    finished: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def begin(self, seen: ReceivedRequest) -> None:
        """Note that a request for an answer came in."""
        with self.changed:
            self.requests.append(seen)
            self.received += 1
            self.counts.update(seen.rows)
            self.in_flight += 1
            self.peak = max(self.peak, self.in_flight)
            self.changed.notify_all()

    def end(self, seen: ReceivedRequest, status: int | None) -> None:
        """Note that a request was answered, dropped or given up."""
        with self.changed:
            seen.status = status
            if status is not None:
                seen.answered = time.monotonic()
            self.in_flight -= 1
            self.finished += 1
            self.changed.notify_all()

    def probe(self, seen: ReceivedRequest) -> None:
        """Note a request that asks for no answer."""
        with self.changed:
            self.probes.append(seen)

    def fault(self, message: str) -> None:
        """Note something that the client should not have done."""
        with self.changed:
            self.faults.append(message)

    def wait_until(self, count: int, name: str, timeout: float) -> None:
        """Block until the number called ``name`` is at least ``count``.

        Args:
            name: ``received``, ``finished`` or ``in_flight``.
            timeout: seconds.

        Raises:
            AssertionError: the number did not get there in time.
        """

        def number() -> int:
            return int(getattr(self, name))

        with self.changed:
            if not self.changed.wait_for(lambda: number() >= count, timeout):
                raise AssertionError(f"{number()} requests {name} in {timeout} s, not {count}")
