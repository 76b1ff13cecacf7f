"""Recognition of an OpenAI batch file: one request per line, ready made."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from bagent.errors import InputError, Position
from bagent.rows.formats.compression import ByteStream, packing_of
from bagent.rows.formats.json import split_lines
from bagent.text.json import decode_json
from bagent.text.suggest import nearest_name

KEYS = frozenset({"custom_id", "method", "url", "body"})
SUFFIXES = (".jsonl", ".ndjson")
_FIRST_LINES = 100
_FIRST_BYTES = 64 * 1024 * 1024


def is_batch_file(path: str | Path) -> bool:
    """Return whether the first lines of ``path`` are requests of a batch file.

    Such a line is a JSON object with ``custom_id``, ``method``, ``url`` and ``body``. At least one
    line must have all of them, and more than half of the first hundred lines three of them. A
    ``.jsonl`` file without lines is a batch file of no requests. ``.gz`` and ``.zst`` files are
    decompressed. A file that cannot be read is no batch file.
    """
    path = Path(path)
    complete = similar = count = 0
    try:
        for keys in islice(_keys_of_lines(path), _FIRST_LINES):
            count += 1
            complete += keys >= KEYS
            similar += len(keys & KEYS) >= len(KEYS) - 1
    except InputError:
        return False
    if not count:
        return unpacked_suffix(path) in SUFFIXES
    return complete > 0 and 2 * similar > count


def misspelled_key(path: Path) -> tuple[str, str] | None:
    """Return a key of the first line that is nearly one of a batch line, and that one."""
    try:
        keys = next(_keys_of_lines(path), frozenset())
    except InputError:
        return None
    if len(keys & KEYS) < 2:
        return None
    for key in sorted(keys - KEYS):
        near = nearest_name(key, KEYS - keys)
        if near:
            return key, near
    return None


def unpacked_suffix(path: Path) -> str:
    """Return the suffix of a file's name in lower case, less that of its compression."""
    name = path.name.lower()
    return Path(name).with_suffix("").suffix if packing_of(path) else Path(name).suffix


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
    """Yield the lines of a file, decompressed.

    Raises:
        InputError: it cannot be read, or is a damaged archive.
    """
    if not path.is_file():
        raise InputError("there is no such file", at=Position(path), hint="check the path")
    stream = ByteStream(path, packing_of(path))
    try:
        for lines in split_lines(stream.blocks(), path):
            yield from lines
    finally:
        stream.close()
