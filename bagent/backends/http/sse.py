"""JSON server-sent events: their decoder, and the base of streams whose events name their type.

Source: WHATWG HTML, section 9.2. For servers that end each event with an empty line.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from bagent.backends.failures import failure_from_body, shorten
from bagent.text.json import decode_json
from bagent.types import Failure, Reply, ToolCall

_LONE_RETURN = re.compile(rb"\r(?!\n)").search


class InvalidEvent(ValueError):
    """The data of an event is not JSON in UTF-8; the message is its beginning."""


def normalize_newlines(data: bytes) -> bytes:
    """Replace lone carriage returns by newlines, since each of them ends a line.

    The last byte is kept: a newline may follow it.
    """
    if b"\r" not in data or not _LONE_RETURN(data):
        return data
    return data[:-1].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + data[-1:]


class SSEDecoder:
    """Decodes events from chunks of bytes.

    ``stray`` holds up to 64 KiB of lines that belong to no event stream, such as an error page.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._stray: list[bytes] = []
        self._stray_size = 0

    @property
    def stray(self) -> bytes:
        """The lines that are not part of an event stream."""
        return b"\n".join(self._stray)

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the objects of the events that ended in ``data``.

        Raises:
            InvalidEvent: an event's data is not JSON.
        """
        lines = normalize_newlines(self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line.strip():
                events += self._end()
            elif not line.startswith((b":", b"event:", b"id:", b"retry:")):
                self._keep(line)
        return events

    def finish(self) -> list[dict[str, Any]]:
        """Return the last event, which may lack its empty line.

        Raises:
            InvalidEvent: as :meth:`feed`.
        """
        return self.feed(b"\n\n")

    def _keep(self, line: bytes) -> None:
        if self._stray_size < 1 << 16:
            self._stray.append(line)
            self._stray_size += len(line)

    def _end(self) -> list[dict[str, Any]]:
        raw = b"\n".join(self._data)
        self._data.clear()
        if not raw or raw == b"[DONE]":
            return []
        try:
            value = decode_json(raw, strict=True)
        except ValueError:
            raise InvalidEvent(raw[:800].decode("utf-8", "replace")) from None
        events = value if isinstance(value, list) else [value]
        return [event for event in events if isinstance(event, dict)]


class TypedEventStream(ABC):
    """Reads the events of a streamed answer; see :class:`bagent.backends.http.request.EventReader`.

    Only the event that ends an answer completes it, not the end of the stream.

    Args:
        started: when the request was sent, on ``clock`` (seconds).
        on_call: gets every tool call once its arguments are whole.
    """

    last_event = "the last event"
    """What a stream that was cut off lacks, for people."""

    def __init__(
        self,
        started: float,
        clock: Callable[[], float],
        on_call: Callable[[ToolCall], None] | None = None,
    ) -> None:
        self._on_call = on_call
        self._clock = clock
        self._started = started
        self.first_token: float | None = None
        self.pieces = 0
        self.done = False
        self.error: Failure | None = None
        self._lines = SSEDecoder()

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the body."""
        self._take(lambda: self._lines.feed(data))

    def _take(self, read: Callable[[], list[dict[str, Any]]]) -> None:
        try:
            for event in read():
                if self.done or self.error is not None:
                    return
                kind = event.get("type")
                if kind == "error" or (kind is None and "error" in event):
                    self.error = failure_from_body(event, {}) or _broken(
                        "an error without a message"
                    )
                    return
                self._event(str(kind), event)
        except InvalidEvent as error:
            self.error = self.error or _broken(f"not JSON in the stream: {shorten(str(error))}")

    def _seen(self) -> None:
        """Record that a piece of an answer came."""
        if self.first_token is None:
            self.first_token = self._clock()

    @abstractmethod
    def _event(self, kind: str, event: dict[str, Any]) -> None:
        """Apply an event that is no error."""

    @property
    @abstractmethod
    def whole(self) -> bool:
        """Whether the answer is complete: losing the rest does no harm."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The text received so far."""

    @abstractmethod
    def _reply(self, ttft_ms: float | None) -> Reply | Failure:
        """Return the complete answer."""

    @abstractmethod
    def _read_whole(self, raw: bytes) -> Reply | Failure:
        """Return the answer of a body that is no event stream."""

    def result(self) -> Reply | Failure:
        """Return the reply, or the failure of a stream without its last event."""
        self._take(self._lines.finish)
        if self.error is not None and not self.whole:
            return msgspec.structs.replace(self.error, text=self.text or None)
        if not self.whole:
            if self._lines.stray and not self.pieces:
                return self._read_whole(self._lines.stray)
            failure = _broken(f"the stream ended without {self.last_event}")
            return msgspec.structs.replace(failure, text=self.text or None)
        ttft = None if self.first_token is None else (self.first_token - self._started) * 1000
        return self._reply(ttft)


def _broken(message: str) -> Failure:
    """Return the failure of a stream that breaks off or holds no events."""
    return Failure("bad_response", message, passing=True, status=200)
