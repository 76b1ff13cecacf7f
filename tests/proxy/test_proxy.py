"""The proxy between a client and scripted servers: what it passes on, and to which of them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from bagent.errors import UsageError
from bagent.proxy.forward import client_name, session_name
from support.fake_server import FakeServer
from support.proxy_calls import ask, chat, rows_of, through
from support.replies import close, delta, ok, raw, status, stream


def test_a_request_goes_through_as_it_is_with_the_endpoints_own_key(tmp_path):
    with FakeServer({"r1": [ok("yes")]}) as fs:
        code, body = through([fs.url], lambda p, s: ask(p, s, temperature=0.5), tmp_path / "run")
        (seen,) = fs.requests
    assert code == 200
    assert body["choices"][0]["message"]["content"] == "yes"
    assert seen.body["temperature"] == 0.5
    assert seen.headers["authorization"] == "Bearer own"


LOGIN_PAGE = raw(b"<html>login", "text/html")


@pytest.mark.parametrize("bad", [close(), status(429), status(401), LOGIN_PAGE])
def test_a_bad_endpoint_is_passed_over_and_then_rests(tmp_path, bad):
    async def work(proxy, session):
        return [await ask(proxy, session) for _ in range(20)]

    with FakeServer({"*": [bad]}) as ill, FakeServer({"*": [ok("yes")]}) as well:
        answers = through([ill.url, well.url], work, tmp_path / "run")
        assert 0 < len(ill.requests) <= 10
    assert [code for code, _ in answers] == [200] * 20
    rows = rows_of(tmp_path / "run")
    shown = [(row["status"], row["completion_tokens"], row["endpoint"]) for row in rows]
    assert shown == [("ok", 1, "e1")] * 20


def test_a_request_that_two_endpoints_refuse_alike_is_asked_no_more_and_nobody_rests(tmp_path):
    async def work(proxy, session):
        return [await ask(proxy, session) for _ in range(12)]

    with ExitStack() as stack:
        fleet = [stack.enter_context(FakeServer({"*": [status(403)]})) for _ in range(4)]
        answers = through([one.url for one in fleet], work, tmp_path / "run")
        asked = [seen for one in fleet for seen in one.requests]
    assert {code for code, _ in answers} == {403}
    assert len(asked) == 24
    assert all(one.requests for one in fleet)


def test_where_nobody_answers_the_failure_is_told_in_openais_form(tmp_path):
    with FakeServer() as fs:
        url = fs.url
    code, body = through([url], ask, tmp_path / "run", patience=1.0)
    assert code in (502, 503)
    assert any(words in body["error"]["message"] for words in ("cannot connect", "no endpoint"))
    (row,) = rows_of(tmp_path / "run")
    assert row["status"] == "failed"


def test_a_refusal_of_the_request_itself_is_passed_on_and_not_tried_elsewhere(tmp_path):
    with FakeServer({"*": [status(400, {"error": {"message": "too long"}})]}) as fs:
        code, body = through([fs.url, fs.url], ask, tmp_path / "run")
        assert len(fs.requests) == 1
    assert (code, body["error"]["message"]) == (400, "too long")
    (row,) = rows_of(tmp_path / "run")
    assert (row["status"], row["error_kind"]) == ("failed", "rejected")
    assert "too long" in row["error"]


def test_a_client_is_told_to_come_back_no_earlier_than_the_server_says(tmp_path):
    async def work(proxy, session):
        async with session.post(f"{proxy.url}/chat/completions", json=chat()) as answer:
            return answer.status, answer.headers["Retry-After"]

    full = status(429, {"error": {"message": "slow"}}, headers={"Retry-After": "2.4"})
    with FakeServer({"*": [full]}) as fs:  # each of four endpoints is asked once
        told = through([fs.url] * 4, work, tmp_path / "run")
    assert told == (429, "3")


@pytest.mark.parametrize("code", [400, 401])
def test_the_endpoints_key_stands_in_no_refusal(tmp_path, code):
    words = {"error": {"message": "wrong key: a-key-of-mine"}}
    headers = {"Authorization": "Bearer a-key-of-mine"}
    with FakeServer({"*": [status(code, words)]}) as fs:
        told, body = through([fs.url], ask, tmp_path / "run", headers=headers)
    assert (told, body["error"]["message"].rpartition(": ")[2]) == (code, "***")
    (row,) = rows_of(tmp_path / "run")
    assert "wrong key: ***" in row["error"]


def test_a_stream_passes_piece_by_piece_and_its_tokens_are_counted(tmp_path):
    async def work(proxy, session):
        sent = chat(stream=True, stream_options={"include_usage": True})
        async with session.post(f"{proxy.url}/chat/completions", json=sent) as answer:
            assert answer.content_type == "text/event-stream"
            return [piece async for piece in answer.content.iter_any()]

    chunks = [delta("a"), delta("b", "stop")]
    with FakeServer({"r1": [stream(chunks, gap=0.1)]}) as fs:
        pieces = through([fs.url], work, tmp_path / "run")
    assert len(pieces) >= 2
    text = b"".join(pieces)
    assert text.endswith(b"data: [DONE]\n\n")
    (row,) = rows_of(tmp_path / "run")
    assert row["status"] == "ok"
    assert row["ttft_ms"] is not None


def test_a_port_that_is_taken_leaves_no_run_directory(tmp_path):
    with FakeServer() as fs, pytest.raises(UsageError, match="cannot listen"):
        through([fs.url], ask, tmp_path / "run", port=fs.port)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer bagent-{}"}, {"x-api-key": "bagent-{}"}, {"X-Bagent-Row": "{}"},
        {"x-session-id": "{}"}, {"X-Claude-Code-Session-Id": "{}"},
    ],
    ids=lambda headers: next(iter(headers)),
)  # fmt: skip
def test_a_conversation_goes_on_where_its_context_is(tmp_path, headers):
    def of(name):
        return {key: value.format(name) for key, value in headers.items()}

    async def work(proxy, session):
        for _ in range(4):
            for name in ("one", "two"):
                await ask(proxy, session, row=name, headers=of(name))

    with FakeServer({"*": [ok("yes")]}) as first, FakeServer({"*": [ok("yes")]}) as second:
        through([first.url, second.url], work, tmp_path / "run")
        told = [{seen.rows for seen in server.requests} for server in (first, second)]
    assert sorted(map(len, told)) == [1, 1]


def test_it_goes_elsewhere_where_its_endpoint_is_full_or_fails(tmp_path):
    async def work(proxy, session):
        mine = {"X-Bagent-Row": "mine"}
        await ask(proxy, session, headers=mine)
        (home,) = (server for server in (first, second) if server.requests)
        other = second if home is first else first
        home.set_script({"*": [close()]})
        code, _ = await ask(proxy, session, headers=mine)
        home.set_script({"*": [ok("yes")]})
        again = len(other.requests)
        await ask(proxy, session, headers=mine)
        return code, again, len(other.requests)

    with FakeServer({"*": [ok("yes")]}) as first, FakeServer({"*": [ok("yes")]}) as second:
        assert through([first.url, second.url], work, tmp_path / "run") == (200, 1, 2)


def test_a_wrong_model_s_name_is_told_to_who_asked_and_rests_nobody(tmp_path):
    async def work(proxy, session):
        codes = [(await ask(proxy, session, row="wrong"))[0] for _ in range(12)]
        return codes, [(await ask(proxy, session, row="right"))[0] for _ in range(6)]

    script = {"wrong": [status(404)], "right": [ok("yes")]}
    with FakeServer(script) as first, FakeServer(script) as second:
        wrong, right = through([first.url, second.url], work, tmp_path / "run")
        assert first.count("right") == second.count("right") == 3
    assert wrong == [404] * 12 and right == [200] * 6
    assert {row["error_kind"] for row in rows_of(tmp_path / "run")} == {None, "rejected"}


@pytest.mark.parametrize(("own", "told"), [(False, "tools-1"), (True, None)])
def test_what_a_hosted_api_is_told_by_a_client_s_headers_is_passed_on(tmp_path, own, told):
    async def work(proxy, session):
        await ask(proxy, session, headers={"Anthropic-Beta": "tools-1", "Cookie": "mine"})

    with FakeServer({"*": [ok("yes")]}) as fs:
        through([fs.url], work, tmp_path / "run", own=own)
        headers = fs.requests[0].headers
    assert headers.get("anthropic-beta") == told
    assert "cookie" not in headers


def test_a_request_is_named_by_its_row_before_its_own_id():
    headers = {"X-Request-Id": "q7", "X-Session-Id": "s1", "x-api-key": "sk-secret"}
    assert (client_name(headers), session_name(headers)) == ("q7", "s1")
    headers["x-api-key"] = "bagent-r1"
    assert (client_name(headers), session_name(headers)) == ("r1", "r1")
    assert (client_name({}), session_name({})) == (None, None)
