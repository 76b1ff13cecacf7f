"""Text helpers: whatever goes in, what comes out is valid UTF-8, JSON, CSV and one line."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from typing import Any

import duckdb
from hypothesis import example, given
from hypothesis import strategies as st

from bagent.text.csv import csv_lines
from bagent.text.json import decode_json, encode_json
from bagent.text.suggest import describe_value, did_you_mean
from bagent.text.terminal import escape_controls
from bagent.text.unicode import clean_json, clean_text, is_utf8, join_surrogates, wire_json
from support.strategies import ODD_TEXT, json_objects, json_values, texts_of

ODD_NUMBERS = st.floats() | st.integers()
ODD_VALUES = json_values(ODD_TEXT) | ODD_NUMBERS | st.lists(ODD_NUMBERS | ODD_TEXT, max_size=3)
HALVES = texts_of("\ud83d", "\ude00", "\udfff", "\U0001f600", "\\ud800", odd=ODD_TEXT)
FORMULAS = "=+-@\t\r"


@given(HALVES)
def test_cleaned_text_is_utf8_and_what_was_utf8_stays(text):
    cleaned = clean_text(text)
    cleaned.encode()
    assert cleaned == text or not is_utf8(text)
    joined = join_surrogates(text)
    assert join_surrogates(joined) == joined
    assert clean_text(cleaned) == cleaned


@given(ODD_VALUES)
def test_cleaned_values_are_json_for_every_parser(value):
    cleaned = clean_json(value)
    text = json.dumps(cleaned, allow_nan=False, ensure_ascii=False)
    assert json.loads(text.encode()) == cleaned
    assert clean_json(cleaned) == cleaned
    json.dumps(wire_json(value), ensure_ascii=False).encode()


@given(json_values(ODD_TEXT) | st.integers())
@example(2**70)
def test_what_is_encoded_is_decoded_to_the_same_value(value):
    decoded = decode_json(encode_json(value))
    assert decoded == json.loads(json.dumps(value))
    assert type(decoded) is type(value)


@given(ODD_VALUES)
@example(["\ud800", float("nan")])
def test_whatever_is_encoded_is_json_with_null_for_what_json_lacks(value):
    text = encode_json(value).encode()
    expected = json.loads(json.dumps(value), parse_constant=lambda _: None)
    assert strict_json(text) == expected


def strict_json(text: bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@given(st.binary(max_size=40) | ODD_TEXT | json_objects().map(json.dumps).map(lambda t: t[:-2]))
def test_any_bytes_are_json_or_a_value_error(raw):
    try:
        decode_json(raw)
    except ValueError:
        return


@given(ODD_TEXT)
def test_escaped_text_cannot_control_a_terminal(text):
    escaped = escape_controls(text)
    escaped.encode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", escaped)
    assert escape_controls(escaped) == escaped


@given(ODD_VALUES, st.lists(st.text(max_size=5), max_size=3), st.text(max_size=8))
def test_descriptions_and_suggestions_are_one_short_line(value, names, word):
    assert len(describe_value(value)) <= 80
    assert "\n" not in describe_value(value)
    assert did_you_mean(word, names) in {"", *(f"did you mean {name}?" for name in names)}


CELLS = texts_of('"', ",", "\n", "\r\n", " ", "=1+1", "@", "-", "0012", "SEPT2", "1e5", "\\")
TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.none() | CELLS, min_size=width, max_size=width), max_size=5)
)


def csv_text(rows: list[list[str | None]], *, guard: bool = False) -> tuple[list[str], str]:
    names = [f"c{number}" for number in range(len(rows[0]) if rows else 1)]
    return names, "".join(f"{line}\r\n" for line in csv_lines(names, rows, guard_formulas=guard))


@given(TABLES)
def test_csv_is_read_back_by_python_as_it_was(rows):
    names, text = csv_text(rows)
    read = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    expected = [[cell or "" for cell in row] for row in rows]
    # Python reads a line of one empty cell as no cell.
    assert read == [names, *([] if row == [""] and not text else row for row in expected)] or (
        len(names) == 1 and [row or [""] for row in read] == [names, *expected]
    )


@given(TABLES)
def test_a_spreadsheet_finds_no_formula_in_guarded_csv(rows):
    _, text = csv_text(rows, guard=True)
    for row in csv.reader(io.StringIO(text, newline=""), strict=True):
        for cell in row:
            as_text = re.fullmatch(r'="[^"]*"', cell)
            number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", cell, re.IGNORECASE)
            assert as_text or number or not cell.startswith(tuple(FORMULAS))


@given(st.floats() | st.integers(-(2**63), 2**63 - 1))
def test_numbers_in_csv_have_all_their_digits(number):
    (_, field) = csv_lines(["n"], [[number]])
    assert type(number)(field) == number or math.isnan(number)


def test_csv_is_read_back_by_duckdb_with_its_nulls(folder):
    path = folder / "rows.csv"
    with duckdb.connect() as connection:

        @given(TABLES.filter(lambda rows: rows and len(rows[0]) > 1))
        def check(rows: list[list[str | None]]) -> None:
            _, text = csv_text(rows)
            path.write_text(text, newline="")
            columns = ", ".join(f"'c{n}': 'VARCHAR'" for n in range(len(rows[0])))
            read = connection.execute(
                f"FROM read_csv('{path}', header=true, all_varchar=true, delim=',', quote='\"',"
                " escape='\"', new_line='\\r\\n', auto_detect=false, nullstr='',"
                f" allow_quoted_nulls=false, columns={{{columns}}})"
            ).fetchall()
            assert [list(row) for row in read] == rows

        check()
