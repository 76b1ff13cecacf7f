import pytest

from bagent.errors import InputError
from bagent.rows.formats.json import LineSplitter


def test_a_line_without_end_is_refused_before_it_fills_the_memory():
    cutter = LineSplitter("x.jsonl", longest=100)
    cutter.feed(b"\n\n")
    with pytest.raises(InputError, match=r"x.jsonl:3: one row is longer"):
        for _ in range(20):
            cutter.feed(b"123456789")
