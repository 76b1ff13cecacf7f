"""Who may read the pages of ``bagent view``, and what hostile answers can do there."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from bagent.cli.commands.view import _open_browser
from support.stored_runs import make_run, stored
from support.viewed_runs import TOKEN, viewing

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\u2066\x1b[31m\"'&"


@pytest.fixture
def folder(tmp_path):
    raw = msgspec.Raw(msgspec.json.encode({"score": 1, HOSTILE: HOSTILE}))
    rows = [
        stored(0),
        stored(1, text=HOSTILE, output=raw, id=HOSTILE, endpoint=HOSTILE, model=HOSTILE),
        stored(2, status="invalid", error_kind="schema", error=HOSTILE, text=HOSTILE),
        stored(3, text="a" * 5_000_000, output=None),
    ]
    make_run(tmp_path / "job", rows, answer_columns=[("score", "BIGINT"), (HOSTILE, "VARCHAR")])
    return tmp_path


async def test_only_the_own_page_with_the_token_is_served_and_only_read(folder):
    async with viewing(folder) as viewer:
        for path, headers, status in (
            (f"/{TOKEN}/run/job/", {}, 200),
            ("/", {}, 403),
            ("/wrong/run/job/", {}, 403),
            (f"/{TOKEN}x/run/job/", {}, 403),
            (f"/{TOKEN}/run/job/", {"Host": "example.org"}, 403),
            (f"/{TOKEN}/run/job/", {"Origin": "https://example.org"}, 403),
            (f"/{TOKEN}/run/job/", {"Origin": "http://127.0.0.1:1"}, 403),
            (f"/{TOKEN}/run/job/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}, 403),
            (f"/{TOKEN}/run/other/", {}, 400),
            (f"/{TOKEN}/run/..%2f..%2fetc/", {}, 400),
            (f"/{TOKEN}/static/..%2f__init__.py", {}, 404),
        ):
            async with viewer.client.get(path, headers=headers) as response:
                assert response.status == status, (path, headers)
                policy = response.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'")
                assert response.headers["Referrer-Policy"] == "no-referrer"
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with viewer.client.request(method, f"/{TOKEN}/run/job/rows") as response:
                assert response.status == 405


async def test_with_a_run_named_the_others_are_not_served(folder):
    make_run(folder / "other", [stored(0)])
    async with viewing(folder, "job", only=True) as viewer:
        await viewer.page("rows")
        assert "no run other" in await viewer.text("run/other/", status=400)


async def test_what_models_and_inputs_wrote_is_only_ever_text(folder):
    keys = ([1, "main", 0, HOSTILE], [2, "main", 0, "r2"])
    paths = [("", ()), ("answers", ()), ("rows", ())]
    paths += [("row", (("key", msgspec.json.encode(key).decode()),)) for key in keys]
    paths += [("rows", (("q", HOSTILE), ("f", '["answer","<b>","is","<i>"]')))]
    async with viewing(folder) as viewer:
        for path, pairs in paths:
            page = await viewer.page(path, *pairs)
            scripts = [attrs for tag, attrs in page.tags if tag == "script"]
            assert all(attrs.get("src", "").startswith(f"/{TOKEN}/static/") for attrs in scripts)
            assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]
            assert not {"img", "b", "i"} & {tag for tag, attrs in page.tags if not attrs} - {"b"}
            text = "".join(page.sections.values())
            assert not {"\u202e", "\u2066", "\x1b"} & set(text)


async def test_a_very_long_answer_is_cut_on_the_page_and_whole_as_a_file(folder):
    key = ("key", '[3,"main",0,"r3"]')
    async with viewing(folder) as viewer:
        page = await viewer.text("run/job/row", key)
        whole = await viewer.text("run/job/text", key, ("column", "text"))
        assert "no text of a row" in await viewer.text(
            "run/job/text", key, ("column", "source"), status=400
        )
    assert len(page) < 200_000
    assert "5,000,000 characters" in page
    assert len(whole) == 5_000_000


async def test_sql_in_the_page_reads_the_tables_and_nothing_else(folder, tmp_path):
    async with viewing(folder) as viewer:
        for sql in (
            "true); drop view results; select (1",
            f"true); copy results to '{tmp_path}/out'; select (1",
            "select 1; drop view results",
            "1=1) union select * from read_text('/etc/passwd') where (1=1",
            "true; copy results to '/tmp/out'",
            "true) union all select row, stage, answer, id, 1 from results where (true",
            "exists (select 1 from read_text('/etc/passwd'))",
            "no_such_column = 1",
        ):
            page = await viewer.text("run/job/rows", ("sql", sql), status=400)
            assert '<div role="alert">' in page
            assert "root:" not in page
            await viewer.page("rows")
    assert not (tmp_path / "out").exists()


async def test_damaged_addresses_are_refused_with_a_sentence(folder):
    async with viewing(folder) as viewer:
        for path, pair in (
            ("run/job/rows", ("f", "[1")),
            ("run/job/rows", ("after", "{}")),
            ("run/job/row", ("key", '[99,"main",0,"x"]')),
            ("run/job/rows", ("f", '["answer","x","between"]')),
            ("run/job/rows", ("sort", "text")),
            ("run/job/rows", ("q", "x" * 2001)),
            ("compare", ("a", "job")),
        ):
            assert "That did not work" in await viewer.text(path, pair, status=400)
        tests = [("f", '["answer","score","is","1"]')] * 13
        assert "13 filters" in await viewer.text("run/job/rows", *tests, status=400)


async def test_an_export_has_the_headers_of_a_page_and_no_formulas(tmp_path):
    make_run(tmp_path / "job", [stored(0, text="=1+1", id="-5")])
    async with viewing(tmp_path) as viewer:
        await viewer.page("")
        async with viewer.client.get(f"/{TOKEN}/run/job/export.csv") as response:
            assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
            table = await response.text()
    assert table.splitlines()[1].startswith("-5,ok,'=1+1,")


def test_the_command_line_of_the_browser_has_no_token(monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    _open_browser("http://127.0.0.1:1/secret/")
    path = Path(urlsplit(opened[0]).path)
    assert "secret" not in opened[0]
    assert "url=http://127.0.0.1:1/secret/" in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
