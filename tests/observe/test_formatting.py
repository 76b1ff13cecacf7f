import math

import pytest

from bagent.observe.formatting import (
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

COUNTS = {"schema": 1, "timeout": 3, "connect": 1, "auth": 1}
WORDS = [
    (duration, {
        0: "0.0s", -1: "0.0s", 2.44: "2.4s", 9.96: "10s", 59.4: "59s", 59.6: "1m00s", 80: "1m20s",
        3599.7: "1h00m", 7500: "2h05m", 86400 * 3 + 4 * 3600: "3d04h", None: "?", math.inf: "?",
        math.nan: "?",
    }),
    (milliseconds, {0.81: "0.8ms", 120.4: "120ms", 999.6: "1.0s", 90_000: "1m30s", None: "?"}),
    (rate, {0: "0.00", 0.714: "0.71", 9.996: "10.0", 12.34: "12.3", 99.96: "100", 3210.4: "3,210"}),
    (money, {0: "$0.0000", 0.0000123: "$0.000012", 0.0123: "$0.0123", 1234.5: "$1,234.50"}),
    (percent, {0: "0 %", 0.29: "29 %", 0.9999: "99 %", 1: "100 %"}),
    (lambda number: counted(number, "row"), {1: "1 row", 2000: "2,000 rows"}),
    (lambda number: counted(number, "retry", "retries"), {2: "2 retries"}),
    (lambda top: kinds(COUNTS, top=top), {2: "timeout 3, auth 1, +2 more"}),
    (lambda _: kinds(COUNTS), {0: "timeout 3, auth 1, connect 1, schema 1"}),
    (visible, {
        "a\nb\t c\r\n": "a b c",
        "\x1b[31mred\x1b[0m": "\\x1b[31mred\\x1b[0m",
        "bell\x07 c1\x9b2J": "bell\\x07 c1\\x9b2J",
        "half \ud800 pair": "half \\ud800 pair",
        "right \u202e left": "right \\u202e left",
        "Zürich 東京": "Zürich 東京",
    }),
    (lambda text: visible(text, 10), {
        "x" * 11: "xxxxxxx...", "x" * 10: "x" * 10, "one twelve": "one twelve",
        "one twelve three": "one...", "one two three": "one two...",
    }),
    (name_of, {None: None, "a b": "a b", 7: "7"}),
]  # fmt: skip
"""Function -> value -> its text."""


@pytest.mark.parametrize(("function", "texts"), WORDS)
def test_values_are_written_as_people_read_them(function, texts):
    assert {value: function(value) for value in texts} == texts


def test_a_list_can_name_a_row():
    assert name_of(["x", 1]) == '["x",1]'
    assert name_of(["\udc00"]) == "['\\udc00']"


def test_long_text_is_cut_to_its_bound():
    assert len(visible("\x1b" * 500, 300)) == 300


def test_a_rate_reads_the_same_once_json_has_rounded_it():
    assert {rate(speed) for speed in (1.9748, 1.975)} == {"1.98"}
    assert {rate(speed) for speed in (9.9946, 9.995)} == {"10.0"}
