from __future__ import annotations

import io
import os

import pytest

from bagent.text.terminal import SafeTextStream


def test_a_closed_stream_is_swallowed() -> None:
    stream = io.StringIO()
    stream.close()
    out = SafeTextStream(stream)
    out.line("lost")
    out.flush()
    assert out.broken
    assert not out.isatty()


def test_a_closed_pipe_is_swallowed() -> None:
    read, write = os.pipe()
    os.close(read)
    raw = io.FileIO(write, "w")
    out = SafeTextStream(io.TextIOWrapper(io.BufferedWriter(_Forgetful(raw))))
    out.line("lost")
    out.line("lost too")
    assert out.broken
    raw.close()


class _Forgetful(io.RawIOBase):
    """A raw file whose failed bytes are not tried again when it is collected."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw
        self._failed = False

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int | None:
        if self._failed:
            return memoryview(data).nbytes  # type: ignore[arg-type]
        try:
            return self._raw.write(data)  # type: ignore[arg-type]
        except OSError:
            self._failed = True
            raise


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_full_disk_is_swallowed() -> None:
    with io.FileIO("/dev/full", "w") as raw:
        out = SafeTextStream(io.TextIOWrapper(io.BufferedWriter(_Forgetful(raw))))
        out.line("lost")
        assert out.broken


class _Blocking(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.full = True

    def write(self, text: str) -> int:
        if self.full:
            raise BlockingIOError
        return super().write(text)


def test_a_terminal_that_is_busy_for_a_moment_loses_only_that_text() -> None:
    stream = _Blocking()
    out = SafeTextStream(stream)
    out.line("one")
    stream.full = False
    out.line("two")
    assert stream.getvalue() == "two\n"
    assert not out.broken


def test_characters_that_the_encoding_lacks_become_escapes() -> None:
    raw = io.BytesIO()
    out = SafeTextStream(io.TextIOWrapper(raw, encoding="ascii"))
    out.line("Zürich \ud800")
    assert raw.getvalue() == b"Z\\xfcrich \\ud800\n"
    assert not out.broken
