"""Rows as CSV."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\Z")
"""A decimal number."""

_QUOTED = re.compile(r'[",\r\n]|\A\s|\s\Z')
_CONVERTED = re.compile(
    r"true|false|[+-]?(?=.*\d)(?:[\d .,:/%$()-]|e(?=[+-]?\d)\+?|[ap]m(?![a-z])|jan(?:uary)?"
    r"|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?){1,40}",
    re.IGNORECASE | re.ASCII,
)
"""Texts that Excel may turn into dates, times, booleans or numbers: ``SEPT2``, ``5%``."""
_UNCHANGED = re.compile(r"(?=(?:\D*\d){1,15}\D*\Z)-?(?:0|[1-9]\d*)(?:\.\d*[1-9])?", re.ASCII)
"""Numbers that look the same in Excel."""
_FORMULA = re.compile(r"[=+\-@\t\r]")


def csv_lines(
    names: Sequence[str], rows: Iterable[Sequence[Any]], *, guard_formulas: bool = False
) -> Iterator[str]:
    """Yield CSV by RFC 4180: a header, then a line a row, without their line ends.

    Null is an empty field and the empty text ``""``, as DuckDB writes and reads them. Numbers have
    all their digits, times are ISO 8601.

    Args:
        names: the columns.
        rows: their values.
        guard_formulas: put ``'`` before texts that Excel would take for formulas
            (https://owasp.org/www-community/attacks/CSV_Injection), and write texts that it would
            turn into dates or other numbers as ``="SEPT2"``.
    """
    yield ",".join(_csv_field(name, guard_formulas) for name in names)
    for row in rows:
        yield ",".join(_csv_field(value, guard_formulas) for value in row)


def _csv_field(value: Any, guard_formulas: bool) -> str:
    if value is None:
        return ""
    text = repr(value) if isinstance(value, float) else cell_text(value)
    if guard_formulas and isinstance(value, str) and _is_converted(text):
        return f'"=""{text}"""'
    is_text = isinstance(value, str) and not NUMBER.match(text)
    if guard_formulas and is_text and _FORMULA.match(text):
        text = f"'{text}"
    if not text or _QUOTED.search(text):
        return '"' + text.replace('"', '""') + '"'
    return text


def _is_converted(text: str) -> bool:
    return _CONVERTED.fullmatch(text) is not None and _UNCHANGED.fullmatch(text) is None


def cell_text(value: Any) -> str:
    """Return the text of a value in a table or a CSV field."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list | dict):
        return msgspec.json.encode(value, enc_hook=str).decode()
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value)
