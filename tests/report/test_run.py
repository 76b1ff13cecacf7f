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


def test_accepted_truncated_answers_are_no_failures(run):
    for row in range(10):
        run.result(row, status="truncated" if row < 4 else "ok", error_kind=None)
    run.result(10, status="failed", error_kind="timeout", error="late", text=None)
    page = run.page()
    head = " ".join(page.sections[""].split())
    assert "6 ok 55 % 4 cut, accepted 36 % 1 failed 9.1 %" in head
    assert "truncated" not in page.sections["failures"]
    assert "for other reasons" not in page.sections["what"]


def test_the_slow_endpoint_the_failures_and_the_field_of_long_answers_stand_out(run):
    for row in range(300):
        endpoint = f"http://node{row % 3}:8000"
        slow = row % 3 == 2
        kind = "review" if row % 10 == 0 else "abstract"
        failed = row % 33 == 5
        run.result(
            row,
            endpoint=endpoint,
            input={"kind": kind, "title": "t" * (row % 7)},
            completion_tokens=400 if kind == "review" else 20,
            **(
                {
                    "status": "failed",
                    "error_kind": "timeout",
                    "error": f"no answer in {row} s",
                    "text": None,
                }
                if failed
                else {}
            ),
        )
        run.attempt(row, endpoint, 4.0 if slow else 1.0)
    page = run.page()
    words = page.sections["what"]
    assert list(page.sections).index("what") <= 1, "nothing but the head is before it"
    assert "http://node2:8000 is slow" in words
    assert "4.0 times the median of the others" in words
    assert "9 rows (3.0 %) failed (timeout): no answer in 5 s" in words
    assert "kind = review get answers of 400 tokens on average, the others of 20" in words
    assert "no answer in" in page.sections["failures"]
    assert set(page.sections) >= {
        "timeline",
        "latency",
        "endpoints",
        "failures",
        "fields",
        "sample",
    }


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
    page = run.page(ReportInfo("my <run>", [("model", HOSTILE)], [HOSTILE], frozenset([HOSTILE])))
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in page.tags}
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]
    assert HOSTILE[:30] in page.sections["sample"]


def test_the_page_asks_the_network_for_nothing(run):
    run.result(0)
    run.attempt(0, "http://fast:8000", 1.0)
    page = run.page()
    linked = [a for tag, attrs in page.tags for a in attrs if a in ("src", "srcset")]
    assert linked == []
    assert not {"link", "iframe", "object"} & {tag for tag, _ in page.tags}
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")


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
    run.result(0, cost_usd=0.25, turns=2)
    for n in range(3):
        call = {"name": "lookup", "started": 1.0, "shared": n > 0, "cached": False}
        run.add("tool_calls", row=0, stage="main", answer=0, turn=1, latency_ms=5.0, **call)
    page = run.page()
    assert "lookup\n3\n1\n2\n" in page.sections["tools"]
    assert "$0.25" in page.sections["cost"]


def test_the_prompts_and_the_settings_of_the_job_are_shown_as_text(run):
    run.result(0)
    page = run.page(
        ReportInfo("run", prompts=[("map user", "Say <b>{{ text }}</b>")], settings="a: 1")
    )
    shown = page.sections["job"]
    assert "prompt: map user" in shown
    assert "Say <b>{{ text }}</b>" in shown
    assert "a: 1" in shown


def test_long_texts_do_not_make_a_long_page(run):
    for row in range(400):
        run.result(row, text="<" * 10_000, input={"a": "&" * 10_000})
    run.fill()
    page = make_page(run.connection, ReportInfo("long"))
    assert len(page.encode()) < 2_000_000
    assert "1 of" not in page
