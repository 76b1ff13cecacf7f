"""Faults on purpose: each shows as the client would meet it, as often as it is counted."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest

from support.sim_client import on_sim, play

FAST = "speedup=1000"


async def _statuses(client, number: int) -> list[int]:
    return [(await client.post("/v1/completions", {"prompt": "x"}))[0] for _ in range(number)]


def test_429_rate_is_seeded_and_counted() -> None:
    runs: list[list[int]] = []

    async def scene(client) -> None:
        runs.append(await _statuses(client, 60))
        counted = client.sim.replicas[0].faults.counts["rate_429"]
        assert runs[-1].count(429) == counted
        assert set(runs[-1]) == {200, 429}
        assert (
            f'bagent_sim_faults_total{{kind="rate_429"}} {float(counted)}'
            in (await client.get("/metrics"))[1]
        )

    play(FAST + "&rate_429=0.3", scene)
    play(FAST + "&rate_429=0.3", scene)
    play(FAST + "&rate_429=0.3&seed=1", scene)
    assert runs[0] == runs[1] != runs[2]
    assert 8 <= runs[0].count(429) <= 28


@on_sim("max_num_seqs=2&max_queue=3")
async def test_full_queue_answers_503_without_a_wait(client) -> None:
    body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}
    replies = await asyncio.gather(*(client.post("/v1/completions", body) for _ in range(20)))
    statuses = [status for status, _ in replies]
    assert (statuses.count(200), statuses.count(503)) == (5, 15)
    (error, *_) = (reply["error"] for status, reply in replies if status == 503)
    assert error["type"] == "Service Unavailable"
    assert client.sim.replicas[0].faults.counts["overload"] == 15


@on_sim("decode=100000&stall_rate=1&stall=200ms")
async def test_stalled_requests_get_no_byte_for_the_time(client) -> None:
    begun = time.perf_counter()
    status, _ = await client.post("/v1/completions", {"prompt": "x"})
    assert status == 200
    assert time.perf_counter() - begun >= 0.2
    limit = aiohttp.ClientTimeout(total=0.05)
    with pytest.raises(TimeoutError):
        await client.post("/v1/completions", {"prompt": "x"}, timeout=limit)
    assert client.sim.replicas[0].faults.counts["stall"] == 2


@on_sim("decode=1000&cut_rate=1")
async def test_cut_streams_end_half_way_inside_an_event(client) -> None:
    url = client.url + "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 20}
    got = b""
    with pytest.raises(aiohttp.ClientPayloadError):
        async with client.session.post(url, json={**body, "ignore_eos": True}) as response:
            async for chunk in response.content.iter_any():
                got += chunk
    *whole, torn = got.decode().split("\n\n")
    choices = [json.loads(e.removeprefix("data: "))["choices"][0] for e in whole]
    assert sum(len(c["delta"]["content"]) for c in choices) == 4 * 10
    assert all(c["finish_reason"] is None for c in choices)
    assert torn == 'data: {"id":'


@on_sim(FAST)
async def test_a_client_that_leaves_a_stream_is_no_error_of_the_server(
    client, caplog, monkeypatch
) -> None:
    async def write(*_: object) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(aiohttp.web.StreamResponse, "write", write)
    with pytest.raises(aiohttp.ClientError):
        await client.events("/v1/completions", {"prompt": "x"})
    assert caplog.messages == []


@on_sim(FAST + "&malformed_rate=1")
async def test_malformed_answers_are_200_and_no_json(client) -> None:
    with pytest.raises(json.JSONDecodeError):
        await client.post("/v1/completions", {"prompt": "x"})
    with pytest.raises(json.JSONDecodeError):
        await client.events("/v1/completions", {"prompt": "x", "max_tokens": 16})
    body = {"prompt": "x", "max_tokens": 1, "stream": True}
    async with client.session.post(client.url + "/v1/completions", json=body) as response:
        broken, whole, *_ = (await response.text()).split("\n\n")
    assert broken == 'data: {"id": "broken", "choices": [{"ind'
    assert '"finish_reason":"length"' in whole
    assert client.sim.replicas[0].faults.counts["malformed"] == 3


@on_sim(FAST + "&replicas=2&dead_after=3&faulty=1")
async def test_a_dead_endpoint_closes_its_socket_and_the_others_live(client) -> None:
    dying = client.sim.urls[1] + "/v1/completions"
    for _ in range(3):
        async with client.session.post(dying, json={"prompt": "x"}) as response:
            assert response.status == 200
    with pytest.raises(aiohttp.ClientError):
        await client.session.post(dying, json={"prompt": "x"})
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.session.post(dying, json={"prompt": "x"})
    assert set(await _statuses(client, 10)) == {200}
    assert client.sim.replicas[1].faults.counts["dead"] == 1


@on_sim("speedup=20&replicas=2&slow=5&faulty=1")
async def test_a_slow_replica_is_slower_by_its_factor(client) -> None:
    times = []
    for url in client.sim.urls:
        body = {"prompt": "x", "max_tokens": 11, "ignore_eos": True}
        async with client.session.post(url + "/v1/completions", json=body) as response:
            times.append((await response.json())["metrics"]["mean_itl_ms"])
    assert times[1] == pytest.approx(5 * times[0])
