"""Checks of the lines of a batch file before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bagent.backends.openai.raw_request import ROUTES, route_of
from bagent.errors import InputError, JobError, Position
from bagent.job.batch_file import (
    KEYS,
    SUFFIXES,
    is_batch_file,
    lines_of,
    unpacked_suffix,
)
from bagent.types import Json

if TYPE_CHECKING:
    from bagent.job.spec.job import Job

MOST_LINES = 50_000
"""Most lines of a batch by OpenAI's API, and so the most that are checked before a run."""

_TABLES = (".csv", ".tsv", ".parquet")
_NUMBERS = 5


def is_batch_file_path(path: Path, typed: Path) -> bool:
    """Return whether ``path``, given as a job file, is a batch file.

    Raises:
        JobError: it is a file of rows.
    """
    suffix = unpacked_suffix(path)
    packed_json = suffix == ".json" and path.suffix != ".json"
    if not (suffix in (*SUFFIXES, *_TABLES) or packed_json) or not path.is_file():
        return False
    if suffix in SUFFIXES and is_batch_file(path):
        return True
    hint = f"bagent run job.yaml -i {typed}"
    if suffix in SUFFIXES:
        hint += "; lines of a batch file have custom_id, method, url and body"
    raise JobError(f"{typed} holds rows, not a job", hint=hint)


def check_lines(job: Job, piped: Iterable[dict[str, Json]]) -> None:
    """Refuse lines for routes that no request can be sent to, all in one message.

    Args:
        job: the job, whose input is batch files.
        piped: the first piped lines; the others cannot be checked.

    Raises:
        InputError: some lines cannot be sent.
        JobError: the piped lines are no batch file.
    """
    for data in piped:
        if len(KEYS & data.keys()) < len(KEYS) - 1:
            raise JobError(
                "the piped rows are no lines of a batch file, and there is no prompt for them",
                hint="bagent run job.yaml -i - takes rows; batch lines have custom_id, method,"
                " url and body",
            )
    for item in job.input.path if job.input else ():
        if item.local is not None and item.path != "-":
            _check_file(item.local)


def _check_file(path: Path) -> None:
    refused = _refused_routes(path)
    if not refused:
        return
    count = sum(map(len, refused.values()))
    groups = "; ".join(f"{url[:80]} ({_numbers(lines)})" for url, lines in refused.items())
    raise InputError(
        f"{count:,} {'line' if count == 1 else 'lines'} cannot be sent: {groups}",
        hint="lines are sent to " + ", ".join(f"/v1{route}" for route in ROUTES),
        at=Position(path, min(lines[0] for lines in refused.values())),
    )


def _numbers(lines: list[int]) -> str:
    first = ", ".join(map(str, lines[:_NUMBERS]))
    more = f" and {len(lines) - _NUMBERS:,} more" if len(lines) > _NUMBERS else ""
    return f"{'line' if len(lines) == 1 else 'lines'} {first}{more}"


class _Line(msgspec.Struct):
    url: str | None = None


def _refused_routes(path: Path) -> dict[str, list[int]]:
    """Return the numbers of lines with a route that no request can be sent to, by url.

    Lines that cannot be read, or have no url, fail in the run, each by itself.
    """
    refused: dict[str, list[int]] = {}
    decode = msgspec.json.Decoder(_Line).decode
    try:
        for number, line in enumerate(islice(lines_of(path), MOST_LINES), 1):
            try:
                url = decode(line.removeprefix(b"\xef\xbb\xbf")).url
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                continue
            if url is not None and route_of(url) is None:
                refused.setdefault(url, []).append(number)
    except InputError:
        pass  # the run reports the error
    return refused
