"""Who a proxy lets in, and which paths reach an endpoint."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import stat
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bagent.backends.endpoint import Endpoint
from bagent.errors import UsageError
from bagent.proxy.auth import holds_key, is_token
from bagent.proxy.server import listen_unix
from support.cli import Running
from support.fake_server import FakeServer
from support.proxy_calls import ask, chat, rows_of, running_proxy, through
from support.replies import ok


async def raw_status(proxy, method, path, headers):
    """The status of one request whose path and headers go out as they are."""
    host, port = proxy.url.split("/")[2].rsplit(":", 1)
    body = json.dumps(chat())
    lines = [f"{method} {path} HTTP/1.1", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in ({"Host": host} | headers).items()]
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions?beta=true", "/v1/chat/completions"),
        ("/v1/chat/%63ompletions", "/v1/chat/completions"),
        ("/v1/../admin/keys", None),
        ("/v1/%2e%2e/sleep", None),
        ("/v1/..%2fupdate_weights", None),
        ("/v1/chat/completions%3fx", None),
        ("/v1/chat%2fcompletions", None),
        ("/v1//chat/completions", None),
        ("/v1/chat/completions/../../load_lora_adapter", None),
        ("/v1/chat\\completions", None),
        ("/v1/load_lora_adapter", None),
        ("http://attacker.example/v1/chat/completions", None),
    ],
)
def test_only_known_routes_reach_an_endpoint(tmp_path, path, expected):
    with FakeServer({"*": [ok("yes")]}) as fs:
        code = through([fs.url], lambda p, _: raw_status(p, "POST", path, {}), tmp_path / "run")
        paths = [request.path for request in fs.requests]
    assert (paths, code < 400) == (([expected], True) if expected else ([], False))


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"Host": "localhost:8080"}, True),
        ({"Origin": "http://localhost:3000"}, True),
        ({"Host": "rebound.attacker.example"}, False),
        ({"Host": "localhost@attacker.example"}, False),
        ({"Host": "attacker.example@localhost"}, False),
        ({"Host": "127.0.0.1.attacker.example"}, False),
        ({"Host": "0.0.0.0:8080"}, False),
        ({"Host": ""}, False),
        ({"Origin": "http://127.0.0.1.attacker.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://["}, False),
        ({"Origin": "http://localhost\r\nOrigin: http://attacker.example"}, False),
    ],
    ids=lambda value: " ".join(map(": ".join, value.items())) if isinstance(value, dict) else "",
)
def test_foreign_host_and_origin_are_refused(tmp_path, headers, allowed):
    async def work(proxy, _):
        posted = await raw_status(proxy, "POST", "/v1/chat/completions", headers)
        return posted, await raw_status(proxy, "GET", "/v1/models", headers)

    with FakeServer({"*": [ok("yes")]}) as fs:
        codes = through([fs.url], work, tmp_path / "run")
        assert bool(fs.requests) == allowed
    assert codes == ((200, 200) if allowed else (403, 403)) or codes == (400, 400)


def test_the_token_is_required_and_an_open_address_needs_one(tmp_path):
    async def work(proxy, session):
        codes = {}
        for value in ("", "Bearer no", "Bearer t0ken", "bearer  t0ken", "Bearer t0kenx"):
            async with session.get(
                f"{proxy.url}/models", headers={"Authorization": value} if value else {}
            ) as answer:
                codes[value] = answer.status
        for key in ("t0ken", "t0ken:row 7", "t0ken:", "t0ke", ":row"):
            codes[key] = (await ask(proxy, session, headers={"x-api-key": key}))[0]
        return codes

    with FakeServer({"*": [ok("yes")]}) as fs:
        codes = through([fs.url], work, tmp_path / "run", token="t0ken")
        with pytest.raises(UsageError, match="open to others"):
            through([fs.url], work, tmp_path / "other", host="0.0.0.0")
    assert {key for key, code in codes.items() if code == 200} == {
        *("Bearer t0ken", "bearer  t0ken", "t0ken", "t0ken:row 7", "t0ken:")
    }
    assert set(codes.values()) == {200, 401}
    assert "row 7" in {row["id"] for row in rows_of(tmp_path / "run")}


@pytest.mark.parametrize("given", ["t0ken\udcff", "é", ""])
def test_a_token_of_any_bytes_is_only_a_wrong_one(given):
    assert not is_token(given, "t0ken")


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        (Endpoint("e", "u", {"Content-Type": "application/json"}), False),
        (Endpoint("e", "u", {"Content-Type": "a", "anthropic-version": "2023-06-01"}), False),
        (Endpoint("e", "u", {"Authorization": "Bearer k"}), True),
        (Endpoint("e", "u", {"x-goog-iap-jwt-assertion": "k"}), True),
        (Endpoint("e", "u", query={"k": "s"}), True),
    ],
)
def test_whatever_else_a_request_carries_counts_as_a_key(endpoint, expected):
    assert holds_key(endpoint) is expected


def post(connection, key=""):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(chat()), headers)
        return connection.getresponse().status


@pytest.mark.process("signal")
def test_a_proxy_with_a_key_behind_it_makes_a_token_and_says_how_to_send_it(tmp_path):
    with ExitStack() as stack:
        fs = stack.enter_context(FakeServer({"*": [ok("yes")]}))
        proxy = running_proxy(stack, tmp_path, fs, VLLM_API_KEY="sk-own")
        path = tmp_path / "run" / "token"
        assert f'OPENAI_API_KEY="$(cat {path})"' in proxy.err
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        token = path.read_text().strip()
        address = proxy.out.split("/")[2]
        codes = [post(http.client.HTTPConnection(address), key) for key in ("", token)]
        proxy.send(signal.SIGTERM)
        done = proxy.finish()
        assert [request.headers["authorization"] for request in fs.requests] == ["Bearer sk-own"]
    assert (codes, done.code, path.exists()) == ([401, 200], 0, False)
    assert token not in done.err + done.out


class UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


@pytest.mark.process("signal")
def test_a_unix_socket_is_for_its_owner_and_gone_at_the_end(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with FakeServer({"*": [ok("yes")]}) as fs:
        (tmp_path / "hosts").write_text(f"{fs.address}\n")
        args = ["proxy", "--hostfile", "hosts", "--unix", "s", "-o", "run"]
        with Running(args, tmp_path, {"VLLM_API_KEY": "sk-own"}) as proxy:
            proxy.wait_for_err("next: curl --unix-socket s")
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert post(UnixConnection(path)) == 200
            with pytest.raises(UsageError, match="another process serves"):
                listen_unix(path)
            proxy.send(signal.SIGTERM)
            assert proxy.finish().code == 0
    assert not path.exists()
    path.write_text("")
    with pytest.raises(UsageError, match="no socket"):
        listen_unix(path)
    with pytest.raises(UsageError, match="longer than"):
        listen_unix(tmp_path / ("s" * 108))
