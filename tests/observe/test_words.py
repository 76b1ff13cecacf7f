from __future__ import annotations

import math

import pytest

from bagent.observe.words import (
    counted,
    duration,
    kinds,
    milliseconds,
    money,
    name_of,
    percent,
    rate,
    visible,
)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0s"),
        (-1, "0.0s"),
        (2.44, "2.4s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (80, "1m20s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (86400 * 3 + 4 * 3600, "3d04h"),
        (None, "?"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_durations_read_as_in_job_files(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("ms", "words"),
    [(0.81, "0.8ms"), (120.4, "120ms"), (999.6, "1.0s"), (90_000, "1m30s"), (None, "?")],
)
def test_milliseconds_become_seconds_when_long(ms: float | None, words: str) -> None:
    assert milliseconds(ms) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0.00"),
        (0.714, "0.71"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (99.96, "100"),
        (3210.4, "3,210"),
    ],
)
def test_rates_keep_three_digits(value: float, words: str) -> None:
    assert rate(value) == words


@pytest.mark.parametrize(
    ("usd", "words"),
    [(0, "$0.0000"), (0.0000123, "$0.000012"), (0.0123, "$0.0123"), (1234.5, "$1,234.50")],
)
def test_small_costs_are_not_rounded_to_nothing(usd: float, words: str) -> None:
    assert money(usd) == words


def test_only_all_is_a_hundred_percent() -> None:
    assert [percent(share) for share in (0, 0.29, 0.9999, 1)] == ["0 %", "29 %", "99 %", "100 %"]


def test_numbers_agree_with_their_words() -> None:
    assert counted(1, "row") == "1 row"
    assert counted(2000, "row") == "2,000 rows"
    assert counted(2, "retry", "retries") == "2 retries"


def test_kinds_are_ordered_by_count_then_name() -> None:
    counts = {"schema": 1, "timeout": 3, "connect": 1, "auth": 1}
    assert kinds(counts) == "timeout 3, auth 1, connect 1, schema 1"
    assert kinds(counts, top=2) == "timeout 3, auth 1, +2 more"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("a\nb\t c\r\n", "a b c"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("bell\x07 c1\x9b2J", "bell\\x07 c1\\x9b2J"),
        ("half \ud800 pair", "half \\ud800 pair"),
        ("right \u202e left", "right \\u202e left"),
        ("Zürich 東京", "Zürich 東京"),
    ],
)
def test_foreign_text_cannot_steer_a_terminal(raw: str, shown: str) -> None:
    assert visible(raw) == shown
    assert visible(raw).encode().decode().isprintable()


def test_long_text_is_cut_to_its_bound() -> None:
    assert visible("x" * 1_000_000, 10) == "xxxxxxx..."
    assert visible("x" * 10, 10) == "x" * 10
    assert len(visible("\x1b" * 500, 300)) == 300


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, None), ("a b", "a b"), (7, "7"), (["x", 1], '["x",1]'), (["\udc00"], "['\\udc00']")],
)
def test_any_json_value_can_name_a_row(value: object, shown: str | None) -> None:
    assert name_of(value) == shown
