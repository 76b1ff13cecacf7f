"""What stands out on the page: endpoints, causes of failures, fields of long answers, stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bagent.report import ReportInfo
from bagent.report.answer_fields import FieldProfile, profile_fields
from bagent.report.html import share
from bagent.report.overview import down_endpoints
from bagent.report.queries import ReportDb
from bagent.report.suspects import find_suspects
from support.report_pages import TableRun


@pytest.fixture
def run() -> Iterator[TableRun]:
    made = TableRun()
    yield made
    made.close()


def stands_out(run: TableRun, about: ReportInfo | None = None) -> str:
    return run.section("what", about)


def test_a_slow_endpoint_is_told_apart_also_from_a_single_other(run):
    for row in range(60):
        number = row % 2
        run.result(row)
        run.attempt(row, f"node{number}", 3.0 if number == 1 else 1.0)
    words = stands_out(run)
    assert "node1 is slow: half of its attempts take longer than 3.0s, 3.0 times" in words
    assert "(6.67 tokens a second in each request, the others 20)" in words
    assert "node0 is slow" not in words


@pytest.mark.parametrize(
    ("step", "words"),
    [(0.1, "the slowest takes 1.1 times"), (0.01, "all take about the same time")],
)
def test_endpoints_alike_are_said_to_be_so(run, step, words):
    for row in range(60):
        run.result(row)
        run.attempt(row, f"node{row % 3}", 1.0 + (row % 3) * step)
    assert f"no endpoint stands out: {words}" in stands_out(run)


def test_an_endpoint_is_not_slow_for_the_longer_answers_of_its_stage(run):
    for row in range(40):
        for stage, seconds in (("short", 1.0), ("long", 9.0)):
            run.result(row, stage=stage)
            for number in range(2):
                run.attempt(row, f"{stage}{number}", seconds, stage=stage)
    assert "is slow" not in stands_out(run)


def test_an_endpoint_that_is_slow_at_times_is_told_by_its_slowest_tries(run):
    for row in range(600):
        run.result(row)
        run.attempt(row, f"node{row % 3}", 30.0 if row % 3 == 2 and row % 60 == 2 else 1.0)
    words = stands_out(run)
    assert (
        "node2 is slow at times: one attempt in a hundred takes longer than 30s, 30.0 times"
        in words
    )


@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_a_few_attempts_at_another_endpoint_are_nothing_to_compare_with(run, seconds):
    for row in range(300):
        run.result(row)
        if row < 3:
            run.attempt(row, "node1", seconds)
        else:
            run.attempt(row, "node0", 30.0 if row % 20 == 5 else 1.0)
    assert "is slow" not in stands_out(run)


def profile_of(run: TableRun, score: str, rows: int) -> FieldProfile:
    """Return the profile of a field whose value in row ``n`` is an SQL expression."""
    run.connection.execute("drop table answers")
    run.connection.execute(
        f"create table answers as select n::varchar as id, {score} as score from range({rows}) t(n)"
    )
    (profile,) = profile_fields(ReportDb(run.connection), None, {"score": "score"})
    return profile


@pytest.mark.parametrize(
    ("score", "label", "highest"), [("n / 100.0", "0.9 to 1", 1), ("n", "90 to 100", 100)]
)
def test_the_highest_number_is_in_the_bin_that_ends_at_it(run, score, label, highest):
    bars = profile_of(run, score, 101).bars
    assert bars[-1].label == label
    assert sum(bar.rows for bar in bars) == 101
    assert bars[-1].high > highest  # the view's filter is below it


@pytest.mark.parametrize("kind", ["bigint", "double"])
def test_far_numbers_leave_most_bins_to_the_others(run, kind):
    score = f"(case n when 7 then 90000 when 8 then -500 else n % 100 end)::{kind}"
    bars = profile_of(run, score, 1000).bars
    first, *middle, last = bars
    assert (first.low, last.label.split(" to ")[1]) == (-500, "90,000")
    assert [bar.rows for bar in bars if bar.far] == [first.rows, last.rows] == [1, 1]
    assert len(middle) >= 8
    assert sum(bar.rows for bar in bars) == 1000
    assert all(bar.rows >= 40 for bar in middle)
    assert last.high > 90_000  # the view's filter is below it


def test_whole_numbers_with_a_gap_have_a_bar_for_each_value(run):
    bars = profile_of(run, "if(n = 5, 99, 1 + n % 5)", 100).bars
    assert [bar.label for bar in bars] == ["1", "2", "3", "4", "5", "99"]
    assert bars[-1].rows == 1


NAMES = {name: name for name in ("label", "score", "reason")}


def put_answers(run: TableRun, rows: list[tuple[str, int, str]]) -> None:
    """Make results of alternating endpoints, and the table of their answers."""
    run.connection.execute("drop table answers")
    run.connection.execute(
        "create table answers (id varchar, label varchar, score bigint, reason varchar)"
    )
    for number, (label, score, reason) in enumerate(rows):
        output = {"label": label, "score": score, "reason": reason}
        run.result(number, output=output, endpoint=f"node{number % 3}")
    lines = [value for number, row in enumerate(rows) for value in (f"r{number}", *row)]
    values = ", ".join(["(?, ?, ?, ?)"] * len(rows))
    run.connection.execute(f"insert into answers values {values}", lines)


def suspects(run: TableRun) -> list[str]:
    run.fill()
    return [each.message for each in find_suspects(ReportDb(run.connection), None, NAMES)]


def test_answers_that_may_be_wrong_are_named(run):
    rows = [("no" if n % 4 else "yes", 1 + n % 5, f"since {n}") for n in range(600)]
    for n in range(7, 600, 100):
        rows[n] = ("no", 4, "I do not understand this text.")
    rows[33] = ("yes", 99, " ")
    for n in range(2, 600, 3):
        rows[n] = ("yes", rows[n][1], rows[n][2])
    put_answers(run, rows)
    assert suspects(run) == [
        "node2 answers label = yes in 100 % of its rows, the others in 25 %",
        "1 answer with score 99; most have 1 to 5",
        "1 answer with a blank reason",
        '6 answers with the same reason, which differs elsewhere: "I do not understand this text."',
    ]


def test_a_doubtful_answer_has_what_its_rows_share_and_the_command_that_lists_them(run):
    put_answers(run, [("no", 1 + n % 5, f"since {n}") for n in range(600)])
    for n in range(600, 630):
        text = "I do not understand."
        output = {"label": "no", "score": 3, "reason": text}
        run.result(n, output=output, input={"language": "nl"}, endpoint=f"node{n % 3}")
        run.connection.execute("insert into answers values (?, 'no', 3, ?)", [f"r{n}", text])
    page = run.page(ReportInfo("job", run="runs/job", properties=NAMES))
    what = page.sections["what"]
    assert "30 answers with the same reason" in what
    assert "What these rows share: language = nl (100 % of them, 0 % of the other rows)" in what
    assert "rows r600, r601, r602, r603, r604 and 25 more" in what
    condition = "reason = 'I do not understand.'"
    assert f'bagent results runs/job --where "{condition}" --with-input' in what
    assert "A sample of 630 rows: 30 of 30 doubtful answers" in page.sections["sample"]


def test_a_far_number_of_many_digits_is_found_by_its_command(run):
    put_answers(run, [("no", 1_234_567 if n == 9 else 1 + n % 5, f"{n}") for n in range(600)])
    run.fill()
    db = ReportDb(run.connection)
    (suspect,) = find_suspects(db, None, NAMES)
    assert suspect.where(db) == "score = 1234567"
    assert db.rows(f"select id from results where {suspect.condition}") == [{"id": "r9"}]


def test_usual_answers_are_not_suspected(run):
    kinds = ("It is a bug.", "It is a wish.", "It is praise.")
    put_answers(run, [(f"l{n % 7}", (n % 40) ** 2, kinds[n // 3 % 3]) for n in range(600)])
    assert suspects(run) == []


def test_an_endpoint_that_answered_and_died_is_not_said_to_have_never_answered(run):
    run.result(0)
    run.attempt(0, "gone", 1.0)
    run.add("endpoints", endpoint="gone", at=5000.0, healthy=False, in_flight=0, limit=8)
    removed = {"at": 5100.0, "healthy": False, "reason": "left the hostfile"}
    run.add("endpoints", endpoint="cut", **removed, in_flight=1, limit=8)
    run.add("endpoints", endpoint="mute", at=5000.0, healthy=False, in_flight=0, limit=8)
    run.fill()
    ends = down_endpoints(ReportDb(run.connection))
    messages = {endpoint: end.message for endpoint, end in ends.items()}
    assert messages["gone"].startswith("died after ")
    assert messages["cut"] == "left the hostfile at 01:25:00 UTC"
    assert messages["mute"] == "never answered"


def test_the_table_of_endpoints_shows_deaths_and_tells_failed_attempts_from_rows(run):
    for row in range(100):
        kind = {0: "schema", 1: "connect"}.get(row % 10)
        failed = {"status": "invalid", "error_kind": kind} if kind == "schema" else {}
        run.result(row, endpoint=f"node{row % 2}", **failed)
        run.attempt(row, f"node{row % 2}", 1.0, **({"error_kind": kind} if kind else {}))
    for name in ("node1", "mute"):
        run.add("endpoints", endpoint=name, at=900.0, healthy=False, in_flight=0, limit=8)
    table = run.page().sections["endpoints"]
    death = "node1\ndied after 00:18:20 UTC, did not come back; no row was lost"
    assert table.index("mute\nnever answered") < table.index(death)
    assert f"{death}\n1.0\n50\n20 %\nconnect\n0 %" in table
    assert "node0\nok\n1.0\n50\n0 %\n20 %\n" in table


def test_a_finding_counts_what_the_table_of_endpoints_counts(run):
    for row in range(100):
        kind = {0: "schema", 1: "timeout"}.get(row % 10) if row < 80 else None
        failed = {"status": "invalid", "error_kind": kind} if kind == "schema" else {}
        run.result(row, endpoint=f"node{row % 2}", **failed)
        run.attempt(row, f"node{row % 2}", 1.0, **({"error_kind": kind} if kind else {}))
    page = run.page()
    findings, table = page.sections["what"], page.sections["endpoints"]
    failing = "is failing: 16 % of its"
    assert f"node1 {failing} attempts failed (mostly timeout), 0 % elsewhere" in findings
    assert f"node0 {failing} rows failed (mostly schema), 0 % elsewhere" in findings
    assert "node1\nfailing\n1.0\n50\n16 %\ntimeout\n0 %\n" in table
    assert "node0\nfailing\n1.0\n50\n0 %\n16 %\n" in table


def test_rows_that_failed_at_a_dead_endpoint_are_counted(run):
    for row in range(9):
        failed = {"status": "failed", "error_kind": "connect"} if row < 3 else {}
        run.result(row, endpoint="node1", **failed)
        run.attempt(row, "node1", 1.0)
    run.add("endpoints", endpoint="node1", at=900.0, healthy=False, in_flight=0, limit=8)
    assert "did not come back; 3 rows failed there" in stands_out(run)


def test_the_timeline_marks_when_an_endpoint_died(run):
    for row in range(100):
        run.result(row)
        run.attempt(row, f"node{row % 2 if row < 40 else 0}", 1.0)
    run.add("endpoints", endpoint="node1", at=1060.0, healthy=False, in_flight=0, limit=8)
    page = run.page()
    lines = [attributes["x"] for _, attributes in page.tags if attributes.get("class") == "end"]
    assert lines == ["240.00"] * 2  # 40 of 100 seconds, of 600; rows and tokens
    assert "Red line: node1 died after 00:17:20 UTC" in page.sections["timeline"]


@pytest.mark.parametrize(
    ("part", "text"), [(299, "99.7 %"), (300, "100 %"), (150, "50 %"), (1, "0.3 %"), (297, "99 %")]
)
def test_a_share_is_not_rounded_to_all(part, text):
    assert share(part, 300) == text


def failing(row: int, error: str, **changes: Any) -> dict[str, Any]:
    return {"status": "invalid", "error_kind": "schema", "error": error, **changes}


def test_a_failure_is_told_with_what_its_rows_share(run):
    for row in range(400):
        bad = row % 40 == 1
        run.result(
            row,
            input={"kind": "table" if bad else "text", "n": row, "lang": "en"},
            **(failing(row, f'/year: "{row} AD" is not of type "integer"') if bad else {}),
        )
    words = stands_out(run)
    assert "10 rows (2.5 %) failed (schema): /year:" in words
    assert "What these rows share: kind = table (100 % of them, 0 % of the other rows)" in words
    assert words.count("failed (schema)") == 1  # the value that differs makes no group of its own


def test_a_failure_beyond_a_size_is_told_with_the_size(run):
    for row in range(400):
        size = 9000 + row if row % 40 == 1 else 100 + row % 97
        bad = {"status": "failed", "error_kind": "context_overflow", "error": f"{size} tokens"}
        run.result(
            row,
            input={"text": "x" * size, "other": "y" * (row % 89)},
            **(bad if size > 5000 else {}),
        )
    words = stands_out(run)
    assert "10 rows (2.5 %) failed (context_overflow)" in words
    assert "9,001 to 9,361 characters of text (100 % of them, 0 % of the other rows)" in words


def test_a_few_long_texts_among_empty_ones_are_told_by_their_size(run):
    for row in range(400):
        bad = {"status": "failed", "error_kind": "context_overflow", "error": "too long"}
        if row % 20 == 1:
            run.result(row, input={"text": "x" * (9000 + row)}, prompt_tokens=None, **bad)
        else:
            run.result(row, input={"text": ""}, model="m")
    words = stands_out(run)
    assert "9,001 to 9,381 characters of text (100 % of them, 0 % of the other rows)" in words
    assert "no model" not in words  # a failed row has none


def test_failures_that_stand_close_in_time_are_told_with_the_time(run):
    for row in range(400):
        bad = {"status": "failed", "error_kind": "timeout", "error": "no answer"}
        run.result(row, **(bad if 100 <= row < 130 else {}))
    assert "Nearly all of them ended between 00:18:21 and 00:18:49" in stands_out(run)


def test_the_files_that_failing_rows_came_from_are_told(run):
    for row in range(200):
        bad = row % 20 == 3
        run.result(
            row, source="b.csv" if bad else "a.csv", **(failing(row, "/a: x") if bad else {})
        )
    assert "share: source = b.csv (100 % of them" in stands_out(run)


def test_the_size_of_the_field_that_makes_answers_long_is_told(run):
    for row in range(300):
        notes = row * 37 % 300
        run.result(
            row,
            input={"notes": "n" * notes, "title": "t" * (row * 7 % 300)},
            completion_tokens=20 + notes * 2,
        )
    words = stands_out(run)
    assert "characters of notes get answers of" in words
    assert "the larger notes, the longer the answer (correlation 1.00)" in words
    assert "title" not in words


def test_the_sizes_of_a_field_stand_in_their_order_and_what_may_be_chance_is_marked(run):
    for row in range(400):
        tokens = 20 + row // 4 + 60 * (row % 25 == 0)
        run.result(row, input={"text": "x" * row, "n": row % 25}, completion_tokens=tokens)
    fields = run.section("fields")
    cells = [cell for cell in fields.split("\n") if cell.endswith(" characters")]
    lows = [int(cell.split(" ")[0]) for cell in cells]
    assert len(lows) > 1
    assert lows == sorted(lows)
    assert "Weak: fewer than 20 rows" in fields


def test_a_slow_endpoint_of_few_tries_is_called_weak(run):
    for row in range(60):
        run.result(row)
        run.attempt(row, "rare" if row % 10 == 0 else "usual", 3.0 if row % 10 == 0 else 1.0)
    words = stands_out(run)
    assert "weak: rare is slow" in words


def test_a_field_that_is_mostly_absent_is_told_by_its_presence(run):
    for row in range(300):
        data = {"id": f"r{row}"} | ({"style": "at length"} if row % 10 == 0 else {})
        cut = {"finish_reason": "length", "status": "truncated", "error_kind": "truncated"}
        run.result(row, input=data, **(cut if row % 10 == 0 else {}))
    words = stands_out(run)
    assert "100 % of the answers of rows with style = at length are cut off at the limit" in words


def test_fields_that_no_prompt_uses_do_not_explain_long_answers(run):
    for row in range(300):
        long = row % 10 == 0
        data = {"depth": "deep" if long else "flat", "batch": "b" if long else "a"}
        run.result(row, input=data, completion_tokens=400 if long else 20)
    words = stands_out(run, ReportInfo("run", in_prompt=frozenset(["depth"])))
    assert "depth = deep" in words
    assert "batch" not in words


def staged(run: TableRun) -> None:
    for row in range(40):
        bad = row < 4
        failed = {"status": "failed", "error_kind": "timeout", "error": "no answer", "text": None}
        run.result(row, stage="review", **(failed if bad else {}))
        run.result(row, stage="judge", text=f"score {row}", parents_failed=1 if bad else None)
    run.result(0, stage="vote", text="the vote", completion_tokens=None, endpoint=None)


def test_stages_are_shown_in_their_order_with_their_failures(run):
    staged(run)
    page = run.page(ReportInfo("run", stages=("review", "judge", "vote")))
    table = page.sections["stages"]
    assert table.index("review") < table.index("judge") < table.index("vote")
    assert "review\n40\n36\n4\n10 %\n" in table
    words = page.sections["what"]
    assert "stage review: 4 rows (10 %) failed (timeout)" in words
    assert "stage judge: 4 of 40 rows were made of rows some of which had failed" in words
    assert "results of all stages 81" in " ".join(page.sections[""].split())


def test_a_tool_that_fails_often_is_told_with_why(run):
    run.result(0, turns=2)
    for n in range(4):
        call = {"name": "sql", "started": float(n), "shared": False, "cached": False}
        call |= {"error": "bad_arguments"} if n else {}
        run.add("tool_calls", row=0, stage="main", answer=0, turn=1, latency_ms=5.0, **call)
    assert "3 of 4 calls of sql failed: mostly bad_arguments" in stands_out(run)
