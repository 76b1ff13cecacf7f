"""What ``--deadline`` may say."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from bagent.errors import UsageError
from bagent.runs.deadline import read_deadline

NOW = 1_700_000_000.0


def at(text, env=None):
    deadline = read_deadline(text, env or {}, NOW)
    return None if deadline is None else deadline.at


@pytest.mark.parametrize("text", ["none", "  "])
def test_none_is_no_deadline(text):
    assert at(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("55m", 3300), ("+55m", 3300), ("90", 90), ("0", 0), ("1d2h3m4s", 93784)]
)
def test_a_duration_counts_from_now(text, seconds):
    assert at(text) == NOW + seconds


@pytest.mark.parametrize("text", ["2026-01-31T18:00Z", "2026-01-31 19:00+01:00"])
def test_an_iso_time_may_have_an_offset(text):
    assert at(text) == datetime(2026, 1, 31, 18, 0, tzinfo=UTC).timestamp()


def test_an_iso_time_without_offset_is_local(monkeypatch):
    monkeypatch.setenv("TZ", "America/Chicago")
    time.tzset()
    try:
        assert at("2026-01-31T12:00") == datetime(2026, 1, 31, 18, 0, tzinfo=UTC).timestamp()
        assert at("2026-07-31T13:00") == datetime(2026, 7, 31, 18, 0, tzinfo=UTC).timestamp()
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "text",
    ["soon", "-5m", "5x", "m", "5m5h", "1e3", "@", "@nan", "@-5", "18:00", "2026-13-01T00:00"],
)
def test_anything_else_is_an_error_that_shows_the_forms(text):
    with pytest.raises(UsageError) as error:
        at(text)
    for words in (text, "55m", "@UNIX_SECONDS"):
        assert words in str(error.value)


@pytest.mark.parametrize("text", ["1767225600", "400d"])
def test_a_duration_of_years_is_surely_meant_otherwise(text):
    with pytest.raises(UsageError, match="not a deadline"):
        at(text)


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, None),
        ({"BAGENT_DEADLINE": "55m"}, NOW + 3300),
        ({"BAGENT_DEADLINE": "none", "SLURM_JOB_END_TIME": "1700003600"}, None),
        ({"BAGENT_DEADLINE": "auto", "SLURM_JOB_END_TIME": "1700003600"}, 1_700_003_600),
        ({"BAGENT_DEADLINE": " ", "SLURM_JOB_END_TIME": "1700003600"}, 1_700_003_600),
        ({"SLURM_JOB_END_TIME": "1700003600"}, 1_700_003_600),
        ({"SLURM_JOB_END_TIME": "Unknown"}, None),
    ],
)
def test_auto_reads_the_environment(env, found):
    assert at("auto", env) == found
    assert at(" AUTO ", env) == found


def test_a_deadline_of_the_environment_is_named():
    assert read_deadline("55m", {}, NOW).source == "--deadline"
    assert read_deadline("auto", {"BAGENT_DEADLINE": "55m"}, NOW).source == "BAGENT_DEADLINE"
    with pytest.raises(UsageError, match="BAGENT_DEADLINE: not a deadline: 'soon'"):
        at("auto", {"BAGENT_DEADLINE": "soon"})


def test_an_end_of_a_job_that_is_over_is_disregarded_and_named():
    warnings = []
    assert read_deadline("auto", {"SLURM_JOB_END_TIME": "9"}, NOW, warn=warnings.append) is None
    assert "SLURM_JOB_END_TIME" in warnings[0]
    assert "--deadline none" in warnings[0]


@pytest.mark.parametrize(
    ("text", "margin", "seconds"),
    [("55m", None, 60), ("45s", None, 11.25), ("55m", 10.0, 10), ("45s", 60.0, 11.25)],
)
def test_feeding_stops_a_margin_before_the_end_and_leaves_time_to_feed(text, margin, seconds):
    deadline = read_deadline(text, {}, NOW, margin=margin)
    assert deadline.at - deadline.stop_feeding_at == pytest.approx(seconds)
