"""Recognition of an OpenAI batch file: one request per line, ready made."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import IO, cast

from bagent.text.json import decode_json

KEYS = frozenset({"custom_id", "method", "url", "body"})
SUFFIXES = (".jsonl", ".ndjson")
_PACKED = (".gz", ".zst")
_LONGEST_LINE = 64 * 1024 * 1024
_FIRST_LINES = 100
_FIRST_BYTES = _LONGEST_LINE


def is_batch_file(path: str | Path) -> bool:
    """Return whether the first lines of ``path`` are requests of a batch file.

    Such a line is a JSON object with ``custom_id``, ``method``, ``url`` and ``body``. One line at
    least has to have all of them, and more than half of the first hundred lines three of them: a
    broken line does not hide what the file is. A ``.jsonl`` file without any line is a batch file
    of no requests. ``.gz`` and ``.zst`` files are looked into. A file that cannot be read is none.
    """
    path = Path(path)
    complete = similar = count = 0
    try:
        for keys in islice(_keys_of_lines(path), _FIRST_LINES):
            count += 1
            complete += keys >= KEYS
            similar += len(keys & KEYS) >= len(KEYS) - 1
    except unreadable(path):
        return False
    if not count:
        return unpacked_suffix(path) in SUFFIXES
    return complete > 0 and 2 * similar > count


def unpacked_suffix(path: Path) -> str:
    """Return the suffix of a file's name in lower case, less that of its compression."""
    name = path.name.lower()
    for suffix in _PACKED:
        name = name.removesuffix(suffix)
    return Path(name).suffix


def unreadable(path: Path) -> tuple[type[Exception], ...]:
    """Return the exceptions that reading a damaged or missing file raises."""
    errors: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, zlib.error)
    if path.suffix == ".zst":
        import zstandard

        errors += (zstandard.ZstdError,)
    return errors


def _keys_of_lines(path: Path) -> Iterator[frozenset[str]]:
    """Yield the keys of each line that is not blank, none where it is no JSON object."""
    size = 0
    for line in lines_of(path):
        size += len(line)
        if size > _FIRST_BYTES:
            return
        line = line.removeprefix(b"\xef\xbb\xbf").strip()
        if line:
            yield _keys(line)


def _keys(line: bytes) -> frozenset[str]:
    if not line.startswith(b"{"):
        return frozenset()
    try:
        value = decode_json(line)
    except ValueError:
        return frozenset()
    return frozenset(value)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, unpacked; one that is longer than any comes in pieces."""
    with closing(_open(path)) as file:
        while line := file.readline(_LONGEST_LINE):
            yield line


def _open(path: Path) -> IO[bytes]:
    if not path.is_file():
        raise FileNotFoundError(path)
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if path.suffix == ".zst":
        return _open_zst(path)
    return path.open("rb")


def _open_zst(path: Path) -> IO[bytes]:
    import io

    import zstandard

    return cast("IO[bytes]", io.BufferedReader(zstandard.open(path, "rb")))
