"""The fleet behind a proxy while it serves: what joins, leaves, hangs and ends."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bagent.backends.endpoint import Endpoint
from bagent.proxy.server import Proxy, ProxyConfig, plain_states, start_proxy
from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jumping_loop import run_shifted, skip
from support.proxy_calls import Work, ask, chat, post_chat, rows_of, running_proxy
from support.replies import delta, gated, hang, ok, stream


def behind(servers: dict[str, FakeServer], work: Work, run: Path) -> Any:
    """What ``work`` returns, done on a shifted clock against a proxy in front of the servers."""

    async def main() -> Any:
        states = plain_states(endpoints(servers), 8)
        async with (
            start_proxy(states, ProxyConfig(port=0, drain=0.0), run, lambda _: None) as proxy,
            aiohttp.ClientSession() as session,
        ):
            return await work(proxy, session)

    return run_shifted(main())


def endpoints(servers: dict[str, FakeServer]) -> list[Endpoint]:
    return [Endpoint(name, server.url, own=True) for name, server in servers.items()]


async def get(proxy: Proxy, session: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    url = proxy.url.removesuffix("/v1") + path
    async with session.get(url) as answer:
        return answer.status, await answer.json()


async def ahead(seconds: float) -> None:
    """Set the clock ahead, and let the proxy look at what that means."""
    skip(seconds)
    await asyncio.sleep(0.2)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.01)


def test_what_joins_and_leaves_shows_in_answers_routes_and_tables(tmp_path):
    async def work(proxy, session):
        held = asyncio.create_task(ask(proxy, session, row="held"))
        await until(lambda: len(old.requests) == 1)
        proxy.lessor.join(plain_states(endpoints({"new": new}), 8))
        proxy.lessor.leave(["old"])
        before = await get(proxy, session, "/health"), await get(proxy, session, "/v1/models")
        codes = [(await ask(proxy, session))[0] for _ in range(5)]
        assert not held.done()
        old.release()
        return before, codes, (await held)[0], len(proxy.lessor.states)

    script = {"held": [gated(ok("yes"))], "*": [ok("yes")]}
    with FakeServer(script, model="one") as old, FakeServer(model="two") as new:
        (health, models), codes, kept, left = behind({"old": old}, work, tmp_path / "run")
        assert (len(old.requests), len(new.requests)) == (1, 5)
    assert health == (200, {"endpoints": 1, "up": 1})
    assert [one["id"] for one in models[1]["data"]] == ["two"]
    assert (codes, kept, left) == ([200] * 5, 200, 1)
    assert {row["endpoint"] for row in rows_of(tmp_path / "run")} == {"old", "new"}
    query = 'select endpoint, reason from endpoints order by "at"'
    told = run_bagent(["query", "run", query, "--format", "jsonl"], tmp_path)
    assert told.code == 0, told.err
    assert {(line["endpoint"], line["reason"]) for line in told.lines()} >= {
        ("old", "begin"),
        ("new", "joined"),
        ("old", "left the hostfile"),
    }
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [one["name"] for one in info["endpoints"]] == ["old", "new"]


def test_a_client_of_a_hanging_endpoint_is_answered_by_another(tmp_path):
    async def work(proxy, session):
        first = [asyncio.create_task(ask(proxy, session, row="first")) for _ in range(2)]
        await until(lambda: bool(hung.requests) and any(one.done() for one in first))
        assert (await ask(proxy, session))[0] == 200
        await ahead(61.0)
        await until(lambda: any(seen.method == "POST" for seen in hung.probes))  # the proof
        health = await get(proxy, session, "/health")
        await ahead(31.0)
        codes = [(await one)[0] for one in first]
        hung.set_script({"*": [ok("yes")]})
        await ahead(6.0)
        await until(lambda: all(not state.unresponsive for state in proxy.lessor.states))
        after = [(await ask(proxy, session))[0] for _ in range(4)]
        return health, codes, after

    with FakeServer({"*": [hang()]}) as hung, FakeServer({"*": [ok("yes")]}) as well:
        health, codes, after = behind({"hung": hung, "well": well}, work, tmp_path / "run")
        assert len(hung.requests) >= 3
    assert health == (200, {"endpoints": 2, "up": 1})
    assert (codes, after) == ([200] * 2, [200] * 4)
    assert {row["status"] for row in rows_of(tmp_path / "run")} == {"ok"}


def test_a_stream_that_goes_silent_is_broken_off_for_the_client_and_blamed(tmp_path):
    async def work(proxy, session):
        sent = chat(stream=True)
        async with session.post(f"{proxy.url}/chat/completions", json=sent) as answer:
            piece = await answer.content.readany()
            await ahead(121.0)
            try:
                await answer.read()
            except aiohttp.ClientPayloadError:
                return piece
        raise AssertionError("it ended well")

    silent = stream([delta("a"), delta("b", "stop")], gap=60.0)
    with FakeServer({"*": [silent]}) as fs:
        assert b'"a"' in behind({"e0": fs}, work, tmp_path / "run")
    (row,) = rows_of(tmp_path / "run")
    assert (row["status"], row["error_kind"]) == ("failed", "timeout")
    assert "nothing more for 120 s" in row["error"]


@pytest.mark.process("concurrent")
def test_an_edited_hostfile_takes_effect_while_clients_ask_and_none_of_them_fails(tmp_path):
    with ExitStack() as stack:
        old, new = (stack.enter_context(FakeServer()) for _ in range(2))
        proxy = running_proxy(stack, tmp_path, old)
        url, codes, over = proxy.out.strip(), [], threading.Event()

        def client() -> None:
            while not over.is_set():
                codes.append(post_chat(url))

        asking = threading.Thread(target=client)
        asking.start()
        try:
            old.wait_for(5)
            (tmp_path / "hosts").write_text(f"{new.address} max_concurrency=2\n")
            proxy.wait_for_err("hosts changed: ")
            new.wait_for(5)
            count = len(old.requests)
            new.wait_for(len(new.requests) + 20)
        finally:
            over.set()
            asking.join()
        proxy.send(signal.SIGTERM)
        done = proxy.finish()
        assert len(old.requests) == count
    assert done.code == 0, done.err
    assert set(codes) == {200}
    assert {row["status"] for row in rows_of(tmp_path / "run")} == {"ok"}


@pytest.mark.process("signal")
def test_a_signal_lets_what_is_in_flight_end_and_a_second_one_does_not(tmp_path):
    with ExitStack() as stack:
        fs = stack.enter_context(FakeServer({"held": [gated(ok("yes"))], "*": [hang()]}))
        proxy = running_proxy(stack, tmp_path, fs)
        codes: list[int | None] = []

        def client(row: str) -> None:
            codes.append(post_chat(proxy.out.strip(), row))

        clients = [threading.Thread(target=client, args=(row,)) for row in ("held", "other")]
        for one in clients:
            one.start()
        fs.wait_for(2)
        proxy.send(signal.SIGTERM)
        proxy.wait_for_err("2 requests are in flight")
        fs.release()
        clients[0].join(20)
        proxy.send(signal.SIGTERM)
        done = proxy.finish(timeout=20)
        clients[1].join(20)
    assert (done.code, codes) == (0, [200, None])
    rows = {row["status"]: row["error"] for row in rows_of(tmp_path / "run")}
    assert rows == {"ok": None, "failed": "the proxy ended before the answer"}
