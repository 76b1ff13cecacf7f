"""One line of an answer file, in every shape that servers write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bagent.batches.openai import read_batch, read_line
from bagent.types import Failure
from support.batch_runs import assert_ok, run_through
from support.batch_services import Course, OpenAIServer, chat_body, good, refused


def line(response: Any, error: Any = None) -> bytes:
    return json.dumps(
        {"id": "r", "custom_id": "a-1", "response": response, "error": error}
    ).encode()


@pytest.mark.parametrize(
    ("response", "error", "kind", "passing", "words"),
    [
        ({"status_code": 400, "body": {"error": {"message": "bad"}}}, None,
         "rejected", False, "bad"),
        ({"status_code": 200, "body": {"error": {"message": "down", "code": 503}}}, None,
         "overloaded", True, "down"),
        ({"status_code": 200, "body": chat_body("hi")}, {"code": "x", "message": "odd"},
         "overloaded", True, "odd"),
        ({"status_code": 200, "body": None}, None, "bad_response", True, "no choices"),
        ({"status_code": 404, "request_id": "vllm-1"}, {"message": "no model", "code": 404},
         "rejected", False, "no model"),
        ({"status_code": 500, "request_id": "vllm-1", "body": None}, "engine died",
         "overloaded", True, "engine died"),
        (None, {"code": "batch_expired", "message": "too late"}, "timeout", True, "expired"),
        (None, None, "bad_response", True, "neither"),
    ],
)  # fmt: skip
def test_failures_are_told_apart(
    response: Any, error: Any, kind: str, passing: bool, words: str
) -> None:
    _, failure = read_line(line(response, error))
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.passing) == (kind, passing)
    assert words in failure.message


def test_a_batch_object_without_a_status_is_no_batch() -> None:
    assert isinstance(read_batch({"id": "batch_1"}), Failure)
    look = read_batch({"status": "failed", "errors": None})
    assert not isinstance(look, Failure)
    assert look.over
    assert look.faults[0].line is None


Lines = Callable[[list[str]], list[str]]


class OddServer(OpenAIServer):
    """Gives the first batch's lines as ``change`` has them, joined by ``between``."""

    def __init__(self, change: Lines, between: str = "\n") -> None:
        super().__init__(Course(), Course())
        self._change = change
        self._between = between

    async def _content(self, request: web.Request) -> web.Response:
        text = self.files[request.match_info["id"]]
        if request.match_info["id"].startswith("batch_1-"):
            text = self._between.join(self._change(text.split("\n")))
        return web.Response(body=text.encode())


def failed(line: str) -> str:
    """The line of a failure of the same request."""
    asked: Any = {"custom_id": json.loads(line)["custom_id"]}
    return json.dumps(refused(500, "internal")(asked))


ODD: dict[str, tuple[Lines, str]] = {
    "each twice": (lambda lines: [*lines, *lines], "\n"),
    "a failure before its answer": (lambda lines: [failed(lines[1]), *lines], "\n"),
    "a failure after its answer": (lambda lines: [*lines, failed(lines[1])], "\n"),
    "a byte-order mark, blank lines and carriage returns": (
        lambda lines: ["\ufeff" + lines[0], "", *lines[1:], " ", ""],
        "\r\n",
    ),
    "half a line at the end": (lambda lines: [*lines, lines[0][:40]], "\n"),
    "lines that are no objects": (lambda lines: ["[]", "3", "null", "{}", *lines], "\n"),
}


@pytest.mark.parametrize("name", ODD)
def test_every_row_has_its_answer_and_no_second_batch_is_paid_for(
    tmp_path: Path, name: str
) -> None:
    server = OddServer(*ODD[name])
    run = run_through(tmp_path, server, 4)
    assert_ok(run, 4)
    assert len(server.made) == 1


def test_an_answer_with_the_name_of_another_batch_is_not_taken(tmp_path: Path) -> None:
    def renamed(lines: list[str]) -> list[str]:
        first: Any = json.loads(lines[0])
        wrong = {**first, "custom_id": first["custom_id"].replace("b0", "b7")}
        return [json.dumps(wrong), *lines[1:]]

    server = OddServer(renamed)
    server.script[1] = Course(answer=good("second"))
    run = run_through(tmp_path, server, 4)
    assert run.error is None
    assert [len(batch["lines"]) for batch in server.made] == [4, 1]
    assert sorted(line["text"] for line in run.lines) == ["fine", "fine", "fine", "second"]
