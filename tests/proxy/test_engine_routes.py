"""What engines tell of themselves, as clients of a proxy read it, and how clients leave."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import ExitStack

import pytest

from bagent.proxy.metering import stream_ended
from bagent.proxy.server import merged_metrics, merged_models
from support.fake_server import FakeServer
from support.http_servers import in_thread
from support.proxy_calls import ask, chat, rows_of, through
from support.replies import delta, gated, ok, raw, status, stream, usage_chunk
from support.routes_server import models, routes_server

MODEL = {"created": 17, "root": "org/m", "max_model_len": 8192, "parent": None}
METRICS = """# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
# TYPE vllm:e2e histogram
vllm:e2e_bucket{le="1"} 2
vllm:e2e_sum 1.5
up 1
"""
ROUTES = {
    "GET /v1/models": models("org/m", "vllm", **MODEL),
    "GET /version": {"version": "0.33.0"},
    "GET /metrics": METRICS,
    "POST /tokenize": {"count": 2, "tokens": [1, 2]},
    "POST /detokenize": {"prompt": "hi"},
}


def asked(tmp_path, routes, *paths, own=True):
    """Status and text of each path behind a proxy before servers with these routes."""

    async def work(proxy, session):
        answers = []
        for method, path in (path.split() for path in paths):
            url = proxy.url.removesuffix("/v1") + path
            async with session.request(method, url, data=b'{"model": "org/m"}') as answer:
                answers.append((answer.status, await answer.text()))
        return answers

    with ExitStack() as stack:
        urls = [stack.enter_context(in_thread(routes_server(one)))[0] for one in routes]
        return through(urls, work, tmp_path / "run", own=own)


def test_what_an_engine_tells_is_passed_on_and_not_metered(tmp_path):
    paths = ["GET /v1/models", "GET /v1/models/org/m", "GET /version", "POST /tokenize",
             "POST /detokenize", "GET /metrics", "GET /health", "GET /v1/models/none"]  # fmt: skip
    answers = asked(tmp_path, [{}, ROUTES], *paths)
    assert [code for code, _ in answers] == [200] * 7 + [404]
    listed, one, version, counted, text = (json.loads(body) for _, body in answers[:5])
    assert listed["data"] == [one]
    assert one == {**MODEL, "id": "org/m", "object": "model", "owned_by": "vllm"}
    assert (version, counted["count"], text["prompt"]) == ({"version": "0.33.0"}, 2, "hi")
    assert 'vllm:num_requests_running{endpoint="e1",engine="0"} 3.0' in answers[5][1]
    assert "none" in answers[7][1]
    assert rows_of(tmp_path / "run") == []


def test_routes_of_engines_are_not_passed_on_to_hosted_apis(tmp_path):
    answers = asked(tmp_path, [ROUTES], "GET /version", "GET /metrics", "POST /tokenize", own=False)
    assert [code for code, _ in answers] == [404] * 3


def test_a_model_of_several_engines_has_the_shortest_context():
    entries = [
        {"id": "m", "owned_by": "vllm", "max_model_len": 8192, "x": 1},
        {"id": "m", "owned_by": "sglang", "max_model_len": 4096},
        {"id": "n", "owned_by": "vllm"},
    ]
    both = {"object": "model", "id": "m", "owned_by": "bagent", "max_model_len": 4096, "x": 1}
    assert merged_models(entries) == {
        "m": both,
        "n": {"object": "model", "id": "n", "owned_by": "vllm"},
    }


def test_metrics_of_several_engines_are_one_exposition():
    lines = merged_metrics([("a", METRICS), ('b"', METRICS)]).splitlines()
    assert lines[2:4] == [
        'vllm:num_requests_running{endpoint="a",engine="0"} 3.0',
        'vllm:num_requests_running{endpoint="b\\"",engine="0"} 3.0',
    ]
    assert lines.count("# TYPE vllm:e2e histogram") == 1
    assert lines[-2:] == ['up{endpoint="a"} 1', 'up{endpoint="b\\""} 1']


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"error": {"message": "No model `m`.", "code": 404}}, "No model `m`."),
        ({"detail": "Not Found"}, "no endpoint of this fleet serves /v1/chat/completions"),
    ],
)
def test_a_404_reaches_the_client_in_the_engines_own_words(tmp_path, body, expected):
    with FakeServer({"*": [status(404, body)]}) as fs:
        code, told = through([fs.url], ask, tmp_path / "run")
    assert (code, expected in told["error"]["message"]) == (404, True)


@pytest.mark.parametrize("bad", [b"", b'{"status": "ok"}'])
def test_a_malformed_200_is_asked_again_and_then_a_502(tmp_path, bad):
    reply = raw(bad, "application/json")
    with FakeServer({"r1": [reply, ok("yes")], "*": [reply]}) as fs:
        code, _ = through([fs.url], ask, tmp_path / "run")
        assert (code, fs.count("r1")) == (200, 2)
        code, told = through([fs.url], lambda p, s: ask(p, s, row="r2"), tmp_path / "run")
    assert (code, told["error"]["type"]) == (502, "bad_response")


def request_of(port, row, until, **more):
    """Send a chat on a socket, read until ``until`` came, and reset the connection."""
    body = json.dumps(chat(row, **more)).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
        client.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
        received = b""
        while until not in received:
            piece = client.recv(65536)
            assert piece, received
            received += piece


def test_how_a_client_leaves_decides_what_is_metered(tmp_path):
    async def work(proxy, session):
        port = int(proxy.url.rsplit(":", 1)[1].removesuffix("/v1"))
        stream_on = {"stream": True, "stream_options": {"include_usage": True}}
        await asyncio.to_thread(request_of, port, "done", b"[DONE]", **stream_on)
        await asyncio.to_thread(request_of, port, "early", b"begun", **stream_on)
        waits = asyncio.ensure_future(ask(proxy, session, row="silent"))
        await asyncio.to_thread(fs.wait_for, 3)
        waits.cancel()
        await asyncio.to_thread(fs.wait_for, 3, "finished")

    chunks = [delta("begun"), delta("b", "stop"), usage_chunk()]
    script = {
        "done": [stream(chunks)],
        "early": [stream(chunks, gap=5.0)],
        "silent": [gated(ok("never"))],
    }
    with FakeServer(script) as fs:
        through([fs.url], work, tmp_path / "run")
    done, early, silent = sorted(rows_of(tmp_path / "run"), key=lambda row: row["row"])
    assert (done["status"], done["completion_tokens"]) == ("ok", 3)
    assert [row["error_kind"] for row in (early, silent)] == ["client_closed"] * 2


@pytest.mark.parametrize(
    ("tail", "ended"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", True),
        (b"event: message_stop\ndata: {}\n\n", True),
        (b"event: response.completed\ndata: {}\n\n", True),
        (b'data: {"text": "data: [DONE]"}\n\n', False),
    ],
)
def test_each_protocol_has_its_mark_of_the_end(tail, ended):
    assert stream_ended(tail, 6) is ended
