"""A text stream that cannot stop a run: what the display is written to."""

from __future__ import annotations

from typing import TextIO


class Outlet:
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
        """Whether the stream says that it is a terminal; False where it cannot say."""
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """The stream's file descriptor; raises ``OSError`` or ``ValueError`` as the stream does."""
        return self._stream.fileno()
