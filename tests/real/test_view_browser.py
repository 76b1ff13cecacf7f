"""The pages of ``bagent view`` in a real Chromium: clicks, keys, live numbers, contrast, harm."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bagent.store.journal.journal import Journal
from bagent.view.catalog import RunCatalog
from bagent.view.server import serve
from real.parts import venv
from support.http_servers import in_thread
from support.stored_runs import make_run, stored

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

HOSTILE = (
    "</pre><script>document.title='harm'</script><img src=x onerror=\"document.title='harm'\">"
)
SIZES = (1280, 375)
PAGES = (
    *("", "run/job/", "run/job/rows", "run/job/rows?status=invalid"),
    *('run/job/row?key=[1,"main",0,"r1"]', "compare?a=job&b=other"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two runs of 120 rows: labels, scores, failures, a child, hostile texts."""
    made: Path = tmp_path_factory.mktemp("runs")

    def rows(shift: int) -> Iterator[Any]:
        for row in range(120):
            answer = {"label": ("good", "bad")[row % 5 == shift], "score": row % 40}
            yield stored(
                row,
                output=msgspec.Raw(msgspec.json.encode(answer)),
                text=msgspec.json.encode(answer).decode(),
                latency_ms=100.0 + row,
                endpoint=f"http://node{row % 3}:8000",
                started_at=1000.0 + row,
            )
        yield stored(120, status="invalid", error_kind="schema", error=HOSTILE, text=HOSTILE)
        yield stored(121, stage="sum", id="s1", text="the sum", output=None, parents=["main:r3:0"])
        yield stored(122, text="a" * 5_000_000 + "\u202e", output=None)

    columns = [("label", "VARCHAR"), ("score", "BIGINT")]
    for number, name in enumerate(("job", "other")):
        make_run(made / name, rows(number), answer_columns=columns, stages=["main", "sum"])
    return made


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    """The address of a server over the runs of a folder."""
    addresses = asyncio.Queue[str]()
    task = asyncio.create_task(serve(RunCatalog(folder, None), 0, addresses.put_nowait))
    yield await addresses.get()
    task.cancel()
    await asyncio.wait([task])


@pytest.fixture(scope="module")
def base(folder) -> Iterator[str]:
    """The address of a server over the runs, in a thread."""
    with in_thread(served(folder)) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium driven by Playwright."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium: tests/real/install_browser.sh")
    (packages,) = (venv("browser") / "lib").glob("python*/site-packages")
    sys.path.append(str(packages))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser) -> Iterator[Any]:
    """A window of 1280 pixels; the test fails if a page reports an error."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    made = context.new_page()
    errors: list[str] = []
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    yield made
    context.close()
    assert errors == []


def visit(page: Any, url: str) -> None:
    """Open a page and wait for its parts."""
    page.goto(url)
    page.wait_for_selector(".lazy:not([data-current])", state="detached")
    if page.locator("#count").count():
        page.wait_for_selector("#count >> text=row")


def test_a_bar_leads_to_its_rows_and_a_row_to_its_parent(page, base):
    visit(page, base + "run/job/")
    assert "1 row" in page.inner_text(".causes")
    page.get_by_role("link", name="main").last.click()
    page.wait_for_selector(".bar-row >> text=bad")
    page.click(".bar-row >> text=bad")
    page.wait_for_selector("#count >> text=24 rows")
    assert page.locator("tr[data-row]").count() == 24
    visit(page, base + 'run/job/row?key=[121,"sum",0,"s1"]')
    page.click("#parents a")
    assert page.inner_text("h1") == "r3"
    page.click("#children a")
    assert page.inner_text("h1") == "s1"


def test_keys_walk_through_rows_and_pages(page, base):
    visit(page, base + "run/job/rows")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent.trim()") == "r1"
    page.keyboard.press("Enter")
    page.wait_for_selector("#answer")
    page.keyboard.press("]")
    page.wait_for_selector("h1 >> text=r2")
    page.keyboard.press("u")
    page.wait_for_selector("tr[data-row]")
    page.keyboard.press("n")
    page.wait_for_selector("tr[data-row] >> text=r50")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("r77")
    page.keyboard.press("Enter")
    page.wait_for_selector("#count >> text=1 row")


def test_an_open_page_follows_a_new_start_without_moving(page, base, folder, monkeypatch):
    from bagent.view.catalog import ViewedRun

    states = ["ended"]
    describe = ViewedRun.state
    monkeypatch.setattr(ViewedRun, "state", lambda self: describe(self) | {"state": states[-1]})
    monkeypatch.setattr("bagent.view.handlers.EVENT_SHARE", 0.0)
    monkeypatch.setattr("bagent.view.handlers.IDLE_SECONDS", 0.5)
    monkeypatch.setattr("bagent.view.tables.PAUSE_SHARE", 0.0)
    failed = {"status": "failed", "error_kind": "rejected", "error": "no"}
    make_run(folder / "live", [*(stored(row) for row in range(3)), stored(3, **failed)])
    visit(page, base + "run/live/")
    assert page.inner_text("[data-live=ok]") == "3"
    assert "1 row" in page.inner_text(".causes")
    page.evaluate(
        "window.shift = 0; new PerformanceObserver((list) => {"
        " for (const entry of list.getEntries()) window.shift += entry.value;"
        "}).observe({type: 'layout-shift'})"
    )
    journal = Journal.open(folder / "live", "all", clock=lambda: 0.0, report=print)
    for row in range(4, 1004):
        journal.write(stored(row, **(failed if row % 500 == 0 else {})))
    journal.close()
    states.append("running")
    page.wait_for_selector(".state >> text=running")
    page.wait_for_selector("[data-live=ok] >> text=1,001")
    page.wait_for_selector(".causes >> text=3 rows")
    assert page.evaluate("window.shift") < 0.05


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES)
def test_pages_are_accessible_and_fit_their_window(browser, base, scheme, width):
    axe = (venv("browser") / "package" / "axe.min.js").read_text(encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    problems = []
    for path in PAGES:
        visit(page, base + path)
        extra = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        if page.evaluate(extra) > 0:
            problems.append((path, "wider than the window"))
        sideways = (
            "[...document.querySelectorAll('.wide')].some((e) => e.scrollWidth > e.clientWidth)"
        )
        if page.evaluate(sideways):
            problems.append((path, "a table scrolls sideways"))
        page.evaluate(axe)
        found_here = page.evaluate("axe.run()")["violations"]
        problems += [(path, v["id"], v["nodes"][0]["target"]) for v in found_here]
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    context.close()
    assert problems == []
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_hostile_and_very_long_answers_do_no_harm(page, base):
    for key in ('[120,"main",0,"r120"]', '[122,"main",0,"r122"]'):
        visit(page, f"{base}run/job/row?key={key}")
        assert page.title() != "harm"
    assert "5,000,001 characters" in page.inner_text("#answer")
    assert page.evaluate("document.body.textContent.includes('\\u202e')") is False
    visit(page, base + "run/job/rows?cause=schema")
    assert page.title() != "harm"
    assert "<script>" in page.inner_text("table")


def test_a_page_of_another_origin_reads_nothing(browser, base, tmp_path):
    (tmp_path / "other.html").write_text("<p>another page</p>")
    context = browser.new_context()
    page = context.new_page()
    page.goto((tmp_path / "other.html").as_uri())
    result = page.evaluate(
        "(url) => fetch(url).then((r) => r.text(), (error) => `refused: ${error.name}`)",
        base + "run/job/rows",
    )
    framed = page.evaluate(
        "(url) => new Promise((done) => { const frame = document.createElement('iframe');"
        " frame.onload = () => { try { done(frame.contentDocument.body.textContent) }"
        " catch { done('closed') } }; frame.src = url; document.body.append(frame); })",
        base,
    )
    answer = page.goto(base.rsplit("/", 2)[0] + "/wrong-token/")
    context.close()
    assert result == "refused: TypeError"
    assert framed in (None, "", "closed")
    assert answer.status == 403
