"""Which endpoint a conversation goes on at, and what missing routes and models say of one."""

from __future__ import annotations

import pytest

from bagent.proxy.forward import client_name, session_name
from support.fake_server import FakeServer
from support.proxy_calls import ask, rows_of, through
from support.replies import close, ok, status


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
