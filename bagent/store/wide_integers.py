"""Integers that a column of 64 bits cannot hold: found in answers, which get a wider column."""

from __future__ import annotations

from collections.abc import Mapping

from bagent.duck import literal
from bagent.duck_types import is_nested, parse_type
from bagent.store.columns import is_scalar, pointer

_EXACT = "DECIMAL(38,0)"
_INTEGER = r"-?\d+(?:\.0*)?(?:e\+?\d+)?"
_MAY_BE_WIDE = r"\d{19}|\de\+?\d"
"""A text without this has no integer beyond 64 bits; most need no closer look."""

_NESTED = r"[:\[,]\s*(-?\d{19,})"
"""Integers inside of an object or a list that may not fit."""

Columns = Mapping[str | None, str]
"""Types of the typed columns of ``answers`` by property; None is the whole answer."""


class WiderColumns(Exception):
    """Columns of ``answers`` must be wider for what was found in them."""

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self.columns = columns


def check_select(columns: Columns, source: str) -> str | None:
    """SQL for two booleans a column of integers: some value does not fit it, and nor 38 digits.

    None where no column is of integers.
    """
    integers = _integers(columns)
    if not integers:
        return None
    paths = ", ".join(literal(pointer(name)) for name in integers)
    found = []
    for place, kind in enumerate(integers.values(), 1):
        if is_nested(kind):
            texts = f"regexp_extract_all(parts[{place}]::VARCHAR, {literal(_NESTED)}, 1)"
        elif is_scalar(kind):
            texts = f"[parts[{place}]->>'$']"
        else:
            texts = f"TRY_CAST(parts[{place}] AS VARCHAR[])"
        base = "BIGINT" if is_nested(kind) else kind.removesuffix("[]")
        found += [
            f"coalesce(bool_or(list_bool_or([regexp_full_match(x, {literal(_INTEGER)})"
            f" AND TRY_CAST(x AS {narrow}) IS NULL FOR x IN {texts}])), false)"
            for narrow in (base, _EXACT)
        ]
    return (
        f"SELECT {', '.join(found)} FROM (SELECT json_extract(output, [{paths}]) AS parts"
        f" FROM {source} WHERE status = 'ok'"
        f" AND regexp_matches(output::VARCHAR, {literal(_MAY_BE_WIDE)}))"
    )


def wider(columns: Columns, found: tuple[bool, ...]) -> Columns:
    """The columns that must be wider, with their types; ``found`` is the row of the check."""
    types: dict[str | None, str] = {}
    for place, (name, kind) in enumerate(_integers(columns).items()):
        too_wide, beyond_exact = found[2 * place : 2 * place + 2]
        if too_wide and is_nested(kind):
            types[name] = "JSON"  # which keeps all digits
        elif too_wide:
            suffix = "[]" if kind.endswith("[]") else ""
            types[name] = ("VARCHAR" if beyond_exact else _EXACT) + suffix
    return types


def is_as_wide(expected: str, kind: str) -> bool:
    """Whether a column may be of a type: the expected one, or a wider one for integers."""
    if kind == expected:
        return True
    if is_nested(expected):
        return kind == "VARCHAR" or parse_type(kind, bare_names=True) == parse_type(expected)
    suffix = "[]" if expected.endswith("[]") else ""
    base = expected.removesuffix("[]")
    return base in ("BIGINT", _EXACT) and kind in (_EXACT + suffix, "VARCHAR" + suffix)


def _integers(columns: Columns) -> dict[str | None, str]:
    return {
        name: kind
        for name, kind in columns.items()
        if kind.removesuffix("[]") in ("BIGINT", _EXACT) or (is_nested(kind) and "BIGINT" in kind)
    }
