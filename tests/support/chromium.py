"""Pages as a real browser draws them (Debian's ``chromium``)."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

LOOK = """<script>
const all = [...document.querySelectorAll("svg:not(.spark)")];
const broken = all.filter((one) => one.getBoundingClientRect().height < 50);
const outside = [...document.querySelectorAll("svg text")].filter((one) => {
  const text = one.getBoundingClientRect(), whole = one.closest("svg").getBoundingClientRect();
  return text.right > whole.right + 1 || text.left < whole.left - 1
    || text.bottom > whole.bottom + 1; });
const thin = [...document.querySelectorAll("td")].filter((one) =>
  one.textContent.length > 8 && one.getBoundingClientRect().width < 60);
const small = all.filter((one) =>
  one.querySelector("text")?.getBoundingClientRect().height < 8);
document.title = JSON.stringify({
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  charts: all.length, broken: broken.length, thin: thin.map((one) => one.textContent),
  small: small.length, outside: outside.map((one) => one.textContent),
  ground: getComputedStyle(document.body).backgroundColor, shown: document.body.innerText,
  rows: document.querySelectorAll("tbody tr").length,
  found: (() => { const box = document.getElementById("find"); if (!box) return null;
    box.value = "no-such-word"; box.dispatchEvent(new Event("input"));
    return document.getElementById("shown").textContent; })(),
  loaded: performance.getEntriesByType("resource").length });
</script>"""
"""Measures the page as it is drawn, tries its search, and writes what it found into its title."""


def look(page: str, folder: Path, width: int = 1200, *, dark: bool = False) -> dict[str, Any]:
    """Draw ``page`` in a window of ``width`` pixels and return what the browser made of it.

    Returns:
        ``wide``: pixels by which it is wider than its window; ``charts``, ``broken``: pictures, and
        those without height; ``outside``: texts that leave their picture; ``thin``: of narrow
        cells; ``small``: pictures with small text; ``ground``: the colour behind all; ``rows``: of
        its tables; ``shown``: its text; ``found``: what its search says; ``loaded``: files fetched.
    """
    file = folder / f"page-{width}-{dark}.html"
    # The page's own policy allows inline scripts, as LOOK is one.
    file.write_text(page.replace("</body>", f"{LOOK}</body>"), encoding="utf-8")
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
    return dict(msgspec.json.decode(html.unescape(title)))
