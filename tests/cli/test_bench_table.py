"""Tables of a load test fit the screen."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from bagent.cli.render.bench import ENDPOINTS, ENDPOINTS_SPARE, print_table

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Screen(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


ROWS = [
    {
        "endpoint": f"node{n:04d}.cluster:8000",
        "verdict": verdict,
        "speed": 1.0,
        "requests": 120,
        "ok_share": 1.0,
        "rps": 3.25,
        "output_tok_s": 207.5,
        "ttft_p50_ms": 103.4,
        "tpot_p50_ms": 21.8,
        "in_flight_mean": 7.9,
        "share": 1.0,
        "reason": reason,
    }
    for n, (verdict, reason) in enumerate([("ok", ""), ("slow", "0.10 times as fast as others")])
]


@pytest.mark.parametrize("width", [80, 100, 140, 220])
def test_a_table_is_as_wide_as_the_screen_at_most_and_names_are_whole(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    screen = Screen()
    monkeypatch.setenv("COLUMNS", str(width))
    with contextlib.redirect_stdout(screen):
        left = print_table(ENDPOINTS, ROWS, ENDPOINTS_SPARE)
    lines = COLOUR.sub("", screen.getvalue()).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    for row in ROWS:
        assert sum(str(row["endpoint"]) in line for line in lines) == 1
    assert ("reason" in left) == (width < 140)
    assert "verdict" not in left and "out tok/s" not in left


def test_in_a_pipe_every_column_with_a_value_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_table(ENDPOINTS, ROWS, ENDPOINTS_SPARE) == []
    head, _, first, *_ = capsys.readouterr().out.splitlines()
    assert "TTFT p50 ms" in head and "reason" in head
    assert "hit %" not in head  # no endpoint told it
    assert first.startswith("node0000.cluster:8000")
