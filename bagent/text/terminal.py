"""Standard output and standard error that foreign text cannot control.

Rows, answers, messages of servers, jobs and run directories may hold escape sequences. All printed
text goes through :class:`GuardedStream`, which writes control characters as visible escapes. Data
in pipes and files stays exact: it is written as bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, BinaryIO, TextIO, cast

# Control characters but tab and line feed, direction marks, line separators and lone surrogates.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_controls(text: str) -> str:
    r"""Return ``text`` with control characters as visible escapes such as ``\x1b``."""
    return _CONTROL.sub(
        lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text
    )


class GuardedStream:
    """A text stream that escapes control characters; otherwise it is the stream behind it.

    Args:
        stream: where the text goes. In a pipe it is UTF-8 whatever the locale says; a terminal
            that lacks a character shows a replacement for it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream
        if isinstance(stream, TextIOWrapper):
            if stream.isatty():
                stream.reconfigure(errors="replace")
            elif (stream.encoding or "").lower().replace("-", "") != "utf8":
                stream.reconfigure(encoding="utf-8")

    def write(self, text: str) -> int:
        """Write ``text`` with its control characters escaped; returns its length."""
        self.unguarded.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def __iter__(self) -> Iterator[str]:
        return iter(self.unguarded)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Guard ``sys.stdout`` and ``sys.stderr`` while a command runs."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, GuardedStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream behind a guarded one, for displays that colour what they escaped."""
    return cast(TextIO, getattr(stream, "unguarded", stream))


def data_stdout() -> BinaryIO:
    """Return standard output for UTF-8 data: exact in a pipe or file, escaped on a terminal."""
    if sys.stdout.isatty():
        return cast(BinaryIO, _TerminalBytes(sys.stdout))
    return sys.stdout.buffer


class _TerminalBytes:
    """Takes UTF-8 bytes and writes them as text to a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(data.decode("utf-8", "replace"))
        return len(data)

    def flush(self) -> None:
        self._stream.flush()


class SafeTextStream:
    """Passes text on to ``stream`` until that fails, then drops it.

    A closed or full standard error is no reason to lose a run, so ``OSError`` and ``ValueError``
    (a closed file) end the display silently. Characters that the stream's encoding lacks are
    written as escapes. Looks enough like a text file for a :class:`rich.console.Console`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.broken = False

    @property
    def encoding(self) -> str:
        """The stream's encoding; UTF-8 where it has none (a :class:`io.StringIO`)."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write ``text``, or drop it."""
        if not self.broken:
            safe = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            try:
                self._stream.write(safe)
            except BlockingIOError:
                # A slow terminal in non-blocking mode: this text is lost, the next may pass.
                return len(text)
            except (OSError, ValueError):
                self.broken = True
        return len(text)

    def flush(self) -> None:
        """Flush, or do nothing."""
        if not self.broken:
            try:
                self._stream.flush()
            except BlockingIOError:
                return
            except (OSError, ValueError):
                self.broken = True

    def line(self, text: str) -> None:
        """Write one line and flush."""
        self.write(text + "\n")
        self.flush()

    def isatty(self) -> bool:
        """Return whether the stream says that it is a terminal; False where it cannot say."""
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Return the stream's file descriptor; raises ``OSError`` or ``ValueError`` without one."""
        return self._stream.fileno()
