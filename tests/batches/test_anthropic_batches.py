"""Rows through Anthropic's Message Batches, with every type of result."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from support.batch_runs import BEGIN, Killed, Options, Run, assert_ok, row, run_through, statuses
from support.batch_services import AnthropicServer, Course, by_row, ended_as, message

OVER = ("in_progress", "ended")


def go(folder: Path, server: AnthropicServer, count: int, **options: Any) -> Run:
    rows = [row(n, text="é" * n) for n in range(count)]
    return run_through(folder, server, rows, Options(kind="anthropic", **options))


def test_requests_go_in_one_body_of_a_told_length(tmp_path: Path) -> None:
    server = AnthropicServer()
    run = go(tmp_path, server, 30)
    assert_ok(run, 30)
    assert server.complaints == []
    assert len(server.made[0]["lines"]) == 30
    assert server.length == run.records[0].bytes + len('{"requests":[]}') - 1
    line = run.outcomes["r0"]
    assert (line["text"], line["prompt_tokens"], line["group"]) == ("fine", 7, "msgbatch_1")
    assert run.files == []


def test_every_type_of_result_is_read(tmp_path: Path) -> None:
    answer = by_row(
        message(),
        r1=ended_as("errored", {"type": "invalid_request_error", "message": "bad image"}),
        r2=ended_as("errored", {"type": "api_error", "message": "Internal server error"}),
        r3=ended_as("errored", {"type": "overloaded_error", "message": "Overloaded"}),
        r4=ended_as("expired"),
        r5=ended_as("canceled"),
        r6=message("no", stop="refusal"),
        r7=message("half", stop="max_tokens"),
    )
    server = AnthropicServer(Course(OVER, answer), Course(OVER, message()))
    run = go(tmp_path, server, 8)
    assert run.error is None
    assert [len(batch["lines"]) for batch in server.made] == [8, 4]
    found = statuses(run)
    assert {found[f"r{n}"] for n in (0, 2, 3, 4, 5)} == {"ok"}
    assert (found["r1"], found["r6"], found["r7"]) == ("failed", "refused", "truncated")
    assert run.outcomes["r1"]["error_kind"] == "rejected"
    assert "bad image" in run.outcomes["r1"]["error"]


def test_a_late_batch_is_cancelled_and_rows_without_an_answer_are_sent_singly(
    tmp_path: Path,
) -> None:
    server = AnthropicServer(Course(("in_progress",), message()))
    run = go(tmp_path, server, 20, late_at=BEGIN + 3600)
    assert_ok(run, 20)
    assert Counter(line["text"] for line in run.outcomes.values()) == {"fine": 10, "single": 10}
    assert (server.cancels, len(server.made), server.complaints) == (1, 1, [])


def test_a_batch_that_has_just_ended_cannot_be_cancelled_and_is_read(tmp_path: Path) -> None:
    server = AnthropicServer(Course(("in_progress", "ended"), message()))
    run = go(tmp_path, server, 20, late_at=BEGIN + 3)
    assert_ok(run, 20)
    assert Counter(line["text"] for line in run.outcomes.values()) == {"fine": 20}
    assert (server.cancels, len(server.made)) == (0, 1)


def test_a_batch_of_somebody_else_is_not_taken_for_ours(tmp_path: Path) -> None:
    lost = Course(OVER, message(), create=(500, {"type": "api_error", "message": "?"}), made=True)
    server = AnthropicServer(lost)
    first = go(tmp_path, server, 3, kill_save=(4, "before"))
    assert isinstance(first.error, Killed)
    server.add_foreign(3, "ended")
    server.add_foreign(3, "in_progress", "in_progress", "ended")
    run = go(tmp_path, server, 3)
    assert_ok(run, 3)
    assert {line["text"] for line in run.lines} == {"fine"}
    assert [batch["id"] for batch in server.made].count("msgbatch_1") == 1
    assert server.tries == 1
    assert run.records[0].batch_id == "msgbatch_1"
