"""The text of HTML pages."""

from __future__ import annotations

import pytest

from bagent.tools.page import page_text


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>One</p><p>Two <i>three</i></p>", "One\nTwo three"),
        ("a<br>b<br/>c", "a\nb\nc"),
        ("<title>T</title>x", "T\nx"),
        ("<head><style>b{}</style><title>T</title></head><body>x</body>", "T\nx"),
        ("<head><script>if (a < b) {}</script><body>x", "x"),
        ("<ul><li>a<li>b</ul>", "a\nb"),
        ("<table><tr><td>1</td><td>2</td></tr></table>", "1\t2"),
        ('see <a href="/x">here</a> and <a href="#top">up</a>', "see here (/x) and up"),
        ("5 &lt; 6 &copy; &nbsp;x", "5 < 6 © x"),
        ("plain words", "plain words"),
        ("<svg><title>no</title></svg>yes", "yes"),
        ("</p></body>odd</html>", "odd"),
        ("", ""),
    ],
)
def test_a_page_is_its_visible_text(html: str, text: str) -> None:
    assert page_text(html) == text
