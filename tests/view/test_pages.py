"""The pages of ``bagent view``: what a person finds on them."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from bagent.errors import WriteError
from bagent.report import endpoints
from bagent.report.overview import costs, throughput
from bagent.report.queries import ReportDb
from bagent.rows import RowsConfig, open_rows
from bagent.store.journal.journal import Journal
from bagent.store.query import connect_tables
from bagent.types import Outcome
from bagent.view.catalog import ViewedRun
from bagent.view.handlers import live_values
from support.agent_jobs import agent_job, calls
from support.cli import run_here
from support.fake_server import FakeServer
from support.jobs import write_job, write_rows
from support.replies import ok, ok_json, status
from support.report_pages import TableRun, read
from support.stage_jobs import write_stages
from support.stored_runs import make_run, stored
from support.viewed_runs import viewing, words

pytestmark = pytest.mark.tables

SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"enum": ["good", "bad"]},
        "score": {"type": "integer"},
        "reason": {"type": "string"},
    },
    "required": ["label", "score"],
}


@pytest.fixture(autouse=True)
def own_runs(job_dir, monkeypatch):
    """Let the tests be the user who made the runs."""
    monkeypatch.setenv("HOME", str(job_dir / ".home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)


@pytest.fixture(scope="module")
def twelve_rows(tmp_path_factory):
    """A run of twelve rows: seven good, three bad, one invalid, one refused by the server."""
    folder = tmp_path_factory.mktemp("twelve")
    script = {
        f"r{n}": [ok_json({"label": "good", "score": n, "reason": "x" * n})] for n in range(8)
    }
    script |= {f"r{n}": [ok_json({"label": "bad", "score": 0})] for n in (8, 9, 10)}
    script |= {"r11": [ok('{"label": "other", "score": 1}')], "r12": [status(400)]}
    with FakeServer(script) as server:
        write_job(folder, server.url, 12, output={"schema": SCHEMA, "retries": 0})
        assert run_here(["run", "job.yaml", "--progress", "none"], folder).code == 1
    return folder


@pytest.fixture
def runs(twelve_rows, monkeypatch):
    """The run of twelve rows, for the user who made it."""
    monkeypatch.setenv("HOME", str(twelve_rows / ".home"))
    return twelve_rows / "runs"


async def test_a_run_shows_its_totals_causes_and_the_commands_that_mend_them(runs):
    async with viewing(runs) as viewer:
        page = words(await viewer.page("")) + words(await viewer.page("overview"))
    assert "10 ok" in page
    assert "2 failed" in page
    assert "--retry schema" in page
    assert "--retry rejected" in page
    assert "is not one of" in page
    assert "the same command sends none of these rows again" in page
    assert "edit the job or its input first, as the failures below say, then bagent run" in page


async def test_a_run_names_its_slow_endpoint_as_its_report_does(tmp_path):
    slow = {0: 100.0, 1: 900.0, 2: 100.0}
    rows = (stored(n, endpoint=f"node{n % 3}", latency_ms=slow[n % 3]) for n in range(90))
    run = make_run(tmp_path / "job", rows, attempts=True)
    async with viewing(tmp_path) as viewer:
        page = words(await viewer.page("overview"))
    with connect_tables([run], print) as (connection, _):
        db = ReportDb(connection)
        (finding,) = endpoints.findings(endpoints.endpoint_rows(db), {})
    assert "is slow: half of its attempts take longer than 900ms, 9.0 times" in finding
    assert f"What stands out Endpoints {finding}" in page


async def test_the_answers_show_values_and_a_click_on_a_bar_lists_its_rows(runs):
    async with viewing(runs) as viewer:
        page = await viewer.page("answers")
        links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
        listed = []
        for link in links:
            async with viewer.client.get(link) as response:
                listed.append((await response.text()).count("<tr data-row>"))
    text = words(page)
    assert "good 7 70 % bad 3 30 %" in text
    assert "0 to 7, median" in text
    assert "1 to 7 characters" in text
    assert "3 without it" in text
    labels = [attrs.get("aria-label") for _, attrs in page.tags]
    assert "0: 3 (30 %)" in labels
    # good, bad; eight scores; seven lengths and those without
    assert listed == [7, 3, 3, 1, 1, 1, 1, 1, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1]


def write_input(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Write the input of a run; return how the run names it, and the key of each row."""
    source = write_rows(folder / "rows.jsonl", rows)
    config = RowsConfig(inputs=(str(source),), base=folder)
    with closing(open_rows(config)) as reader:
        return config.to_json(), [f"{row.key:016x}" for batch in reader.batches() for row in batch]


async def test_the_page_tells_what_failed_rows_and_long_answers_share(tmp_path):
    inputs = [
        {"id": f"r{n}", "kind": "text" if n % 3 else "table", "old": "yes" if n % 20 == 3 else "no"}
        for n in range(300)
    ]
    rows, keys = write_input(tmp_path, inputs)

    def outcome(n: int) -> Outcome:
        if inputs[n]["old"] == "yes":
            bad = {"status": "failed", "error_kind": "rejected", "error": "no"}
            return stored(n, key=keys[n], endpoint="node", **bad)
        tokens = n % 9 + (200 if inputs[n]["kind"] == "table" else 20)
        return stored(n, key=keys[n], endpoint="node", completion_tokens=tokens)

    make_run(tmp_path / "job", map(outcome, range(300)), rows=rows)
    async with viewing(tmp_path) as viewer:
        page = await viewer.page("findings")
        shared = words(page)
        counts = []
        for link in (str(a["href"]) for tag, a in page.tags if tag == "a"):
            counts.append(json.loads(await _body(viewer, link.replace("/rows", "/count"))))
        by_sql = await viewer.text("run/job/count", ("sql", "old = 'yes'"))
    assert by_sql == '{"count": 15}'
    assert "15 rows that failed (rejected) share old = yes (100 % of them" in shared
    assert "rows with kind = table get answers of 20" in shared
    assert counts == [{"count": 15}, {"count": 100}]


async def test_findings_count_the_rows_that_their_links_list_each_once(tmp_path):
    inputs = [{"id": f"r{n}", "language": "fi" if n % 5 == 0 else "en"} for n in range(200)]
    rows, keys = write_input(tmp_path, inputs)

    def outcome(n: int) -> Outcome:
        failed = {"status": "failed", "error_kind": "rejected", "error": "no"}
        if n == 150:
            failed = {"status": "failed", "error_kind": "template", "error": "no field"}
        if n in (1, 150) or (n % 5 == 0 and n < 96):
            return stored(n, key=keys[n], endpoint="node", **failed)
        answer = {"reason": " " if n % 5 == 0 else f"since {n}", "score": 900 if n == 7 else n % 9}
        return stored(n, key=keys[n], endpoint="node", output=Raw(json.dumps(answer).encode()))

    columns = (("reason", "VARCHAR"), ("score", "BIGINT"))
    make_run(tmp_path / "job", map(outcome, range(200)), rows=rows, answer_columns=columns)
    async with viewing(tmp_path) as viewer:
        page = await viewer.page("findings")
        links = (str(attrs["href"]) for tag, attrs in page.tags if tag == "a")
        (link,) = (link for link in links if "cause=rejected" in link)
        count = await _body(viewer, link.replace("/rows", "/count"))
    findings = words(page)
    shared = "What these rows share: language = fi (100 % of them, 12 % of the other rows)"
    assert f"19 answers with a blank reason {shared}" in findings
    doubtful = "1 answer with score 900; most have 0 to 8 20 answers in all, each counted once"
    assert doubtful in findings
    assert "21 rows that failed (rejected) share language = fi (20 of the 21, 11 %" in findings
    assert count == '{"count": 20}'


async def test_an_answer_worth_a_look_leads_to_its_rows_in_its_stage(tmp_path):
    def outcome(n: int, stage: str) -> Outcome:
        reason = "  " if n in (3, 5) else f"since {n}"
        output = Raw(json.dumps({"reason": reason}).encode())
        return stored(n, stage=stage, key=f"{n + 100 * (stage == 'b') + 1:016x}", output=output)

    outcomes = [outcome(n, stage) for stage in "ab" for n in range(20)]
    columns = (("reason", "VARCHAR"),)
    make_run(tmp_path / "job", outcomes, stages=("a", "b"), answer_columns=columns)
    async with viewing(tmp_path) as viewer:
        page = await viewer.page("findings")
        link = next(a["href"] for t, a in page.tags if t == "a" and "blank" in str(a["href"]))
        async with viewer.client.get(link) as response:
            listed = (await response.text()).count("<tr data-row>")
    assert "2 answers with a blank reason" in words(page)
    assert listed == 2


async def test_rows_are_filtered_searched_and_sorted(runs):
    async with viewing(runs) as viewer:
        for pairs, numbers in (
            ([("status", "invalid")], "11"),
            ([("status", "failed")], "11 12"),
            ([("cause", "rejected")], "12"),
            ([("q", "no such text")], ""),
            ([("q", "NUMBER 7")], "7"),
            ([("sql", "json_extract(output, '/score')::int between 5 and 6")], "5 6"),
            ([("sql", "score > 5 and label = 'good'")], "6 7"),
            ([("f", '["answer","label","is","bad"]')], "8 9 10"),
            ([("f", '["input","text","is","text number 3"]')], "3"),
            ([("sort", "n:score"), ("desc", "1"), ("status", "ok")], "7 6 5 4 3 2 1 8 9 10"),
        ):
            page = await viewer.page("rows", *pairs)
            ids = [word for word in words(page).split() if word[:1] == "r" and word[1:].isdecimal()]
            assert ids == [f"r{number}" for number in numbers.split()]
            count = json.loads(await viewer.text("run/job/count", *pairs))
            assert count == {"count": len(ids)}


async def test_the_fields_of_a_filter_are_the_first_columns_of_the_list(tmp_path):
    answer = {f"p{n}": n for n in range(12)}
    outcomes = [stored(n, output=Raw(json.dumps(answer).encode())) for n in range(3)]
    make_run(tmp_path / "job", outcomes)
    tests = ['["answer","p11","is","11"]', '["input","history","missing"]']
    async with viewing(tmp_path) as viewer:
        usual = words(await viewer.page("rows"))
        page = words(await viewer.page("rows", *(("f", test) for test in tests)))
    assert "id status p0 p1" in usual
    assert "id status history p11 p0 p1" in page
    assert "11 0 1" in page


async def test_a_wrong_sql_condition_stays_in_its_form_beside_the_error_and_the_names(runs):
    async with viewing(runs) as viewer:
        for sql, message in (
            ("colour = 'red'", '"colour" not found'),
            ("label::int = 1", "Could not convert"),
        ):
            text = await viewer.text("run/job/rows", ("sql", sql), ("status", "ok"), status=400)
            page = read(text)
            (box,) = [attrs for _, attrs in page.tags if attrs.get("name") == "sql"]
            assert box["value"] == sql
            assert message in words(page)
            assert '<option value="ok" selected>' in text
        text = await viewer.text("run/job/rows", ("sql", "colour = 'red'"), status=400)
    assert "columns of results, id, text, label, score, reason" in words(read(text))


async def test_the_share_of_cached_tokens_is_that_of_status(tmp_path, bagent):
    make_run(tmp_path / "job", [stored(0, prompt_tokens=3, cached_tokens=2)])
    async with viewing(tmp_path) as viewer:
        page = await viewer.page("")
    assert "prompt tokens cached 66 %" in words(page)
    status = bagent(["status", str(tmp_path / "job")]).out
    assert ["cache_hit_rate", "66", "%"] in [line.split() for line in status.splitlines()]


async def test_pages_of_rows_follow_each_other_without_gap_or_repetition(tmp_path):
    make_run(tmp_path / "job", (stored(row, latency_ms=row % 7 or None) for row in range(120)))
    async with viewing(tmp_path) as viewer:
        await viewer.page("")
        for pairs in ([], [("desc", "1")], [("sort", "latency_ms")]):
            listed: list[str] = []
            path, query = "rows", pairs
            for _ in range(3):
                page = await viewer.page(path, *query)
                listed += [w for w in words(page).split() if w[:1] == "r" and w[1:].isdecimal()]
                following = [a["href"] for t, a in page.tags if a.get("id") == "next-page"]
                if following:
                    path, query = str(following[0]).split("/job/")[1], []
            assert len(listed) == len(set(listed)) == 120, pairs


async def test_the_export_has_every_row_of_the_filter(runs):
    async with viewing(runs) as viewer:
        lines = (await viewer.text("run/job/export.jsonl", ("status", "ok"))).splitlines()
        table = await viewer.text("run/job/export.csv", ("status", "ok"))
        assert "no form" in await viewer.text("run/job/export.xml", status=400)
    rows = [json.loads(line) for line in lines]
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(1, 11)]
    assert rows[0]["output"] == {"label": "good", "score": 1, "reason": "x"}
    printed = ["--format", "csv", "--with-input", "--status", "ok"]
    results = run_here(["results", "job", *printed], runs.parent)
    assert table.splitlines()[0] == "id,status,label,score,reason,error,input.id,text"
    assert table.splitlines() == results.out.splitlines()


async def test_a_row_shows_prompt_attempts_answer_and_the_validators_words(runs):
    async with viewing(runs) as viewer:
        failed = await viewer.row([10, "main", 0, "r11"])
        good = await viewer.row([0, "main", 0, "r1"])
    assert "text number 11" in failed.partition("As it was sent")[2].partition("Attempts")[0]
    assert "What the validator says" in failed
    assert '"other" is not one of' in failed
    assert "As it was sent" in failed
    assert "Attempts turn, try" in failed
    assert '"label": "good"' in good
    assert "As it was sent" in good


async def test_a_job_that_changed_since_is_not_taken_for_what_was_sent(runs, tmp_path):
    copied = shutil.copytree(runs, tmp_path / "runs")
    info = json.loads((copied / "job/run.json").read_text())
    info["job"]["prompt"]["user"] = "Another {{ id }}"
    (copied / "job/run.json").write_text(json.dumps(info))
    async with viewing(copied) as viewer:
        page = await viewer.row([0, "main", 0, "r1"])
    assert "As it was sent" not in page
    assert "only for runs that you made here" in page


@pytest.fixture
def agent_runs(bagent, fs, job_dir):
    """A run of an agent that calls two tools, of which one fails."""
    first = calls(("add", '{"a":1,"b":2}'), text="I have to add")
    fs.set_script({"*": [first, calls(("fail", '{"why":"no"}')), ok("it is 3")]})
    agent_job(job_dir, fs.url)
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    return job_dir / "runs"


async def test_the_whole_transcript_of_an_agent_is_shown(agent_runs):
    async with viewing(agent_runs) as viewer:
        page = await viewer.row([0, "main", 0, "r1"])
    transcript = page.partition("Transcript turn 1")[2]
    assert "I have to add" in transcript
    assert '"a": 1' in transcript
    assert "result, 1 character 3" in transcript
    assert "turn 2" in transcript
    assert "ValueError: no" in transcript
    assert "it is 3" in page


@pytest.fixture
def staged_runs(bagent, fs, job_dir):
    """A run of two rows through two stages and a reduction."""
    fs.set_script({"*": [ok("some answer")]})
    stages = [
        {"name": "draft", "kind": "map", "prompt": {"user": "Draft {{ text }}"}},
        {"name": "check", "kind": "map", "prompt": {"user": "Check {{ draft }}"}},
        {"name": "sum", "kind": "reduce", "prompt": {"user": "Sum up {{ responses }}"}},
    ]
    write_stages(job_dir, fs.url, 2, stages, results={"duckdb": False})
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    return job_dir / "runs"


async def test_parents_and_children_of_a_row_are_a_path_that_can_be_walked(staged_runs):
    async with viewing(staged_runs) as viewer:
        (link,) = _links(await viewer.page("rows", ("stage", "sum")))
        stages, exact = [], []
        for _ in range(3):
            async with viewer.client.get(link) as response:
                page = read(await response.text())
            exact.append("As it was sent" in page.sections["prompt"])
            stages.append(words(page).partition("stage ")[2].split()[0])
            link = _links(page)[0]
        assert "sum: sum:1.0 ok" in " ".join(page.sections["children"].split())
    assert stages == ["sum", "draft", "check"]
    assert exact == [True, True, True]


def _links(page):
    """The links to rows, without those to neighbours."""
    links = [attrs for tag, attrs in page.tags if tag == "a" and "id" not in attrs]
    return [attrs["href"] for attrs in links if "/row?" in str(attrs["href"])]


@pytest.fixture
def two_runs(bagent, fs, job_dir):
    """Two runs of three rows, of which one has another answer."""
    write_job(job_dir, fs.url, 3)
    for name, color in (("one", "red"), ("two", "blue")):
        fs.set_script({"r2": [ok(f"{'at first ' * 90}a {color} house")], "*": [ok("same")]})
        assert bagent(["run", "job.yaml", "--name", name, "--progress", "none"]).code == 0
    return job_dir / "runs"


async def test_two_runs_are_compared_word_by_word(two_runs):
    async with viewing(two_runs, "one") as viewer:
        assert "one" in words(read(await viewer.text("")))
        page = words(read(await viewer.text("compare", ("a", "one"), ("b", "two"))))
        row = await viewer.text("run/one/row", ("key", '[1,"main",0,"r2"]'), ("with", "two"))
    assert "3 rows in both runs" in page
    assert "different 1" in page
    assert "a blue house" in page
    assert 2 < page.count("at first") < 40  # the beginning of both is left out
    assert "a <del>red</del><ins>blue</ins> house" in row


async def test_a_comparison_names_the_run_whose_tables_cannot_be_made(tmp_path, monkeypatch):
    def connect(runs, *args, **options):
        if runs[0].path.name == "two":
            raise WriteError("the disk is full")
        return connect_tables(runs, *args, **options)

    monkeypatch.setattr("bagent.view.tables.connect_tables", connect)
    for name in ("one", "two"):
        make_run(tmp_path / name, [stored(0)])
    async with viewing(tmp_path) as viewer:
        page = await viewer.text("compare", ("a", "one"), ("b", "two"), status=400)
    assert "two: the disk is full" in words(read(page))


async def test_a_new_start_streams_its_state_and_renews_the_tables(tmp_path, monkeypatch):
    monkeypatch.setattr("bagent.view.handlers.EVENT_SECONDS", 0.01)
    monkeypatch.setattr("bagent.view.handlers.IDLE_SECONDS", 0.01)
    monkeypatch.setattr("bagent.view.tables.SHORTEST_PAUSE", 0.0)
    monkeypatch.setattr("bagent.view.tables.PAUSE_SHARE", 0.0)
    states = chain(["ended"] * 3, repeat("running"))
    describe = ViewedRun.state
    monkeypatch.setattr(ViewedRun, "state", lambda self: describe(self) | {"state": next(states)})
    make_run(tmp_path / "job", (stored(row) for row in range(3)))
    async with viewing(tmp_path) as viewer:
        await viewer.page("")
        async with viewer.client.get("/token-of-the-test/run/job/events") as response:
            assert response.content_type == "text/event-stream"
            first = await _event(response)
            _write(tmp_path / "job", [stored(3), stored(4)])
            event = first
            while event["version"] == first["version"] or event["state"] == "ended":
                event = await _event(response)
            while event["ok"] < 5:
                event = await _event(response)
            # The first renewal may have met the journal between two rows.
            while "r4" not in words(await viewer.page("rows")).split():
                event = await _event(response)
        assert (first["ok"], first["state"]) == (3, "ended")
        assert (event["ok"], event["state"]) == (5, "running")


def test_time_and_cost_at_the_end_are_ranges_by_what_ended_so_far():
    run = TableRun()
    for row in range(600):
        seconds = row / 10 if row < 300 else 30 + (row - 300) / 20
        cost = 0.01 if row % 2 else 0.03
        run.result(row, started_at=seconds, finished_at=seconds + 1, cost_usd=cost)
    run.fill()
    db = ReportDb(run.connection)
    tables = {"throughput": throughput(db, {}), "costs": costs(db)}
    state = dict.fromkeys(("ok", "accepted", "failed", "completion_tokens", "rows_per_s"), 0)
    state |= {"state": "running", "remaining": 1000, "eta_s": 100.0, "cost_usd": 12.0}
    live = live_values(state, tables)
    run.close()
    # 20 rows a second at the end; 0.02 dollars a row, with a deviation of 0.01.
    assert live["eta"] == "48s to 51s"
    assert (live["cost"], live["cost_at_end"]) == ("$12.00", "$30.97 to $33.03")
    state["cost_usd"] = 12.5  # after the tables were made
    assert live_values(state, tables)["cost_at_end"] == "$31.47 to $33.53"


async def _body(viewer, path: str) -> str:
    async with viewer.client.get(path) as response:
        return str(await response.text())


def _write(run, outcomes: list[Outcome]) -> None:
    journal = Journal.open(run, "all", clock=lambda: 0.0, report=print)
    for outcome in outcomes:
        journal.write(outcome)
    journal.close()


async def _event(response) -> dict[str, object]:
    while True:
        line = (await response.content.readline()).decode()
        if line.startswith("data: {") and "state" in line:
            return json.loads(line[6:])
