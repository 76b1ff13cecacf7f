"""``run.log``: the messages of a run, one a line."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Literal

from bagent.observe.formatting import visible

Level = Literal["info", "warning", "error"]

MAX_BYTES = 32 * 2**20
"""One start writes at most so many bytes."""

_MAX_TEXT = 4000
_MESSAGES_KEPT = 1000


class RunLog:
    """Appends messages as ``2026-01-02T03:04:05.678Z warning text``.

    An equal message is written the first time, then the 10th, 100th, 1,000th ... time with that
    count, and its last count when the log is closed. Further lines of a message are indented, so
    foreign text cannot pass for a message. A log that cannot be written stops nothing;
    ``on_failure`` gets the first failure.

    Args:
        path: the file, made if missing, else appended to.
        clock: Unix seconds.
        on_failure: takes a one-line message.
        max_bytes: the most that this start writes.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        on_failure: Callable[[str], None] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._path = path
        self._clock = clock
        self._on_failure = on_failure
        self._remaining = max_bytes
        self._file: FileIO | None = None
        self._failed = False
        self._counts: dict[tuple[Level, str], int] = {}
        try:
            # Every line is one write at the file's end: several processes may share the file, and
            # nothing waits in a buffer when the process is killed.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            self._fail(error)

    def info(self, text: str) -> None:
        """Write a message that needs no attention."""
        self.write("info", text)

    def warning(self, text: str) -> None:
        """Write a message that may need attention."""
        self.write("warning", text)

    def error(self, text: str) -> None:
        """Write a message about something that went wrong."""
        self.write("error", text)

    def write(self, level: Level, text: str) -> None:
        """Write or count one message."""
        text = _lines(text)
        count = self._counts.pop((level, text), 0) + 1
        if len(self._counts) >= _MESSAGES_KEPT:
            # Drop the message not seen for longest.
            oldest = next(iter(self._counts))
            self._last_count(oldest, self._counts.pop(oldest))
        self._counts[level, text] = count
        if count == 1:
            self._put(level, text)
        elif _is_power_of_ten(count):
            self._put(level, f"{text} ({count:,} times so far)")

    def close(self) -> None:
        """Write the last counts and close; a second call does nothing."""
        for message, count in self._counts.items():
            self._last_count(message, count)
        self._counts = {}
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._fail(error)

    def _last_count(self, message: tuple[Level, str], count: int) -> None:
        if count > 1 and not _is_power_of_ten(count):
            level, text = message
            self._put(level, f"{text} ({count:,} times)")

    def _put(self, level: Level, text: str) -> None:
        if self._file is None or self._remaining <= 0:
            return
        when = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        stamp = when.replace("+00:00", "Z")
        line = f"{stamp} {level} {text}\n".encode()
        self._remaining -= len(line)
        if self._remaining <= 0:
            line = f"{stamp} warning this log is full: later messages are left out\n".encode()
        try:
            self._file.write(line)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            if self._on_failure is not None:
                reason = error.strerror or str(error)
                self._on_failure(visible(f"cannot write {self._path}: {reason}; the run goes on"))


def _lines(text: str) -> str:
    lines = [visible(line, _MAX_TEXT) for line in text[:_MAX_TEXT].splitlines() if line.strip()]
    return "\n    ".join(lines)


def _is_power_of_ten(count: int) -> bool:
    return count >= 10 and set(str(count)[1:]) == {"0"} and str(count)[0] == "1"
