"""The text of HTML pages."""

from __future__ import annotations

import itertools

import pytest

from bagent.tools.builtin.http_get import page_text


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>One</p><p>Two <i>three</i></p>", "One\nTwo three"),
        ("<head><style>b{}</style><title>T</title></head><body>x</body>", "T\nx"),
        ("<head><script>if (a < b) {}</script><body>x", "x"),
        ("<ul><li>a<li>b</ul>", "a\nb"),
        ("<table><tr><td>1</td><td>2</td></tr></table>", "1\t2"),
        ('see <a href="/x">here</a> and <a href="#top">up</a>', "see here (/x) and up"),
        ("5 &lt; 6 &copy; &nbsp;x", "5 < 6 © x"),
        ("<svg><title>no</title></svg>yes", "yes"),
        ("</p></body>odd</html>", "odd"),
        ("", ""),
    ],
)
def test_a_page_is_its_visible_text(html: str, text: str) -> None:
    assert page_text(html) == text


@pytest.mark.parametrize("piece", ["<a ", "<!--", '<a b="', "<svg></style>", "<p>x"])
def test_a_page_that_takes_too_much_of_the_processor_is_cut_with_a_note(piece: str) -> None:
    seconds = itertools.count()
    text = page_text(piece * 400, lambda: float(next(seconds)))
    assert text.endswith("[cut: the rest of this page takes too long to read]")


def test_silent_elements_nested_deeper_than_any_page_has_them_cost_no_more_each() -> None:
    assert page_text("<p>before" + "<svg>" * 5_000 + "hidden") == "before"
