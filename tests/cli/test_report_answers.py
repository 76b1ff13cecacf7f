"""A reader finds on the first screens of a page what went wrong in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.report_pages import read
from support.troubled_runs import TROUBLES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", TROUBLES)
def test_what_went_wrong_stands_on_the_first_screens_of_the_page(name: str, tmp_path: Path) -> None:
    trouble = TROUBLES[name](tmp_path)
    page = read(trouble.page.read_text())
    words = page.sections["what"]
    assert [part for part in trouble.expected if part not in words] == []
    sections = list(page.sections)
    assert sections.index("what") <= 1  # nothing but the head is before it
    assert len(words) < 1500
