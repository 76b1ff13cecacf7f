"""What is kept of requests: each has one row, in its result and in its attempts."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import ExitStack

import pytest

from bagent.proxy.metering import ProxyRecord, UsageMeter, usage_in
from bagent.proxy.server import without_preamble
from support.fake_server import FakeServer
from support.proxy_calls import ask, post_chat, rows_of, running_proxy, through
from support.replies import gated, ok, status


def attempts_of(run):
    """The row, name and try of each attempt."""
    lines = "".join(p.read_text() for p in sorted(run.glob("journal/attempts-*.jsonl")))
    found = [json.loads(line) for line in lines.splitlines()]
    return [(one["row"], one["id"], one["try"]) for one in found]


def test_attempts_of_requests_that_overlap_have_the_row_of_their_result(tmp_path):
    async def work(proxy, session):
        slow = asyncio.ensure_future(
            ask(proxy, session, row="slow", headers={"X-Bagent-Row": "slow"})
        )
        await asyncio.to_thread(fs.wait_for, 2)
        for name in ("quick", "last"):
            await ask(proxy, session, row=name, headers={"X-Bagent-Row": name})
        fs.release()
        return (await slow)[0]

    script = {"slow": [status(503), gated(ok("yes"))], "*": [ok("yes")]}
    with FakeServer(script) as fs:
        assert through([fs.url, fs.url], work, tmp_path / "run") == 200
    rows = {row["id"]: row["row"] for row in rows_of(tmp_path / "run")}
    assert rows == {"slow": 0, "quick": 1, "last": 2}
    attempts = attempts_of(tmp_path / "run")
    assert sorted(attempts) == [(0, "slow", 1), (0, "slow", 2), (1, "quick", 1), (2, "last", 1)]


def noted(run, *names):
    """A start of a meter with a request of each of these names."""
    meter = UsageMeter(run, ["e"], print)
    for name in names:
        record = ProxyRecord(name, "/chat/completions", 1.0)
        record.attempts, record.endpoint = 1, "e"
        meter.attempt(record, 1.0, None)
        meter.request(record)
    meter.close(0)


def test_rows_are_numbered_on_after_a_start_that_ended(tmp_path):
    noted(tmp_path, "a", "b")
    noted(tmp_path, "c")
    assert {row["id"]: row["row"] for row in rows_of(tmp_path)} == {"a": 0, "b": 1, "c": 2}


@pytest.mark.process("kill")
def test_rows_are_numbered_on_after_a_start_that_was_killed(tmp_path):
    with ExitStack() as stack:
        proxy = running_proxy(stack, tmp_path, stack.enter_context(FakeServer()))
        assert [post_chat(proxy.out.strip()) for _ in range(3)] == [200] * 3
        proxy.send(signal.SIGKILL)
        proxy.finish()
    noted(tmp_path / "run", "later")
    rows = rows_of(tmp_path / "run")  # the last of the three may not have been written yet
    assert [row["row"] for row in rows] == list(range(len(rows)))
    assert len(rows) >= 3 and rows[-1]["id"] == "later"


def events(*bodies):
    """A stream of these events."""
    lines = [f"event: {b.get('type', 'x')}\ndata: {json.dumps(b)}\n\n" for b in bodies]
    return "".join(lines).encode()


def counts(usage):
    return usage.prompt, usage.cached, usage.completion, usage.reasoning


RESPONSE = {
    "object": "response",
    "model": "m",
    "usage": {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 6},
    },
}


STARTED = {"input_tokens": 2, "cache_read_input_tokens": 5, "output_tokens": 1}
MESSAGE = {"type": "message", "model": "m", "usage": STARTED}
MESSAGE_START = events({"type": "message_start", "message": MESSAGE})
MESSAGE_END = events(
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 11, "input_tokens": None}},
    {"type": "message_stop"},
)
CHUNK = {"model": "m", "choices": []}
CHUNKS = events(
    *(CHUNK | {"usage": usage} for usage in ({"prompt_tokens": 1}, {"prompt_tokens": 5}, None))
)


@pytest.mark.parametrize(
    ("tail", "head", "expected", "model"),
    [
        (CHUNKS + b"data: [DONE]\n\n", b"", (5, None, None, None), "m"),
        (json.dumps(RESPONSE).encode(), b"", (9, 8, 7, 6), "m"),
        (
            events(
                {"type": "response.created", "response": {**RESPONSE, "usage": None}},
                {"type": "response.completed", "response": RESPONSE},
            ),
            b"",
            (9, 8, 7, 6),
            "m",
        ),
        (json.dumps(MESSAGE).encode(), b"", (7, 5, 1, None), "m"),
        (MESSAGE_END, MESSAGE_START, (7, 5, 11, None), "m"),
        (MESSAGE_END, b"", (None, None, 11, None), None),
        (b"no json", b"", (None,) * 4, None),
        (b'data: {"usage": 3}', b"", (None,) * 4, None),
        (b'{"usage":[1]}', b"", (None,) * 4, None),
    ],
    ids=["chat stream", "response", "response stream", "message", "message stream",
         "end of a message stream", "no JSON", "no counts", "a list of counts"],
)  # fmt: skip
def test_the_tokens_of_an_answer_are_counted_by_its_protocol(tail, head, expected, model):
    usage, named = usage_in(tail, head)
    assert (counts(usage), named) == (expected, model)


def test_the_kept_end_of_a_long_stream_may_begin_anywhere():
    stream = events(*[{"choices": [{"delta": {"content": "hello"}}]}] * 3)
    stream += events({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}})
    for start in range(100):
        assert counts(usage_in(stream[start:], stream)[0]) == (5, None, 7, None)


def test_session_lines_that_begin_a_text_are_dropped():
    lines = b"x-anthropic-billing-header: cc=1; v=2\\n"
    body = b'{"system":"' + lines + b'You are.","user":"x-amz-id: 1 is mine"}'
    assert without_preamble(body) == b'{"system":"You are.","user":"x-amz-id: 1 is mine"}'
