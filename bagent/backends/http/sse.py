"""Decoder of JSON server-sent events.

Source: WHATWG HTML, section 9.2. For servers that end each event with an empty line.
"""

from __future__ import annotations

from typing import Any

from bagent.text.json import decode_json


class InvalidEvent(ValueError):
    """The data of an event is not JSON; the message is its beginning."""


def normalize_newlines(data: bytes) -> bytes:
    """Replace lone carriage returns by newlines, in streams whose lines end in them.

    JSON text contains neither, so without a newline each carriage return ends a line. The last byte
    is kept: a newline may follow it.
    """
    if b"\n" in data or b"\r" not in data:
        return data
    return data[:-1].replace(b"\r", b"\n") + data[-1:]


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
            NoEvent: an event's data is not JSON.
        """
        lines = normalize_newlines(self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line.strip():
                event = self._end()
                if event is not None:
                    events.append(event)
            elif not line.startswith((b":", b"event:", b"id:", b"retry:")):
                self._keep(line)
        return events

    def finish(self) -> list[dict[str, Any]]:
        """Return the last event, which may lack its empty line.

        Raises:
            NoEvent: as :meth:`feed`.
        """
        return self.feed(b"\n\n")

    def _keep(self, line: bytes) -> None:
        if self._stray_size < 1 << 16:
            self._stray.append(line)
            self._stray_size += len(line)

    def _end(self) -> dict[str, Any] | None:
        raw = b"\n".join(self._data)
        self._data.clear()
        if not raw or raw == b"[DONE]":
            return None
        try:
            event = decode_json(raw)
        except ValueError:
            raise InvalidEvent(raw[:800].decode("utf-8", "replace")) from None
        return event if isinstance(event, dict) else None
