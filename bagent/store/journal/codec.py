"""Journal records as lines of JSON, and back.

A line is UTF-8 without line breaks: lone surrogates become the visible text ``\\udXXX``, NaN and
infinities become strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, get_args

import msgspec

from bagent.text.unicode import clean_text, float_or_text
from bagent.types import ErrorKind, Json, Outcome, Status

STATUSES: tuple[str, ...] = get_args(Status)
"""The values of ``Outcome.status``; the first is ``ok``."""

ERROR_KINDS: tuple[str, ...] = get_args(ErrorKind)
"""The values of ``Outcome.error_kind``."""

OTHER_KIND = 31
"""Code of an unknown error kind."""

OK_CODE = 0
"""Code of a good outcome: status ``ok``, no error kind."""

_KIND_CODES: dict[str | None, int] = {None: 0} | {k: i for i, k in enumerate(ERROR_KINDS, 1)}
TOMBSTONE = "void"
"""The status of a line that removes the earlier lines of its unit."""

VOID_CODE = 7 << 5
"""Code of a tombstone."""

_STATUS_CODES = {status: number << 5 for number, status in enumerate(STATUSES)} | {
    TOMBSTONE: VOID_CODE
}
_JSON_FIELDS = frozenset({"id", "output", "logprobs", "messages", "response"})
_DEEPEST = 400
_SIMPLE = frozenset({str, int, type(None)})
_REFUSALS = (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError)


class OutcomeLine(Outcome, omit_defaults=True):
    """A decoded outcome line; msgspec decodes raw JSON only into a field that is never None."""

    output: msgspec.Raw = msgspec.Raw(b"")
    response: msgspec.Raw = msgspec.Raw(b"")


class OutcomeHeader(OutcomeLine, kw_only=True):
    """A checked outcome line for the index, which has no use for the log probabilities."""

    status: str  # type: ignore[assignment]
    """Also that of a tombstone."""
    logprobs: msgspec.Raw = msgspec.Raw(b"")


_ENCODER = msgspec.json.Encoder()
_RAW = msgspec.json.Decoder(msgspec.Raw)
_LINE = msgspec.json.Decoder(OutcomeLine)
_BRIEF = msgspec.json.Decoder(OutcomeHeader)


def code_of(status: str, error_kind: str | None) -> int:
    """Return one byte for a status and an error kind; 0 means ok.

    Raises:
        KeyError: no such status.
    """
    return _STATUS_CODES[status] | _KIND_CODES.get(error_kind, OTHER_KIND)


def codes_of(outcomes: Sequence[Outcome]) -> list[int]:
    """Return the codes of outcomes, most of which are ok."""
    return [OK_CODE if o.status == "ok" else code_of(o.status, o.error_kind) for o in outcomes]


def status_of(code: int) -> str:
    """Return the status in a code."""
    return STATUSES[code >> 5]


def kind_of(code: int) -> str | None:
    """Return the error kind in a code; ``other`` for an unknown one."""
    number = code & 31
    if number == 0:
        return None
    return ERROR_KINDS[number - 1] if number <= len(ERROR_KINDS) else "other"


ACCEPTED_CODE = code_of("truncated", None)
"""The code of a truncated answer that the job accepts; it has no error kind."""

FINISHED_CODES = frozenset({OK_CODE, ACCEPTED_CODE})
"""The codes of outcomes that are not failures."""


@lru_cache(maxsize=65536)
def salt_of(stage: str, answer: int) -> int:
    """Return the 64-bit BLAKE2b hash of a stage and an answer number."""
    text = f"{answer} {stage}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8, person=b"bagent.unit").digest())


def unit_of(key: int, stage: str, answer: int = 0) -> int:
    """Return the 64-bit name of a (row key, stage, answer): the key, a hash, xor the salt."""
    return key ^ salt_of(stage, answer)


def clean(value: Json, depth: int = 0) -> Json:
    """Return a copy of a JSON value that every JSON parser accepts.

    Lone surrogates become visible text, NaN and infinities the strings ``NaN``, ``Infinity`` and
    ``-Infinity``, raw JSON its value, and values nested deeper than 400 levels text.
    """
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return float_or_text(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if depth > _DEEPEST:
        return clean_text(str(value))
    if isinstance(value, dict):
        return {clean_text(str(k)): clean(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v, depth + 1) for v in value]
    if isinstance(value, msgspec.Raw):
        return clean(_parsed(bytes(value)), depth + 1)
    return clean(msgspec.to_builtins(value), depth + 1)


def _parsed(raw: bytes) -> Json:
    """Parse JSON that msgspec refuses; return other text as it is."""
    text = raw.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def encode_outcome(outcome: Outcome) -> bytes:
    """Return the journal line of an outcome, with its newline."""
    try:
        for raw in (outcome.output, outcome.response):
            if raw is not None:
                _RAW.decode(raw)
        line = _ENCODER.encode(outcome)
        if not line.isascii():
            line.decode()
        if outcome.logprobs is not None or type(outcome.id) not in _SIMPLE:
            json.dumps((outcome.id, outcome.logprobs), allow_nan=False)
    except _REFUSALS:
        return _encode_carefully(outcome)
    if b"\n" in line:
        return _encode_carefully(outcome)
    return line + b"\n"


def encode_outcomes(outcomes: Sequence[Outcome]) -> list[bytes]:
    """Return the journal lines of outcomes, each with its newline."""
    lines: list[bytes] = []
    try:  # msgspec checks that all values but raw JSON fit JSON in UTF-8
        for outcome in outcomes:
            if (
                outcome.response is not None
                or outcome.logprobs is not None
                or type(outcome.id) not in _SIMPLE
            ):
                return list(map(encode_outcome, outcomes))
            if outcome.output is not None:
                _RAW.decode(outcome.output)
        text = _ENCODER.encode_lines(outcomes)
        if not text.isascii():
            text.decode()
        lines = text.splitlines(keepends=True)
    except _REFUSALS:
        pass
    # Raw JSON may have line breaks.
    return lines if len(lines) == len(outcomes) else list(map(encode_outcome, outcomes))


def encode_records(records: Sequence[msgspec.Struct]) -> bytes:
    """Return the journal lines of other records."""
    try:
        return _ENCODER.encode_lines(records)
    except _REFUSALS:
        return b"".join(map(encode_record, records))


def encode_record(record: msgspec.Struct) -> bytes:
    """Return the journal line of another record, with its newline."""
    try:
        return _ENCODER.encode(record) + b"\n"
    except _REFUSALS:
        return _encode_carefully(record)


def _encode_carefully(record: msgspec.Struct) -> bytes:
    """Encode values that msgspec refuses or would change silently."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(type(record)):
        value = getattr(record, field.name)
        if value is None or value is field.default:
            continue
        if isinstance(value, float) and not math.isfinite(value) and field.name != "id":
            continue
        values[field.encode_name] = clean(value) if field.name in _JSON_FIELDS else _column(value)
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _column(value: Any) -> Any:
    return clean(value) if isinstance(value, (str, list, tuple, dict, msgspec.Struct)) else value


def decode_outcome(line: bytes) -> Outcome:
    """Return the outcome of a journal line.

    Raises:
        msgspec.DecodeError: the line is not a complete outcome.
    """
    fields = msgspec.structs.asdict(decode_outcome_line(line))
    for name in ("output", "response"):
        if not bytes(fields[name]):
            fields[name] = None
    return Outcome(**fields)


def decode_outcome_line(line: bytes) -> OutcomeLine:
    """Decode faster than :func:`decode_outcome`: a missing output is empty raw text, not None."""
    try:
        return _LINE.decode(line)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def decode_brief(line: bytes) -> OutcomeHeader:
    """Return the header of a journal line, after checking the complete line.

    Raises:
        msgspec.DecodeError: the line is not a complete outcome, or not UTF-8.
    """
    try:
        if not line.isascii():
            line.decode()
        return _BRIEF.decode(line)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
