"""Decompressed bytes of a file; a damaged archive is an error, never an early end."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Literal

from bagent.errors import InputError, MissingPackage, Position
from bagent.remote import InputFile, RemoteError

Packing = Literal["", "gz", "zst"]
"""How a file is compressed; empty: not at all."""

_PACKINGS: dict[str, Packing] = {".gz": "gz", ".zst": "zst"}

BLOCK = 1 << 18
"""Bytes read at once: large enough to be cheap, small beside what a run holds anyway."""

HALF_MARKS = (b"\xef", b"\xef\xbb", b"\xff", b"\xfe")
"""First bytes after which only the next one tells whether there is a byte-order mark."""

_FEED = 1 << 11
"""Compressed bytes given to zstd at once. A block of 128 KiB can come out of 4 bytes, so this
bounds what one step may yield to 64 MiB; usual text yields 10 to 20 KiB."""

_LARGEST_WINDOW = 1 << 31  # what `zstd --long=31` writes

_MAGIC = {
    b"\x1f\x8b": ("a gzip file", "name it .gz"),
    b"\x28\xb5\x2f\xfd": ("a zstd file", "name it .zst"),
    b"PAR1": ("a Parquet file", "name it .parquet"),
    b"PK\x03\x04": ("a zip file or a spreadsheet", "unpack it, or save it as CSV"),
    b"BZh": ("a bzip2 file", "pack it as .gz or .zst, or unpack it"),
    b"\xfd7zXZ": ("an xz file", "pack it as .gz or .zst, or unpack it"),
}
_UTF16_HINT = "save it as UTF-8, e.g. iconv -f UTF-16 -t UTF-8"


class ByteStream:
    """A file opened for reading, unpacked as its ``packing`` says.

    Args:
        path: the file.
        packing: how it is compressed.

    Raises:
        InputError: it cannot be opened; and from any read: it cannot be read on, or the archive
            is cut off or damaged.
    """

    def __init__(self, path: InputFile, packing: Packing = "") -> None:
        self._path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise unreadable(path, error) from error
        raw: io.RawIOBase | None = None
        if packing == "gz":
            raw = _Gzip(self._file, path)
        elif packing == "zst":
            raw = _Zstd(self._file, path)
        self.reader = io.BufferedReader(raw, BLOCK) if raw else self._file

    def start(self) -> bytes:
        """Return the first unpacked bytes, at least four if there are, and keep them to be read."""
        try:
            return self.reader.peek(4)
        except OSError as error:
            raise unreadable(self._path, error) from error

    def blocks(self) -> Iterator[bytes]:
        """Yield the unpacked bytes, in pieces of at most :data:`BLOCK`."""
        while True:
            try:
                block = self.reader.read(BLOCK)
            except OSError as error:
                raise unreadable(self._path, error) from error
            if not block:
                return
            yield block

    def position(self) -> int:
        """Return how many bytes of the file, as it lies on the disk, were read."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self.reader.close()
        self._file.close()


def packing_of(path: InputFile) -> Packing:
    """Return how a file is compressed, by its suffix."""
    return _PACKINGS.get(path.suffix.lower(), "")


def check_whole(path: InputFile, packing: Packing) -> None:
    """Unpack an archive to its end, keeping nothing.

    Raises:
        InputError: it is cut off or damaged.
    """
    stream = ByteStream(path, packing)
    try:
        for _ in stream.blocks():
            pass
    finally:
        stream.close()


def unreadable(path: str | InputFile, error: OSError) -> InputError:
    """Return the error for an unreadable file."""
    reason = error.strerror or str(error)
    if not isinstance(error, RemoteError):
        reason = reason.lower()
    return InputError(f"cannot be read: {reason}", at=Position(path))


def text_blocks(blocks: Iterator[bytes], name: str | InputFile) -> Iterator[bytes]:
    """Yield the same bytes without a leading UTF-8 byte-order mark.

    Raises:
        InputError: they begin as UTF-16 does, or as an archive or a table of another format.
    """
    first = b""
    for block in blocks:
        first += block
        if first not in HALF_MARKS:
            break
    first = without_mark(first, name)
    if first:
        yield first
    yield from blocks


def without_mark(start: bytes, name: str | InputFile) -> bytes:
    """Return the first bytes of a text without its byte-order mark; they must not be half of one.

    Raises:
        InputError: as :func:`text_blocks`.
    """
    check_start(start, name)
    return start.removeprefix(b"\xef\xbb\xbf")


def check_start(start: bytes, name: str | InputFile) -> None:
    """Refuse what is not UTF-8 text by the first bytes of a file.

    Raises:
        InputError: as :func:`text_blocks`.
    """
    # Without a mark, UTF-16 shows by a zero in every second byte of what is mostly ASCII.
    zeros = [not byte for byte in start[:4]]
    alternating = zeros in ([True, False] * 2, [False, True] * 2)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or alternating:
        raise InputError("the text is UTF-16, not UTF-8", hint=_UTF16_HINT, at=Position(name))
    for magic, (kind, hint) in _MAGIC.items():
        if start.startswith(magic):
            if str(name) == "stdin":
                hint = "pipe in its text, e.g. zcat rows.jsonl.gz | bagent run JOB.yaml -i -"
            raise InputError(f"this is {kind}", hint=hint, at=Position(name))


class _Decompressor(io.RawIOBase):
    """Shared part of the readers below: ``_next`` gives unpacked bytes, empty at the end."""

    def __init__(self, path: InputFile, kind: str) -> None:
        self._path = path
        self._kind = kind
        self._buffered = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._buffered:
            self._buffered = memoryview(self._next())
        count = min(len(buffer), len(self._buffered))
        buffer[:count] = self._buffered[:count]
        self._buffered = self._buffered[count:]
        return count

    def _next(self) -> bytes:
        raise NotImplementedError

    def _broken(self, why: str) -> InputError:
        return InputError(
            f"the {self._kind} archive is cut off or damaged: {why}",
            hint=f"copy or make it again; `{self._kind} -t {self._path.name}` tests it",
            at=Position(self._path),
        )


class _Gzip(_Decompressor):
    """Members one after the other, as the gzip module reads them."""

    def __init__(self, file: BinaryIO, path: InputFile) -> None:
        super().__init__(path, "gzip")
        self._file = file
        self._members = gzip.GzipFile(fileobj=file)

    def _next(self) -> bytes:
        try:
            data = self._members.read1(BLOCK)
        except EOFError as error:
            raise self._broken("it ends too early") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self._broken(str(error)) from error
        if not data and not self._file.tell():  # which the gzip module takes for a whole file
            raise self._broken("it has no bytes")
        return data


class _Zstd(_Decompressor):
    """Frames one after the other; each must reach its end."""

    def __init__(self, file: BinaryIO, path: InputFile) -> None:
        super().__init__(path, "zstd")
        try:
            import zstandard
        except ImportError as error:
            raise MissingPackage(
                "zstandard is not installed, and a .zst file needs it",
                hint="pip install zstandard",
                at=Position(path),
            ) from error
        self._file = file
        self._error: type[Exception] = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        self._frame = self._decompressor.decompressobj()
        self._packed = b""

    def _next(self) -> bytes:
        data = b""
        while not data:
            packed = self._packed or self._file.read(_FEED)
            if not packed:
                if not self._frame.eof:
                    raise self._broken("it ends too early")
                return b""
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            try:
                data = self._frame.decompress(packed)
            except self._error as error:
                raise self._broken(str(error)) from error
            self._packed = self._frame.unused_data if self._frame.eof else b""
        return data
