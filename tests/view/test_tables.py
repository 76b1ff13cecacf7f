"""The tables behind the pages: when they are opened, renewed and closed."""

from __future__ import annotations

import asyncio
import hashlib
import math
import shutil
import threading

import pytest
from aiohttp import ClientPayloadError

from bagent.backends.request import encode_payload
from bagent.errors import UsageError
from bagent.store.journal.journal import Journal
from bagent.store.query import connect_tables, has_fresh_tables
from bagent.store.run_dir import RunDir
from bagent.view import catalog as view_catalog
from bagent.view import tables as view_tables
from bagent.view.catalog import RunCatalog, RunStates, ViewedRun
from bagent.view.compare import compare_runs
from bagent.view.filters import FieldTest, RowFilter
from bagent.view.row import PromptRenderer
from bagent.view.rows import export
from bagent.view.tables import RunTables
from support.stored_runs import make_run, stored
from support.viewed_runs import TOKEN, viewing, words


async def renew(tables: RunTables) -> None:
    """Let tables of an ended run be renewed, if they are due, to the end."""
    tables.renew_if_due(running=False)
    while tables._task is not None:
        await asyncio.sleep(0.01)


async def test_tables_retired_before_a_query_begins_stay_open_for_it(tmp_path, monkeypatch):
    tables = RunTables(make_run(tmp_path / "job", [stored(0)]))
    assert await tables.ready()

    async def close_first(work):
        await tables.close()
        return work()

    monkeypatch.setattr(view_tables.asyncio, "to_thread", close_first)
    assert await tables.ask(lambda db: db.row("select count(*) as n from results")) == {"n": 1}


async def test_a_page_is_made_of_one_state_of_tables_that_are_replaced_meanwhile(tmp_path):
    tables = RunTables(make_run(tmp_path / "job", [stored(0)]))
    newer = [make_run(tmp_path / str(n), map(stored, range(n))) for n in (2, 3)]
    with connect_tables(newer, print):
        files = [run.path / "results.parquet" for run in newer]
    assert await tables.ready()

    def count_twice(db):
        counts = [db.row("select count(*) as n from results")["n"]]
        if files:
            files.pop(0).replace(tables.run.path / "results.parquet")
            if not files:
                db.run("select error('the footer of another file')")
        return [*counts, db.row("select count(*) as n from results")["n"]]

    assert await tables.ask(count_twice) == [3, 3]
    await tables.close()


async def test_closed_tables_are_not_opened_again(tmp_path):
    tables = RunTables(make_run(tmp_path / "job", [stored(0)]))
    await tables.close()
    assert not await tables.ready()
    with pytest.raises(UsageError, match="closed"):
        await tables.ask(lambda db: db.row("select 1"))


async def test_a_failure_to_open_is_told_and_not_repeated_at_once(tmp_path, monkeypatch):
    attempts: list[RunDir] = []

    def fail(run, report):
        attempts.append(run)
        raise OSError("no space left")

    monkeypatch.setattr(view_tables, "_OpenTables", fail)
    tables = RunTables(make_run(tmp_path / "job", [stored(0)]))
    for _ in range(3):
        with pytest.raises(UsageError, match="no space left"):
            await tables.ask(lambda db: db.row("select 1"))
    assert len(attempts) == 1


async def test_an_export_takes_longer_than_a_query_may(tmp_path, monkeypatch):
    monkeypatch.setattr("bagent.view.rows.EXPORT_BATCH", 1)
    tables = RunTables(make_run(tmp_path / "job", (stored(row) for row in range(3))))
    assert await tables.ready()
    monkeypatch.setattr(view_tables, "QUERY_SECONDS", 0.0)
    assert len([*export(tables, RowFilter(), "jsonl")]) == 3
    await tables.close()


async def test_a_download_that_fails_halfway_breaks_off(tmp_path, monkeypatch):
    def pieces(*_):
        yield b"first"
        raise UsageError("the disk is gone")

    make_run(tmp_path / "job", [stored(0)])
    monkeypatch.setattr("bagent.view.handlers.export", pieces)
    async with viewing(tmp_path) as viewer:
        await viewer.page("")
        with pytest.raises(ClientPayloadError):
            async with viewer.client.get(f"/{TOKEN}/run/job/export.jsonl") as response:
                await response.read()


def test_a_line_of_a_batch_file_is_only_exact_with_the_hash_of_what_was_sent(tmp_path):
    renderer = PromptRenderer(make_run(tmp_path / "job", [stored(0)]))
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    data = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    sent = hashlib.sha256(encode_payload(body)).hexdigest()
    row = {"stage": "main", "input": data, "prompt_sha256": sent}
    assert [message.text for message in renderer.render(row, []).messages] == ["hello"]
    assert renderer.render(row, []).exact
    assert not renderer.render(row | {"prompt_sha256": "0" * 64}, []).exact


async def test_conditions_on_json_select_the_same_rows_on_the_page_and_in_the_export(tmp_path):
    make_run(tmp_path / "job", (stored(row) for row in range(3)))
    pair = ("sql", "output.score = 1")
    async with viewing(tmp_path) as viewer:
        await viewer.page("rows", pair)
        assert await viewer.text("run/job/count", pair) == '{"count": 1}'
        assert len((await viewer.text("run/job/export.jsonl", pair)).splitlines()) == 1


@pytest.mark.parametrize(
    ("operation", "low", "high", "label"),
    [
        ("between", 1000, math.nextafter(1006, math.inf), "score from 1,000 to 1,006"),
        ("between", 0, 100, "score from 0 to below 100"),
        ("length", 9881, 12238, "score from 9,881 to 12,237 characters"),
    ],
)
def test_a_range_says_whether_its_upper_end_is_in_it(operation, low, high, label):
    test = FieldTest("answer", "score", operation, None, low, high)
    assert test.label == label


async def test_rows_without_an_id_are_compared_by_their_number(tmp_path):
    tables = []
    for name in "ab":
        rows = [stored(row, id=None, text=f"{row} {name if row else ''}") for row in range(3)]
        for row in rows:
            row.output = None
        tables.append(RunTables(make_run(tmp_path / name, rows)))
        assert await tables[-1].ready()
    with tables[0].results_file() as left, tables[1].results_file() as right:
        result = compare_runs((left, right), "different", None)
    assert (result.both, result.same, result.different, result.missing) == (3, 1, 2, 0)
    assert [(row["text_a"], row["text_b"]) for row in result.rows] == [
        ("1 a", "1 b"),
        ("2 a", "2 b"),
    ]
    for each in tables:
        await each.close()


async def test_the_tables_of_an_ended_run_are_renewed_without_a_pause(tmp_path, monkeypatch):
    monkeypatch.setattr("bagent.view.tables.SHORTEST_PAUSE", 0.0)
    monkeypatch.setattr("bagent.view.tables.PAUSE_SHARE", 1e9)
    tables = RunTables(make_run(tmp_path / "job", [stored(0)]))
    assert await tables.ready()
    journal = Journal.open(tmp_path / "job", "all", clock=lambda: 0.0, report=print)
    journal.write(stored(1))
    journal.close()
    tables.renew_if_due(running=False)
    while tables.version == 1:
        await asyncio.sleep(0.02)
    assert await tables.ask(lambda db: db.row("select count(*) as n from results")) == {"n": 2}
    await tables.close()


async def test_opening_many_runs_at_once_finds_each_of_them(tmp_path):
    for name in "abcd":
        make_run(tmp_path / name, [stored(0)])
    catalog = RunCatalog(tmp_path, None)
    first = catalog.find("a")
    assert (await first.tables.ready(), first.tables.version) == (True, 1)
    names = [catalog.find(name).name for name in "abcdab"]
    assert names == [*"abcdab"]
    await catalog.close()
    # An open page of a closed run is not told of newer tables, which would be fetched in a loop.
    assert (await first.tables.ready(), first.tables.version) == (False, 0)


async def test_the_page_of_a_run_does_not_wait_for_its_tables(tmp_path, monkeypatch):
    make = threading.Event()
    opened = view_tables._OpenTables
    monkeypatch.setattr(view_tables, "_OpenTables", lambda *given: make.wait() and opened(*given))
    make_run(tmp_path / "job", [stored(0), stored(1, status="failed", error_kind="rejected")])
    async with viewing(tmp_path) as viewer:
        part = asyncio.create_task(viewer.page("overview"))
        try:
            page = words(await asyncio.wait_for(viewer.page(""), 20))
            assert not part.done()
        finally:
            make.set()
        assert "1 ok 50 % 1 failed 50 %" in page
        assert "Why rows failed 1 row 50 % rejected" in words(await part)


async def test_an_ended_run_is_read_again_only_after_a_file_of_it_changed(tmp_path, monkeypatch):
    reads: list[RunDir] = []
    describe = view_catalog.describe
    monkeypatch.setattr(view_catalog, "describe", lambda *a: reads.append(a[0]) or describe(*a))
    source_of = view_tables.source_of
    monkeypatch.setattr(view_tables, "source_of", lambda run: reads.append(run) or source_of(run))
    monkeypatch.setattr(view_tables, "SHORTEST_PAUSE", 0.0)
    viewed = ViewedRun(make_run(tmp_path / "job", [stored(0)]), RunStates())

    async def look() -> int:
        reads.clear()
        state = viewed.state()
        await renew(viewed.tables)
        assert state["ok"] == 1
        return len(reads)

    assert await viewed.tables.ready()
    await look()  # the tables are new files
    assert [await look() for _ in range(3)] == [0, 0, 0]
    (tmp_path / "job" / "stop").touch()
    assert [await look() for _ in range(2)] == [2, 0]
    await viewed.tables.close()


async def test_those_who_ask_the_same_at_once_wait_for_one_query(tmp_path):
    tables = RunTables(make_run(tmp_path / "job", [stored(0)]))
    asked: list[int] = []

    def count(db):
        asked.append(1)
        return db.row("select count(*) as n from results")["n"]

    assert await asyncio.gather(*(tables.ask(count, key="n") for _ in range(3))) == [1, 1, 1]
    assert (await tables.ask(count, key="n"), asked) == (1, [1])

    def fail(_):
        asked.append(2)
        raise UsageError("no")

    for _ in range(2):
        with pytest.raises(UsageError, match="no"):
            await tables.ask(fail, key="failing")
    assert asked == [1, 2, 2]
    await tables.close()


async def test_tables_that_the_run_itself_made_replace_the_open_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(view_tables, "SHORTEST_PAUSE", 0.0)
    run = make_run(tmp_path / "job", [stored(0)])
    tables = RunTables(run)

    async def count() -> int:
        await renew(tables)
        return await tables.ask(lambda db: db.row("select count(*) as n from results")["n"], "n")

    assert await count() == 1
    shutil.rmtree(run.path)
    make_run(tmp_path / "job", [stored(0), stored(1), stored(2)])
    with connect_tables([run], print):
        assert has_fresh_tables(run)
    assert await count() == 3
    await tables.close()
