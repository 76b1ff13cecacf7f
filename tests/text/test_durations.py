import pytest

from bagent.text.durations import parse_duration


@pytest.mark.parametrize(("text", "seconds"), [("1h30m", 5400.0), ("250ms", 0.25), ("7", 7.0)])
def test_durations_are_read_in_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5s", ".inf", "5s5"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)
