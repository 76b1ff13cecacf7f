"""The page is made of tables that are written here, and read back as a person would read it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bagent.report import ReportInfo, make_page
from support.report_pages import TableRun

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"'&"


@pytest.fixture
def run() -> Iterator[TableRun]:
    made = TableRun()
    yield made
    made.close()


def test_a_run_without_rows_gives_a_page_that_says_so(run):
    assert "No row has ended yet" in run.page().sections[""]
    run.result(0, turns=1)
    page = run.page()
    assert page.sections["what"] == "What stands out\nNothing.\n"
    assert not {"tools", "cost"} & set(page.sections)


def test_what_stands_out_is_the_first_section(run):
    for row in range(300):
        failed = {"status": "failed", "error_kind": "timeout", "error": f"no answer in {row} s"}
        run.result(row, **(failed if row % 33 == 5 else {}))
        run.attempt(row, f"http://node{row % 3}:8000", 4.0 if row % 3 == 2 else 1.0)
    sections = run.page().sections
    assert list(sections)[:2] == ["", "what"], "nothing but the head is before it"
    assert "http://node2:8000 is slow" in sections["what"]
    assert "9 rows (3.0 %) failed (timeout): no answer in 5 s" in sections["what"]
    assert "no answer in" in sections["failures"]
    assert {"timeline", "latency", "endpoints", "sample"} <= set(sections)


def test_accepted_truncated_answers_are_no_failures(run):
    for row in range(10):
        run.result(row, status="truncated" if row < 4 else "ok", error_kind=None)
    run.result(10, status="failed", error_kind="timeout", error="late", text=None)
    page = run.page()
    head = " ".join(page.sections[""].split())
    assert "6 ok 55 % 4 cut, accepted 36 % 1 failed 9.1 %" in head
    assert "truncated" not in page.sections["failures"]
    assert "for other reasons" not in page.sections["what"]


def test_what_models_servers_and_inputs_wrote_is_only_ever_text(run):
    for row in range(4):
        run.result(
            row,
            id=HOSTILE,
            stage=HOSTILE,
            source=HOSTILE,
            endpoint=HOSTILE,
            text=HOSTILE,
            model=HOSTILE,
            cost_usd=0.1,
            input={HOSTILE: HOSTILE},
            **({"status": "invalid", "error_kind": "schema", "error": HOSTILE} if row else {}),
        )
        run.attempt(row, HOSTILE, 1.0, error_kind="timeout", error=HOSTILE)
        call = {"name": HOSTILE, "error": HOSTILE, "started": 1.0, "shared": True, "cached": False}
        run.add("tool_calls", row=row, stage="main", answer=0, turn=1, **call)
    prompts = [("map user", HOSTILE)]
    facts, stages = [("model", HOSTILE)], [HOSTILE]
    about = ReportInfo(
        "my <run>", facts, stages, frozenset([HOSTILE]), prompts=prompts, settings=HOSTILE
    )
    page = run.page(about)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not {"img", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert not [name for name in attributes if name.startswith("on")]
    assert HOSTILE[:30] in page.sections["sample"]
    assert page.sections["job"].count(HOSTILE[:30]) == 2
    # The page asks the network for nothing.
    assert not attributes & {"src", "srcset"}
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert str(policy).startswith("default-src 'none'")


def test_schema_failures_are_counted_by_path_and_list_positions_are_one(run):
    told = (
        'not what the schema asks for: /findings/0/severity: "hgih" is not one of ["low"]',
        'not what the schema asks for: /findings/3/severity: "x" is not one of ["low"]',
        'not what the schema asks for: /: [] is not of type "object"',
        'not what the schema asks for: /findings/1: "score" is a required property',
    )
    for row, error in enumerate(told):
        run.result(row, status="invalid", error_kind="schema", error=error)
    words = run.page().sections["failures"]
    assert "/findings/*/severity\n2\n" in words
    assert "the whole answer\n1\n" in words
    assert "/findings/*/score is missing\n1\n" in words


def test_tools_and_cost_have_a_part_where_there_are_some(run):
    run.result(0, turns=1)
    run.result(1, turns=3, latency_ms=4000.0, cost_usd=0.25)
    for turn, name in ((1, "sql"), (2, "read_file"), (2, "sql")):
        call = {"name": name, "started": float(turn), "shared": turn > 1, "cached": False}
        run.add("tool_calls", row=1, stage="main", answer=0, turn=turn, latency_ms=500.0, **call)
    for turn in (1, 2):
        run.attempt(1, "node", 1.5, turn=turn)
    page = run.page()
    assert "sql\n2\n1\n1\n" in page.sections["tools"]
    assert "sql, read_file, sql\n4.0s\n3.0s\n1.5s\n" in page.sections["tools"]
    assert "$0.25" in page.sections["cost"]


def test_long_texts_do_not_make_a_long_page(run):
    for row in range(400):
        run.result(row, text="<" * 10_000, input={"a": "&" * 10_000})
    run.fill()
    page = make_page(run.connection, ReportInfo("long"))
    assert len(page.encode()) < 2_000_000
    assert "1 of" not in page
