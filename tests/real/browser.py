"""A page as Debian's ``chromium`` draws it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

_LOOK = """<script>
const broken = [...document.querySelectorAll("svg")].filter(
  (one) => one.getBoundingClientRect().height < 50);
const outside = [...document.querySelectorAll("svg text")].filter((one) => {
  const text = one.getBoundingClientRect(), whole = one.closest("svg").getBoundingClientRect();
  return text.right > whole.right + 1 || text.left < whole.left - 1
    || text.bottom > whole.bottom + 1; });
document.title = JSON.stringify({
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  charts: document.querySelectorAll("svg").length, broken: broken.length,
  outside: outside.map((one) => one.textContent), ground: getComputedStyle(document.body)
    .backgroundColor, rows: document.querySelectorAll("tbody tr").length,
  shown: document.body.innerText,
  loaded: performance.getEntriesByType("resource").length });
</script>"""
"""Measures the page as it is drawn and writes what it found into its title."""


def look_at(page: str, folder: Path, width: int = 1200, *, dark: bool = False) -> dict[str, Any]:
    """What the browser drew of ``page``.

    Returns:
        ``wide``: pixels by which it is wider than its window; ``charts``, ``broken``: pictures, and
        those without height; ``outside``: texts that leave their picture; ``ground``: the colour
        behind all; ``rows``: of its tables; ``shown``: its text; ``loaded``: files fetched.
    """
    file = folder / f"page-{width}-{dark}.html"
    file.write_text(page.replace("</body>", f"{_LOOK}</body>"), encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},1000",
            *scheme,
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    (title,) = re.findall(r"<title>(\{.*?\})</title>", done.stdout, re.DOTALL)
    for name, sign in (("&quot;", '"'), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        title = title.replace(name, sign)
    found: dict[str, Any] = msgspec.json.decode(title)
    return found
