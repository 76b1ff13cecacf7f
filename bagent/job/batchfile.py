"""Recognising an OpenAI batch file: one request per line, ready made."""

from __future__ import annotations

import gzip
import json
import zlib
from contextlib import closing
from pathlib import Path
from typing import IO, cast

import msgspec

_KEYS = frozenset({"custom_id", "method", "url", "body"})
_LONGEST_LINE = 64 * 1024 * 1024


def is_batch_file(path: str | Path) -> bool:
    """True if the first line of ``path`` that is not blank is a request of a batch file.

    Such a line is a JSON object with ``custom_id``, ``method``, ``url`` and ``body``. ``.gz`` and
    ``.zst`` files are looked into. A file that cannot be read is none.
    """
    path = Path(path)
    unreadable: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, zlib.error)
    if path.suffix == ".zst":
        import zstandard

        unreadable += (zstandard.ZstdError,)
    try:
        return _first_line_keys(path) >= _KEYS
    except unreadable:
        return False


def _first_line_keys(path: Path) -> frozenset[str]:
    with closing(_open(path)) as file:
        line = file.readline(_LONGEST_LINE).removeprefix(b"\xef\xbb\xbf")
        while line and not line.strip():
            line = file.readline(_LONGEST_LINE)
    if not line.lstrip().startswith(b"{"):
        return frozenset()
    try:
        return frozenset(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError:
        # Lone surrogates and NaN are read by the slower reader.
        return frozenset(json.loads(line))


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
